#!/usr/bin/env bash
# Check and time the forward megakernel on a host with two Hopper GPUs; logs and results go to $OUT (default ./out).
#   benchmarks/gpu_layer_forward.sh            everything
#   benchmarks/gpu_layer_forward.sh check      correctness only
# Every step has its own time limit; a failure on one rank, or of the small case on two GPUs, ends the run.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out}
mkdir -p "$OUT"
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD:$PWD/kernels"
export CUDA_DEVICE_MAX_CONNECTIONS=32 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 OMP_NUM_THREADS=4

step() { # name, seconds, command...
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1
  local status=$?
  echo "== $name: exit $status after $((SECONDS - begin)) s"
  grep -v Warning "$OUT/$name.log" | tail -n "${LINES_SHOWN:-25}" | cut -c -400
  return $status
}
checks() { # name, seconds, pytest selection
  step "$1" "$2" python3 -m pytest -q -o addopts= -W ignore -p no:cacheprovider tests/kernels/test_forward_gpu.py --tb=short -k "$3"
}
ranks() { # name, seconds, options of the benchmark
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" torchrun --standalone --nproc-per-node 2 benchmarks/bench_layer_forward.py --out "$OUT/$name.json" "$@"
}

LINES_SHOWN=40 checks one_rank 60 "float64 and one and rank" || exit 1
LINES_SHOWN=40 checks virtual_ranks 120 "float64 and not one"
LINES_SHOWN=40 checks launches 120 "not float64"
ranks two_small 60 --shapes olmoe --tokens 256 --routings balanced zipf-3 --no-peers || exit 1
[ "${1:-}" = check ] && exit
LINES_SHOWN=60 ranks two_trace 90 --shapes qwen3-30b-a3b --routings balanced zipf-3-one-rank --trace --no-peers
LINES_SHOWN=80 ranks two_shapes 170 --shapes qwen3-30b-a3b mixtral-8x7b deepseek-v3-e64 --routings balanced zipf-3-one-rank
