#!/usr/bin/env bash
# vLLM servers with the backend on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_vllm.sh [STEP...]        default: all, in this order; seconds are the most that a step takes
#
#   smoke      230  do servers start, eager and with captured graphs, and answer as stock vLLM does?
#   tests      400  tests/plugins/test_vllm_two_gpus.py
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
export PYTHONPATH="$PYTHONPATH:$work/metadata"
python3 -m benchmarks.entry_points "$work/metadata" >/dev/null || exit
all="smoke tests"
known_steps "$all" "$@"
[ $# -gt 0 ] || set -- $all

smoke() {
  LINES_SHOWN=170 step smoke "${SMOKE_LIMIT:-230}" python3 -m tests.plugins.vllm_smoke --out "$OUT/smoke" ${SMOKE:-}
}
tests() { LINES_SHOWN=60 step tests 400 python3 -m pytest -q -o addopts= -W ignore -p no:cacheprovider --tb=short tests/plugins/test_vllm_two_gpus.py; }

run_steps "$@"
