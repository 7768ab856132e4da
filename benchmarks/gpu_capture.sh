#!/usr/bin/env bash
# What rollout capture costs vLLM, on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_capture.sh      at most 240 s: three engines start side by side and are asked in turns for 45 s
#
# ARGUMENTS are added to those of bench_serving.py, of which this is one part.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
export PYTHONPATH="$PYTHONPATH:$work/metadata"
python3 -m benchmarks.entry_points "$work/metadata" >/dev/null || exit
LINES_SHOWN=45 step rollout 240 python3 -m benchmarks.bench_serving --out "$OUT/rollout" --models qwen3-30b-a3b \
  --backends stock --parts rollout --rollout-seconds 45 ${ARGUMENTS:-}
