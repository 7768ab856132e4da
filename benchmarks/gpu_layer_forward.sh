#!/usr/bin/env bash
# Check and time the MoE layer on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_layer_forward.sh [check] [bench] [layer] [sweep] [tokens] [local] [trace]    default: all, in this order
# check: short tests on one GPU and on two. bench, tokens: the forward kernel's results, by routing and by batch size.
# layer: the whole layer, planned on the device. sweep: task orders. local: without a peer. trace: times inside the kernel.
# Every step has its own time limit; a failed one does not end the run, but its exit status is 1. All logs are appended to
# $OUT/logs.txt; rows of bench, tokens and local come together in $OUT/layer_forward.json.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out}
mkdir -p "$OUT"
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD:$PWD/kernels"
export CUDA_DEVICE_MAX_CONNECTIONS=32 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 OMP_NUM_THREADS=4
logs=$(mktemp -d) parts=$(mktemp -d)
trap 'rm -rf "$logs" "$parts"' EXIT

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
ranks() { # number of ranks, name, seconds, folder of the results, script, options
  local number=$1 name=$2 limit=$3 folder=$4 script=$5
  shift 5
  step "$name" "$limit" torchrun --standalone --nproc-per-node "$number" "benchmarks/$script.py" --out "$folder/$name.json" "$@"
}
part() { # ranks, for rows of layer_forward.json
  local number=$1 name=$2 limit=$3
  shift 3
  ranks "$number" "$name" "$limit" "$parts" bench_layer_forward "$@"
  local status=$?
  [ -e "$parts/$name.json" ] || return $status
  python3 benchmarks/layer_pictures.py "$OUT/layer_forward.json" "$parts"/layer_forward*.json || status=1
  return $status
}

check() {
  CUDA_VISIBLE_DEVICES=1 tests megakernel 70 tests/kernels/test_megakernel_gpu.py \
    -k "changing or captured" >"$logs/second" &
  local second=$!
  LINES_SHOWN=40 CUDA_VISIBLE_DEVICES=0 tests forward 60 tests/kernels/test_forward_gpu.py -k "equal_fixed or repeat"
  local failed=$?
  wait $second || failed=1
  cat "$logs/second"
  return $failed
}
bench() {
  LINES_SHOWN=80 part 2 layer_forward 90 \
    --shapes qwen3-30b-a3b mixtral-8x7b deepseek-v3-e64 --routings balanced zipf-3-one-rank
}
sweep() {
  LINES_SHOWN=80 ranks 2 layer_forward_sweep 60 "$OUT" sweep_layer_forward --span-ms 200 \
    --shapes qwen3-30b-a3b mixtral-8x7b
}
layer() {
  LINES_SHOWN=100 ranks 2 layer 170 "$OUT" bench_layer --span-ms 125 --shapes qwen3-30b-a3b deepseek-v3-e64 \
    --tokens 1024 4096 8192 16384 --routings zipf-3-one-rank balanced
}
tokens() {
  part 2 layer_forward_tokens 50 --no-peers --variants fixed pipelined --span-ms 100 \
    --shapes qwen3-30b-a3b deepseek-v3-e64 --tokens 1024 4096 --routings zipf-3-one-rank
}
local_floor() { part 1 layer_forward_local 30 --no-peers --shapes qwen3-30b-a3b mixtral-8x7b deepseek-v3-e64; }
trace() {
  ranks 2 layer_forward_trace 60 "$OUT" bench_layer_forward --trace --shapes qwen3-30b-a3b deepseek-v3-e64 \
    --routings zipf-3-one-rank
}

[ $# -gt 0 ] || set -- check bench layer sweep tokens local trace
failed=0
for name in "$@"; do
  case $name in
    local) local_floor ;;
    check | bench | layer | sweep | tokens | trace) "$name" ;;
    *) echo "unknown step $name" >&2; exit 2 ;;
  esac || failed=1
done
exit $failed
