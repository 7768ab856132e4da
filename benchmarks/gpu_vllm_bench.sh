#!/usr/bin/env bash
# Benchmarks of vLLM on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_vllm_bench.sh [STEP...]      default: qwen deepseek; seconds are the most that a step takes
#
#   quick      220  five backends on Qwen3-30B-A3B's shape, no torch.compile; ends by itself with what it has measured
#   qwen       420  the same shape, more layers: prefill latency of all backends, decode, agreement, soak
#   deepseek   420  the DeepSeek-V3-like shape: prefill latency
#   load       240  vllm serve under vllm bench serve, stock and ours
#
# On a cold machine five engines took 60 to 67 s to start, 25 s of it for the import of vLLM, and every sample 0.3 s
# beside its own time: data-parallel engines look only every 32 steps whether all of them are done.
#
# Real routes need MEGAFLUX_TRACES. ARGUMENTS are added to those of bench_serving.py.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
export PYTHONPATH="$PYTHONPATH:$work/metadata"
python3 -m benchmarks.entry_points "$work/metadata" >/dev/null || exit
known_steps "quick qwen deepseek load" "$@"
[ $# -gt 0 ] || set -- qwen deepseek

serving() { # name, seconds, options
  local name=$1 limit=$2
  shift 2
  LINES_SHOWN=${LINES_SHOWN:-90} step "$name" "$limit" \
    python3 -m benchmarks.bench_serving --out "$OUT/$name" "$@" ${ARGUMENTS:-}
}
quick() {
  LINES_SHOWN=160 serving quick 220 --models qwen3-30b-a3b --backends stock fixed staged pipelined sticky \
    --parts agreement prefill decode soak --routings real-hot-rank balanced real --running 1 32 --output-tokens 49 \
    --prompts 64 --soak-seconds 10 --layers 8 --start-s 85 --others-s 20 --call-s 15 --deadline-s 200
}
qwen() {
  serving qwen 420 --models qwen3-30b-a3b --parts agreement decode prefill soak --soak-seconds 40
}
deepseek() {
  serving deepseek 420 --models deepseek-v3-like --together 3 --controls balanced real
}
load() {
  serving load 240 --models qwen3-30b-a3b --parts load --load-backends stock sticky
}

run_steps "$@"
