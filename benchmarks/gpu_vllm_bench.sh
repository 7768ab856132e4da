#!/usr/bin/env bash
# Benchmarks of vLLM on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_vllm_bench.sh [STEP...]      default: qwen deepseek; seconds are the most that a step takes
#
#   quick      130  five backends on Qwen3-30B-A3B's shape, no torch.compile; ends by itself with what it has measured
#   qwen       330  Qwen3-30B-A3B's shape: prefill latency of all backends, decode, agreement, soak
#   deepseek   330  the DeepSeek-V3-like shape: prefill latency
#   load       200  vllm serve under vllm bench serve, stock and ours
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
  LINES_SHOWN=160 serving quick 130 --models qwen3-30b-a3b --backends stock fixed staged pipelined sticky \
    --parts agreement decode prefill soak --routings real-hot-rank balanced real --running 1 32 --output-tokens 49 \
    --prompts 64 --soak-seconds 10 --layers 8 --start-s 85 --others-s 20 --call-s 15 --deadline-s 114
}
qwen() {
  serving qwen 330 --models qwen3-30b-a3b --parts agreement decode prefill soak --soak-seconds 40
}
deepseek() {
  serving deepseek 330 --models deepseek-v3-like --together 3 --controls balanced real
}
load() {
  serving load 200 --models qwen3-30b-a3b --parts load --load-backends stock sticky
}

run_steps "$@"
