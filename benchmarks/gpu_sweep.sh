#!/usr/bin/env bash
# Launch choices of the forward kernel on two GPUs: tests of each on virtual ranks, then times of those that passed, a
# process group a choice.
#   benchmarks/gpu_sweep.sh [CHOICE...]        at most 75 s of tests and 50 s a choice; about 45 and 25
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
[ $# -gt 0 ] || set -- pool2 gather2 gather4 skew2 prefetch2
failed=0 turn=0
declare -A test
for choice in "$@"; do
  CUDA_VISIBLE_DEVICES=$((turn++ % gpus)) tests "test-$choice" 75 tests/kernels/test_forward_gpu.py --maxfail=2 -k "$choice \
    and ((agree and (top or clipped or four or gpt)) or (equal_fixed and (top or clipped or eight)) or one_token)" \
    >"$work/shown-$choice" &
  test[$choice]=$!
done
passed=()
for choice in "$@"; do
  if wait "${test[$choice]}"; then passed+=("$choice"); else failed=1; fi
  cat "$work/shown-$choice"
done
for choice in "${passed[@]}"; do
  LINES_SHOWN=30 ranks 2 "sweep-$choice" 50 benchmarks/sweep_layer_forward.py --choices "$choice" --span-ms 150 \
    --shapes qwen3-30b-a3b deepseek-v3-e64 mixtral-8x7b --out "$OUT/sweep-$choice.json" || failed=1
done
exit $failed
