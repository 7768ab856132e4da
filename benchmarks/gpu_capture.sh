#!/usr/bin/env bash
# What rollout capture costs vLLM, on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_capture.sh      at most 180 s: three engines start side by side and are asked in turns for a minute
#
# A round asks every engine for 256 rollouts of 48 to 192 tokens at once and is meant to take 2 s. 32 layers, so that the
# GPUs set the pace as they do in a whole model: with 8, the front end's work on tokens did. ARGUMENTS are added to those
# of bench_serving.py, of which this is one part.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
export PYTHONPATH="$PYTHONPATH:$work/metadata"
python3 -m benchmarks.entry_points "$work/metadata" >/dev/null || exit
LINES_SHOWN=45 step rollout 180 python3 -m benchmarks.bench_serving --out "$OUT/rollout" --models qwen3-30b-a3b \
  --backends stock --parts rollout --layers 32 --kv-cache-tokens 65536 --output-tokens 96 --rollout-seconds 60 ${ARGUMENTS:-}
