#!/usr/bin/env bash
# Launch choices of the forward kernel on two GPUs: tests of each on virtual ranks, then times, a process group a choice.
#   benchmarks/gpu_sweep.sh [CHOICE...]        at most 80 s of tests and 75 s a choice; about 40 and 30
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
[ $# -gt 0 ] || set -- pool2 gather2 gather4 prefetch2 skew2 hints2
failed=0 turn=0
for choice in "$@"; do
  CUDA_VISIBLE_DEVICES=$((turn++ % gpus)) tests "test-$choice" 80 tests/kernels/test_forward_gpu.py --maxfail=2 \
    -k "$choice and (agree or equal_fixed or unusual)" >"$work/shown-$choice" &
done
wait
for choice in "$@"; do
  cat "$work/shown-$choice"
  LINES_SHOWN=30 ranks 2 "sweep-$choice" 75 benchmarks/sweep_layer_forward.py --choices "$choice" --span-ms 150 \
    --shapes qwen3-30b-a3b deepseek-v3-e64 mixtral-8x7b --out "$OUT/sweep-$choice.json" || failed=1
done
LINES_SHOWN=12 ranks 2 sweep-trace 60 benchmarks/sweep_layer_forward.py --choices pool2 gather2 --trace \
  --shapes qwen3-30b-a3b deepseek-v3-e64 --out "$OUT/sweep-trace.json" || failed=1
exit $failed
