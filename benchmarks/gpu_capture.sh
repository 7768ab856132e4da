#!/usr/bin/env bash
# What rollout capture costs vLLM, on a host with one or two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_capture.sh      three engines start side by side, a minute or less, and are asked in turns for
#                                  ROLLOUT_S (default 60) seconds; at most two minutes more than that
#
# A round asks every engine for 256 rollouts of 48 to 192 tokens at once and takes 2 s. 32 layers on two GPUs, 24 on one
# (three engines share it), so that the GPUs set the pace as they do in a whole model: with 8, the front end's work on
# tokens did. ARGUMENTS are added to those of bench_serving.py, of which this is one part.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
export PYTHONPATH="$PYTHONPATH:$work/metadata"
python3 -m benchmarks.entry_points "$work/metadata" >/dev/null || exit
seconds=${ROLLOUT_S:-60}
size=(--layers 32 --kv-cache-tokens 65536)
[ "$gpus" -ge 2 ] || size=(--ranks 1 --layers 24 --running 256 --chunks 8192 --kv-cache-tokens 98304)
LINES_SHOWN=45 step rollout $((seconds + 120)) python3 -m benchmarks.bench_serving --out "$OUT/rollout" --models qwen3-30b-a3b \
  --backends stock --parts rollout "${size[@]}" --output-tokens 96 --rollout-seconds "$seconds" ${ARGUMENTS:-}
