#!/usr/bin/env bash
# Benchmarks of vLLM on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_vllm_bench.sh [STEP...]      default: qwen deepseek; seconds are the most that a step takes
#
#   try        170  one batch of everything with three engines: does it run, what does it take?
#   qwen       330  Qwen3-30B-A3B's shape: prefill latency of all backends, decode, agreement, soak
#   deepseek   330  the DeepSeek-V3-like shape: prefill latency
#   load       200  vllm serve under vllm bench serve, stock and ours
#
# Real routes need MEGAFLUX_TRACES. ARGUMENTS are added to those of bench_serving.py.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
export PYTHONPATH="$PYTHONPATH:$work/metadata"
python3 -m benchmarks.entry_points "$work/metadata" >/dev/null || exit
known_steps "try qwen deepseek load" "$@"
[ $# -gt 0 ] || set -- qwen deepseek

serving() { # name, seconds, options
  local name=$1 limit=$2
  shift 2
  LINES_SHOWN=${LINES_SHOWN:-90} step "$name" "$limit" \
    python3 -m benchmarks.bench_serving --out "$OUT/$name" "$@" ${ARGUMENTS:-}
}
try() {
  LINES_SHOWN=120 serving try 170 --models qwen3-30b-a3b --backends stock fixed sticky \
    --parts prefill decode agreement soak --batches 8 16 --chunks 16384 32768 --routings real-hot-rank --repeats 2 \
    --running 1 32 --prompts 128 --soak-seconds 8
}
qwen() {
  serving qwen 330 --models qwen3-30b-a3b --parts prefill decode agreement soak --soak-seconds 40
}
deepseek() {
  serving deepseek 330 --models deepseek-v3-like --together 3 --controls balanced real
}
load() {
  serving load 200 --models qwen3-30b-a3b --parts load --load-backends stock sticky
}

run_steps "$@"
