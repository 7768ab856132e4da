#!/usr/bin/env bash
# Metrics on a host with Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_metrics.sh [STEP...]      default: all that the host has GPUs for; seconds are the most that a step takes
#
#   totals    90  the totals that the device adds, against the reference; one GPU, about 40 s
#   overhead  90  what metrics cost a layer; on RANKS GPUs, by default two; about 40 s
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
known_steps "totals overhead" "$@"
[ $# -gt 0 ] || { [ "$gpus" -ge 2 ] && set -- totals overhead || set -- totals; }

totals() { tests totals 90 -x -m gpu tests/kernels/test_totals_gpu.py; }
overhead() { LINES_SHOWN=40 ranks "${RANKS:-2}" overhead "${LIMIT:-90}" benchmarks/bench_metrics_overhead.py --out "$OUT/metrics_overhead.json" ${OVERHEAD:-}; }

run_steps "$@"
