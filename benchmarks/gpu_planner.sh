#!/usr/bin/env bash
# Check and time the device planner on a host with Hopper GPUs; results and logs.txt go to $OUT (default ./out).
#   benchmarks/gpu_planner.sh [tests] [equality] [sanitize] [bench] [calibrate]      default: all, in this order
# With two GPUs, sanitize runs on the second one while tests and equality run on the first; bench runs alone.
# Every step has its own time limit. The rest is left out after failed tests.
cd "$(dirname "$0")/.." || exit
OMP_NUM_THREADS=1
. benchmarks/gpu_steps.sh
export CUTE_DSL_ARCH=sm_90a MEGAFLUX_KERNEL_CACHE=$work/kernels
all="tests equality sanitize bench calibrate"
known_steps "$all" "$@"
steps=("$@")
[ $# -gt 0 ] || steps=($all)
file=tests/kernels/test_planner_gpu.py

unit() { CUDA_VISIBLE_DEVICES=0 tests tests 100 -x $file; }
program() { # step, its module: on two GPUs with real ranks too, on one with virtual ones alone
  if [ "$gpus" -ge 2 ]; then ranks 2 "$1" 150 -m "$2"; else step "$1" 150 python3 -m "$2"; fi
}
equality() { MEGAFLUX_WAIT_S=20 LINES_SHOWN=60 program equality benchmarks.bench_planner_equality; }
sanitize() { # on the last GPU, all tools at once
  local status=0 tool pids=()
  for tool in memcheck racecheck synccheck; do
    CUDA_VISIBLE_DEVICES=$((gpus - 1)) MEGAFLUX_WAIT_S=60 step "$tool" 90 \
      compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -m pytest -q -x -o addopts= -W ignore \
      -p no:cacheprovider --tb=short $file -k "plans_of_given_counts and shape0 or passes" &
    pids+=($!)
  done
  for tool in "${pids[@]}"; do wait "$tool" || status=1; done
  return $status
}
bench() { LINES_SHOWN=50 program bench benchmarks.bench_planner; }
calibrate() {
  MEGAFLUX_CALIBRATION=$work/calibration.json step calibrate 90 \
    python3 -c 'from megaflux_serve.cli import main; main()' calibrate --hidden 2048 --intermediate 768
}

failed=0 background=
if [ "$gpus" -ge 2 ] && [[ " ${steps[*]} " == *" sanitize "* ]]; then
  sanitize >"$work/sanitize" &
  background=$!
fi
for name in "${steps[@]}"; do
  case $name in
    tests) unit || { failed=1 && break; } ;;
    sanitize)
      if [ -n "$background" ]; then
        wait $background || failed=1
        background=
        cat "$work/sanitize"
      else
        sanitize || failed=1
      fi
      ;;
    *) "$name" || failed=1 ;;
  esac
done
[ -n "$background" ] && kill $background 2>/dev/null
exit $failed
