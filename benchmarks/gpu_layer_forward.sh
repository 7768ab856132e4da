#!/usr/bin/env bash
# Check and time the MoE layer on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_layer_forward.sh [STEP...]        default: all, in this order; seconds are the most that a step takes
#
#   compile     60  the kernels of the other steps, on all cores at once
#   unit       120  tests of one process: float64, fixed placement bit for bit, odd batches
#   pair       150  tests of several, two on one GPU: changing batches, captured graphs, a peer that is late or dies,
#                   eight ranks
#   stress      75  20,000 batches in a row on two GPUs, all compared, or as many as STRESS_S seconds allow (45)
#   sanitize   120  compute-sanitizer's memcheck, racecheck and synccheck, one rank and two virtual ones
#   counters    90  hardware counters of one rank's launch, with Nsight Compute; took 37 s
#   bench      150  the forward kernel at 8K tokens a rank, three shapes, balanced and hot, balanced beside the peers
#   routings    90  the same without peers under the other routings
#   shapes      75  two more shapes
#   tokens      90  1K to 32K tokens a rank, two shapes, hot experts on one rank
#   layer      150  the whole layer, planned on the device, 1K to 16K tokens, with the gate
#   alone       40  one rank without another
#   trace       60  times inside the kernel
#
# unit, sanitize and counters take the first GPU that CUDA_VISIBLE_DEVICES names.
# Rows of bench, routings, shapes, tokens and alone come together in $OUT/layer_forward.json. Real routings need
# MEGAFLUX_TRACES; without it they are left out. Peers need their packages. CHECK is an expression that selects tests as
# pytest -k does, SHAPES the shapes of bench, routings, counters and alone.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
all="compile unit pair stress sanitize counters bench routings shapes tokens layer alone trace"
known_steps "$all" "$@"
[ $# -gt 0 ] || set -- $all
real=() native=()
if [ -e "${MEGAFLUX_TRACES:-../shared/traces}/gptoss20b/routed_experts.npz" ]; then
  real=(real-high) native=(real-high)
else
  echo "no traces: real routings are left out (set MEGAFLUX_TRACES)"
fi
read -ra three <<<"${SHAPES:-qwen3-30b-a3b mixtral-8x7b deepseek-v3-e64}"
selected=()
[ -n "${CHECK:-}" ] && selected=(-k "$CHECK")

part() { # ranks, name, seconds, options: rows of layer_forward.json
  local number=$1 name=$2 limit=$3
  shift 3
  ranks "$number" "$name" "$limit" benchmarks/bench_layer_forward.py --out "$work/$name.json" "$@"
  local status=$?
  [ -e "$work/$name.json" ] || return $status
  python3 benchmarks/layer_pictures.py "$OUT/layer_forward.json" "$work"/layer_forward*.json || status=1
  return $status
}

compile() { step compile 60 python3 benchmarks/layer_compile.py; }
unit() { # several processes: most of a test is compiling
  LINES_SHOWN=60 tests unit 120 tests/kernels/test_megakernel_gpu.py tests/kernels/test_forward_gpu.py -n 6 --maxfail=6 \
    "${selected[@]}"
}
pair() { LINES_SHOWN=40 tests pair 150 tests/kernels/test_megakernel_real_ranks.py --durations=4 "${selected[@]}"; }
stress() { ranks 2 stress 75 benchmarks/stress_layer.py --seconds "${STRESS_S:-45}" --out "$OUT/layer_stress.json"; }

sanitize() { # all tools at once, with one rank, then with two virtual ranks, whose launches must run side by side
  local status=0 tool number pids options
  for number in 1 2; do
    pids=()
    for tool in memcheck racecheck synccheck; do
      options=(--tool "$tool" --error-exitcode 9)
      [ $tool = memcheck ] && options+=(--report-api-errors no) # torch asks the driver for functions that it has not
      LINES_SHOWN=12 step "$tool-$number" 60 compute-sanitizer "${options[@]}" \
        python3 benchmarks/sanitize_layer.py --ranks "$number" &
      pids+=($!)
    done
    for tool in "${pids[@]}"; do wait "$tool" || status=1; done
  done
  return $status
}
counters() {
  LINES_SHOWN=45 step counters 90 python3 benchmarks/layer_counters.py --shapes "${three[@]}" --out "$OUT/layer_counters.json"
}

bench() {
  LINES_SHOWN=90 part 2 layer_forward 150 --span-ms 110 --shapes "${three[@]}" --routings balanced \
    zipf-3-one-rank --peer-routings balanced
}
routings() {
  LINES_SHOWN=150 part 2 layer_forward_routings 90 --span-ms 100 --peers --variants fixed staged pipelined --shapes "${three[@]}" \
    --routings zipf-6 zipf-6-one-rank "${real[@]}"
}
shapes() {
  LINES_SHOWN=60 part 2 layer_forward_shapes 75 --span-ms 100 --sustained fixed staged pipelined --shapes olmoe gpt-oss-20b \
    --routings balanced zipf-3-one-rank "${native[@]}" --peer-routings balanced --peers "all-gather + grouped_mm" "all-gather + quack"
}
tokens() {
  LINES_SHOWN=150 part 2 layer_forward_tokens 90 --span-ms 100 --peers --variants fixed staged pipelined \
    --shapes qwen3-30b-a3b deepseek-v3-e64 --tokens 1024 4096 32768 --routings zipf-3-one-rank
}
layer() {
  LINES_SHOWN=100 ranks 2 layer 150 benchmarks/bench_layer.py --out "$OUT/layer.json" --span-ms 100 \
    --shapes qwen3-30b-a3b deepseek-v3-e64 --tokens 1024 4096 16384 --routings zipf-3-one-rank balanced
}
alone() { part 1 layer_forward_alone 40 --peers --shapes "${three[@]}"; }
trace() {
  ranks 2 layer_forward_trace 60 benchmarks/bench_layer_forward.py --trace --peers --shapes qwen3-30b-a3b \
    deepseek-v3-e64 --routings zipf-3-one-rank --out "$OUT/layer_forward_trace.json"
}

run_steps "$@"
