#!/usr/bin/env bash
# SGLang servers on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_sglang.sh [STEP...]        default: kernels prefill; seconds are the most that a step takes
#
#   kernels     60  what SGLang compiles at its first start on a host, all at once; took 26 s
#   smoke      130  do servers of ours and stock ones start, with captured graphs, and agree? four layers
#   prefill    170  prefill latency of stock and ours, three servers side by side, first tokens compared before;
#                  took 115 s, as the first start of SGLang on the machine
#
# START_S (default 90) is the time that all servers have to start; three took 72 to 76 s. Without the step kernels a first start
# on a host takes two minutes more, unless ~/.cache/tvm-ffi holds them. Real routes need MEGAFLUX_TRACES. ARGUMENTS are added to those of
# bench_sglang_prefill.py.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
known_steps "kernels smoke prefill" "$@"
[ $# -gt 0 ] || set -- kernels prefill

servers() { # name, seconds, options
  local name=$1 limit=$2
  shift 2
  LINES_SHOWN=${LINES_SHOWN:-100} step "$name" "$limit" python3 -m benchmarks.bench_sglang_prefill --out "$OUT/$name" "$@" ${ARGUMENTS:-}
  local status=$?
  for pid in "$OUT/$name"/work/*/server.pid; do
    [ -f "$pid" ] && kill -9 -- "-$(cat "$pid")" 2>/dev/null # of a run that was cut short
  done
  mkdir -p "$OUT/$name/logs"
  for log in "$OUT/$name"/work/*/server.log; do
    [ -f "$log" ] && tail -c 300000 "$log" >"$OUT/$name/logs/$(basename "$(dirname "$log")").log"
  done
  rm -rf "$OUT/$name/work"
  return $status
}
kernels() { LINES_SHOWN=20 step kernels 60 python3 benchmarks/sglang_kernels.py; }
smoke() {
  servers smoke "${LIMIT:-130}" --layers 4 --backends stock sticky --batches 8 --routings balanced --repeats 2 \
    --start-s "${START_S:-90}"
}
prefill() {
  servers prefill "${LIMIT:-170}" --backends stock fixed sticky --routings balanced real-hot-rank \
    --start-s "${START_S:-90}"
}

run_steps "$@"
