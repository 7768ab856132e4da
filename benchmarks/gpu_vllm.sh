#!/usr/bin/env bash
# vLLM servers with the backend on a host with Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_vllm.sh [STEP...]        default: all, in this order; seconds are the most that a step takes
#
#   smoke      230  do servers start, eager and with captured graphs, and answer as stock vLLM does? Two GPUs
#   tests      360  tests/plugins/test_vllm_two_ranks.py: six engines side by side; their logs are in $OUT/tests. With
#                   one GPU, ranks take turns on it
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
tests() { # -v -s: what has ended is in the log at once
  LINES_SHOWN=100 step tests 360 python3 -m pytest -v -s -o addopts= -W ignore -p no:cacheprovider --tb=short \
    --basetemp "$OUT/tests" tests/plugins/test_vllm_two_ranks.py
}

run_steps "$@"
