#!/usr/bin/env bash
# The device planner on a GPU host: correctness first, then times. Run from the repository root; results go to $OUT.
# One GPU runs the virtual-rank part; with two or more, two real ranks follow. `sanitize` runs compute-sanitizer instead.
set -uo pipefail
export PYTHONPATH=.:kernels:plugins${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
: "${OUT:?name a folder for the results}"
ok=0
caches=$(mktemp -d)
trap 'rm -rf "$caches"' EXIT
export MEGAFLUX_KERNEL_CACHE=$caches/first
step() {  # seconds, name, command...
  local limit=$1 name=$2 start=$SECONDS; shift 2
  echo "=== $name"
  timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
  local status=$?
  grep -v -i warning "$OUT/$name.log" | tail -n "${TAIL:-25}"
  echo "=== $name: status $status, $((SECONDS - start)) s"
  [ $status -eq 0 ] || ok=1
  return $status
}
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
if [ "${1:-}" = sanitize ]; then
  export MEGAFLUX_WAIT_S=120
  for tool in memcheck racecheck synccheck; do
    step 170 "sanitize_$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -m pytest -q -x -o addopts= -o filterwarnings= \
      tests/kernels/test_planner_gpu.py -k "plans_of_given_counts and shape0 or batches_with"
  done
  exit $ok
fi
step 120 tests python3 -m pytest -q -x -o addopts= -o filterwarnings= tests/kernels/test_planner_gpu.py || exit 1
step 60 equality_small python3 -m benchmarks.bench_planner_equality 2 || exit 1
export MEGAFLUX_KERNEL_CACHE=$caches/times
if [ "$gpus" -ge 2 ]; then
  step 90 equality_real torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_planner_equality
fi
TAIL=40 step 180 bench_virtual python3 -m benchmarks.bench_planner
if [ "$gpus" -ge 2 ]; then
  TAIL=40 step 180 bench_real torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_planner
fi
export MEGAFLUX_KERNEL_CACHE=$caches/first  # most shapes are loaded from the objects that the small run stored
TAIL=45 step 240 equality python3 -m benchmarks.bench_planner_equality
exit $ok
