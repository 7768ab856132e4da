#!/usr/bin/env bash
# Check and time the device planner on a host with Hopper GPUs; results and logs.txt go to $OUT (default ./out).
#   benchmarks/gpu_planner.sh [tests] [equality] [sanitize] [bench] [calibrate]      default: all, in this order
# With two GPUs, sanitize runs on the second one while tests and equality run on the first; bench runs alone.
# Every step has its own time limit. bench is left out after failed tests.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out}
mkdir -p "$OUT"
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD:$PWD/kernels:$PWD/plugins" OMP_NUM_THREADS=1
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 CUTE_DSL_ARCH=sm_90a
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export MEGAFLUX_KERNEL_CACHE=$work/kernels
gpus=$(nvidia-smi --list-gpus | wc -l)
ranks=(python3)
[ "$gpus" -ge 2 ] && ranks=(torchrun --standalone --nproc-per-node 2)

step() { # name, seconds, command...
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout -k 5 "$limit" "$@" >"$work/$name" 2>&1
  local status=$?
  {
    echo "== $name: exit $status after $((SECONDS - begin)) s"
    grep -v Warning "$work/$name"
  } >>"$OUT/logs.txt"
  echo "== $name: exit $status after $((SECONDS - begin)) s"
  grep -v Warning "$work/$name" | tail -n "${LINES_SHOWN:-12}" | cut -c -300
  return $status
}
pytest=(python3 -m pytest -q -x -o addopts= -W ignore -p no:cacheprovider --tb=short tests/kernels/test_planner_gpu.py)

tests() { CUDA_VISIBLE_DEVICES=0 step tests 100 "${pytest[@]}"; }
equality() { MEGAFLUX_WAIT_S=20 LINES_SHOWN=60 step equality 150 "${ranks[@]}" -m benchmarks.bench_planner_equality; }
sanitize() { # on the last GPU, all tools at once
  local status=0 tool pids=()
  for tool in memcheck racecheck synccheck; do
    CUDA_VISIBLE_DEVICES=$((gpus - 1)) MEGAFLUX_WAIT_S=60 step "$tool" 90 \
      compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" -k "plans_of_given_counts and shape0 or passes" &
    pids+=($!)
  done
  for tool in "${pids[@]}"; do wait "$tool" || status=1; done
  return $status
}
bench() { LINES_SHOWN=50 step bench 150 "${ranks[@]}" -m benchmarks.bench_planner; }
calibrate() {
  MEGAFLUX_CALIBRATION=$work/calibration.json step calibrate 60 \
    python3 -c 'from megaflux_serve.cli import main; main()' calibrate --hidden 2048 --intermediate 768
}

steps=("$@")
[ $# -eq 0 ] && steps=(tests equality sanitize bench calibrate)
failed=0 background=
if [ "$gpus" -ge 2 ] && [[ " ${steps[*]} " == *" sanitize "* ]]; then
  sanitize >"$work/sanitize" &
  background=$!
fi
for name in "${steps[@]}"; do
  if [ "$name" = sanitize ] && [ -n "$background" ]; then
    wait $background || failed=1
    cat "$work/sanitize"
  else
    "$name" || failed=1
  fi
  [ "$name" = tests ] && [ $failed -ne 0 ] && break
done
[ -n "$background" ] && kill $background 2>/dev/null
exit $failed
