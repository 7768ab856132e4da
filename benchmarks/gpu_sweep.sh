#!/usr/bin/env bash
# Launch choices of the forward kernel on two GPUs.
#   benchmarks/gpu_sweep.sh compile [CHOICE...]   fill the kernel cache; no GPU, beside anything else
#   benchmarks/gpu_sweep.sh tests [CHOICE...]     each on virtual ranks, all at once: at most 120 s
#   benchmarks/gpu_sweep.sh times [CHOICE...]     one after another: at most LIMIT (90) s, about 4 a shape and choice
# SHAPES: of times and compile; RANKS: 2, or 1 without a peer.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
step=${1:?compile, tests or times}
shift
[ $# -gt 0 ] || set -- plain ahead gather aheadskew gatherskew turns
read -ra shapes <<<"${SHAPES:-qwen3-30b-a3b deepseek-v3-e64 mixtral-8x7b}"
failed=0 turn=0
case $step in
  compile)
    for choice in "$@"; do
      CUTE_DSL_ARCH=sm_90a python3 benchmarks/sweep_layer_forward.py --compile --choices "$choice" --shapes "${shapes[@]}" &
    done
    wait
    ;;
  tests)
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
    ;;
  times)
    LINES_SHOWN=100 ranks "${RANKS:-2}" sweep "${LIMIT:-90}" benchmarks/sweep_layer_forward.py --choices "$@" \
      --span-ms "${SPAN_MS:-150}" --shapes "${shapes[@]}" --out "$OUT/layer_forward_sweep.json" || failed=1
    ;;
esac
exit $failed
