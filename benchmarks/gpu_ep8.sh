#!/usr/bin/env bash
# Eight ranks on a host with one to eight Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_ep8.sh [STEP...]     default: all but quick, in this order; seconds are the most that a step takes
#
#   compile     120  the kernels of correctness and layer, on all cores at once
#   correctness 180  tests: float64, fixed placement bit for bit, unequal batches, captured graphs; on one GPU two processes
#   planner     420  the device planner over the paper's grid
#   quick       200  a cut of the grid below: three batch sizes, one realisation
#   layer64_1   580  the layer over the paper's grid, 64 experts, first process; layer64_2 the second one
#   layer128_1  580  the same with 128 experts; layer128_2
#   layer256_1  580  the same with 256 experts; layer256_2
#   prefill     560  vLLM's prefill with data-parallel attention and expert parallelism; vLLM, and two or more GPUs
#   report       60  result rows, tables and pictures of the layer steps whose files $OUT/layer_ep8 holds
#
# With fewer than eight GPUs ranks share them (virtual ranks), rows say so, and layer steps measure what fits into memory
# and into their time; the rest is listed. vLLM has no virtual ranks: its ranks are the GPUs. Of three GPUs two are used,
# of five to seven four.
#
# Every step fits a call of ten minutes; report puts files of several calls together, on any machine. LAYER are options
# for the layer steps, such as "--tokens 1024 4096 --realisations 1". Real routings need MEGAFLUX_TRACES; without it
# they are left out.
cd "$(dirname "$0")/.." || exit
. benchmarks/gpu_steps.sh
all="compile correctness planner layer64_1 layer64_2 layer128_1 layer128_2 layer256_1 layer256_2 prefill report"
known_steps "$all quick" "$@"
[ $# -gt 0 ] || set -- $all
[ -z "${CUDA_VISIBLE_DEVICES:-}" ] || gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
used=1
while [ $((2 * used)) -le "$gpus" ] && [ $used -lt 8 ]; do used=$((2 * used)); done
[ $used -eq 8 ] || echo "eight ranks on $used of $gpus GPU(s): $((8 / used)) virtual ranks each, rows are marked emulated"

layer() { # name, seconds, options: rows of one process
  local name=$1 limit=$2
  shift 2
  LINES_SHOWN=${LINES_SHOWN:-180} ranks $used "layer_$name" "$limit" benchmarks/bench_layer_ep8.py \
    --seconds $((limit - 25)) --out "$OUT/layer_ep8/$name.json" "$@" ${LAYER:-}
}

compile() { step compile 120 python3 benchmarks/layer_compile.py ep8 --gpus $used; }
correctness() {
  LINES_SHOWN=40 tests correctness 180 tests/kernels/test_megakernel_real_ranks.py -k eight --durations=4
}
planner() {
  LINES_SHOWN=60 ranks $used planner 420 -m benchmarks.bench_planner_ep8 --out "$OUT/planner_ep8.json"
}
quick() { layer quick 200 --tokens 1024 4096 8192 --realisations 1 --process 0; }
layer64_1() { layer 64_1 580 --experts 64 --process 1; }
layer64_2() { layer 64_2 580 --experts 64 --process 2; }
layer128_1() { layer 128_1 580 --experts 128 --process 1; }
layer128_2() { layer 128_2 580 --experts 128 --process 2; }
layer256_1() { layer 256_1 580 --experts 256 --process 1; }
layer256_2() { layer 256_2 580 --experts 256 --process 2; }
prefill() { # two engines at a time: each has buffers for the worst routing of 32K tokens a rank, 43 GiB on eight ranks
  if [ $used -lt 2 ]; then
    echo "== prefill: left out, since vLLM's ranks are processes with a GPU each and here is one GPU"
    return
  fi
  export PYTHONPATH="$PYTHONPATH:$work/metadata"
  python3 -m benchmarks.entry_points "$work/metadata" >/dev/null || return
  LINES_SHOWN=90 step prefill 560 python3 -m benchmarks.bench_serving --ranks $used --models deepseek-v3-like \
    --backends fixed pipelined stock --together 2 --controls balanced real-hot-rank --deadline-s 540 --out "$OUT/prefill"
  local status=$?
  [ -e "$OUT/prefill/prefill_latency.json" ] && cp "$OUT/prefill/prefill_latency.json" "$OUT/prefill_ep8.json"
  return $status
}
report() { step report 60 python3 benchmarks/ep8_report.py "$OUT/layer_ep8.json" "$OUT"/layer_ep8/*.json; }

run_steps "$@"
