#!/usr/bin/env bash
# Launch choices of the forward kernel on two GPUs.
#   benchmarks/gpu_sweep.sh compile [CHOICE...]   fill the kernel cache; no GPU, beside anything else
#   benchmarks/gpu_sweep.sh times [CHOICE...]     one after another: at most LIMIT (90) s, about 4 a shape and choice
# SHAPES: of times and compile; RANKS: 2, or 1 without a peer.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
step=${1:?compile or times}
shift
[ $# -gt 0 ] || set -- groups-8 groups-16 groups-32 lag-400
read -ra shapes <<<"${SHAPES:-qwen3-30b-a3b deepseek-v3-e64 mixtral-8x7b}"
failed=0
case $step in
  compile)
    for choice in "$@"; do
      CUTE_DSL_ARCH=sm_90a python3 benchmarks/sweep_layer_forward.py --compile --choices "$choice" --shapes "${shapes[@]}" &
    done
    wait
    ;;
  times)
    LINES_SHOWN=100 ranks "${RANKS:-2}" sweep "${LIMIT:-90}" benchmarks/sweep_layer_forward.py --choices "$@" \
      --span-ms "${SPAN_MS:-150}" --shapes "${shapes[@]}" --out "$OUT/layer_forward_sweep.json" || failed=1
    ;;
esac
exit $failed
