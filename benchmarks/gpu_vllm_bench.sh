#!/usr/bin/env bash
# Benchmarks of vLLM on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_vllm_bench.sh [STEP...]      default: qwen decode deepseek; seconds are the most that a step takes
#
#   qwen       420  Qwen3-30B-A3B's shape, 8 layers, six backends: agreement, prefill latency, soak; took 250 s
#   decode     240  32 layers of the same, four backends, so that the GPUs set the pace and not the front end;
#                  took 195 s on a cold machine, 63 s of it until all engines were warm
#   deepseek   300  the DeepSeek-V3-like shape, 4 layers, four backends: prefill latency; took 130 s
#   load       240  vllm serve under vllm bench serve, stock and ours; and the time to a first answer;
#                  took 168 s, 116 s of it until both had answered
#
# On a cold machine six engines took 70 to 82 s to start, 25 s of it for the import of vLLM, and every sample 0.3 s
# beside its own time: data-parallel engines look only every 32 steps whether all of them are done.
#
# Real routes need MEGAFLUX_TRACES. ARGUMENTS are added to those of bench_serving.py.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
export PYTHONPATH="$PYTHONPATH:$work/metadata"
python3 -m benchmarks.entry_points "$work/metadata" >/dev/null || exit
known_steps "qwen decode deepseek load" "$@"
[ $# -gt 0 ] || set -- qwen decode deepseek

serving() { # name, seconds, options
  local name=$1 limit=$2
  shift 2
  LINES_SHOWN=${LINES_SHOWN:-90} step "$name" "$limit" \
    python3 -m benchmarks.bench_serving --out "$OUT/$name" "$@" ${ARGUMENTS:-}
}
qwen() {
  serving qwen 420 --models qwen3-30b-a3b --parts agreement prefill soak --controls balanced real --soak-seconds 20
}
decode() {
  serving decode 240 --models qwen3-30b-a3b --layers 32 --parts decode --backends stock fixed staged sticky --chunks 8192 \
    --kv-cache-tokens 32768
}
deepseek() {
  serving deepseek 300 --models deepseek-v3-like --backends stock fixed pipelined sticky --together 4 --chunks 16384 \
    --controls balanced real
}
load() {
  serving load 240 --models qwen3-30b-a3b --parts load --load-backends stock sticky
}

run_steps "$@"
