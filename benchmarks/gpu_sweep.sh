#!/usr/bin/env bash
# Launch choices of the forward kernel on two GPUs.
#   benchmarks/gpu_sweep.sh tests [CHOICE...]   each on virtual ranks, all at once: at most 120 s
#   benchmarks/gpu_sweep.sh times [CHOICE...]   one after another on two ranks: at most 90 s, about 10 a choice
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
step=${1:?tests or times}
shift
[ $# -gt 0 ] || set -- plain ahead gather aheadskew gatherskew turns
failed=0 turn=0
if [ "$step" = tests ]; then
  declare -A running
  for choice in "$@"; do
    CUDA_VISIBLE_DEVICES=$((turn++ % gpus)) tests "test-$choice" 120 tests/kernels/test_forward_gpu.py --maxfail=2 -k "$choice \
      and ((agree and (top or clipped or gpt)) or (equal_fixed and (top or eight)) or one_token)" >"$work/shown-$choice" &
    running[$choice]=$!
  done
  for choice in "$@"; do
    wait "${running[$choice]}" || failed=1
    cat "$work/shown-$choice"
  done
else
  LINES_SHOWN=100 ranks 2 sweep 90 benchmarks/sweep_layer_forward.py --choices "$@" --span-ms 150 \
    --shapes qwen3-30b-a3b deepseek-v3-e64 mixtral-8x7b --out "$OUT/layer_forward_sweep.json" || failed=1
fi
exit $failed
