#!/usr/bin/env bash
# What rollout capture costs vLLM, on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_capture.sh [STEP...]      default: rollout; seconds are the most that a step takes
#
#   rollout    150  three engines in turns: off, vLLM's own flag, capture; about 90 s
#   megaflux   150  the same with the backend of this project
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
export PYTHONPATH="$PYTHONPATH:$work/metadata"
python3 -m benchmarks.entry_points "$work/metadata" >/dev/null || exit
known_steps "rollout megaflux" "$@"
[ $# -gt 0 ] || set -- rollout

rollout() { LINES_SHOWN=45 step rollout "${LIMIT:-150}" python3 -m benchmarks.bench_capture_rollout --out "$OUT/capture" ${ROLLOUT:-}; }
megaflux() { LINES_SHOWN=45 step megaflux "${LIMIT:-150}" python3 -m benchmarks.bench_capture_rollout --out "$OUT/capture_megaflux" --backend sticky ${ROLLOUT:-}; }

run_steps "$@"
