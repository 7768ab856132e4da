#!/usr/bin/env bash
# Check and time the MoE layer on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_layer_forward.sh [check] [layer] [sweep] [trace] [bench] [tokens] [local]     default: all, in this order
# check: tests on one and two GPUs. layer: the whole layer, planned on the device. sweep: launch choices. trace: times
# inside the kernel. bench, tokens: the forward kernel's results, by routing and by batch size. local: without a peer.
# Every step has its own time limit. All logs are appended to $OUT/logs.txt; what a check finds ends the run.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out}
mkdir -p "$OUT"
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD:$PWD/kernels"
export CUDA_DEVICE_MAX_CONNECTIONS=32 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 OMP_NUM_THREADS=4
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

step() { # name, seconds, command...
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout -k 5 "$limit" "$@" >"$logs/$name" 2>&1
  local status=$?
  {
    echo "== $name: exit $status after $((SECONDS - begin)) s"
    grep -v Warning "$logs/$name"
  } >>"$OUT/logs.txt"
  echo "== $name: exit $status after $((SECONDS - begin)) s"
  grep -v Warning "$logs/$name" | tail -n "${LINES_SHOWN:-25}" | cut -c -250
  return $status
}
tests() { # name, seconds, pytest arguments
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" python3 -m pytest -q -o addopts= -W ignore -p no:cacheprovider --tb=short --maxfail=4 "$@"
}
ranks() { # number of ranks, name, seconds, script, options
  local number=$1 name=$2 limit=$3 script=$4
  shift 4
  step "$name" "$limit" torchrun --standalone --nproc-per-node "$number" "benchmarks/$script.py" --out "$OUT/$name.json" "$@"
}

check() {
  CUDA_VISIBLE_DEVICES=1 tests megakernel 100 tests/kernels/test_megakernel_gpu.py >"$logs/second" &
  local second=$!
  LINES_SHOWN=40 CUDA_VISIBLE_DEVICES=0 tests forward 100 tests/kernels/test_forward_gpu.py
  local failed=$?
  wait $second || failed=1
  cat "$logs/second"
  LINES_SHOWN=40 tests two_gpus 100 tests/kernels/test_megakernel_two_gpus.py || failed=1
  return $failed
}
layer() { ranks 2 layer 100 bench_layer --shapes qwen3-30b-a3b deepseek-v3-e64 --routings balanced zipf-3-one-rank; }
sweep() { LINES_SHOWN=150 ranks 2 layer_forward_sweep 130 sweep_layer_forward --shapes deepseek-v3-e64 qwen3-30b-a3b; }
trace() {
  ranks 2 layer_forward_trace 60 bench_layer_forward --trace --shapes qwen3-30b-a3b deepseek-v3-e64 --routings zipf-3-one-rank
}
bench() {
  LINES_SHOWN=120 ranks 2 layer_forward 150 bench_layer_forward \
    --shapes qwen3-30b-a3b mixtral-8x7b deepseek-v3-e64 olmoe --routings balanced zipf-3 zipf-6 zipf-3-one-rank
}
tokens() {
  ranks 2 layer_forward_tokens 120 bench_layer_forward --no-peers --shapes qwen3-30b-a3b deepseek-v3-e64 \
    --tokens 1024 4096 16384 --routings balanced zipf-3-one-rank
}
local_floor() {
  ranks 1 layer_forward_local 60 bench_layer_forward --no-peers --shapes qwen3-30b-a3b mixtral-8x7b deepseek-v3-e64 olmoe
}

[ $# -gt 0 ] || set -- check layer sweep trace bench tokens local
for name in "$@"; do
  case $name in
    check) check || exit 1 ;;
    local) local_floor ;;
    layer | sweep | trace | bench | tokens) "$name" ;;
    *) echo "unknown step $name" >&2; exit 2 ;;
  esac
done
