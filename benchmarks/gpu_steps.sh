# What the scripts gpu_*.sh share; sourced, from the repository's root. A step is a command with a time limit whose
# output is shown in part and appended as a whole to $OUT/logs.txt; a failed step does not end the run.
set -uo pipefail
OUT=${OUT:-out}
mkdir -p "$OUT"
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD:$PWD/kernels:$PWD/plugins"
export CUDA_DEVICE_MAX_CONNECTIONS=32 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
# A program that uses NVLink multicast can put shared GPUs out of service; nothing here needs it.
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
if [ "$gpus" = 0 ] && [[ ! "$*" =~ ^(compile|report)( compile| report)*$ ]]; then
  echo "$0: nvidia-smi shows no GPU; allowed: a host with Hopper GPUs, or the steps compile and report" >&2
  exit 2
fi

step() { # name, seconds, command...; the last $LINES_SHOWN lines are shown
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout -s ABRT -k 5 "$limit" "$@" >"$work/$name.log" 2>&1  # ABRT: Python says where it hung
  local status=$?
  {
    echo "== $name: exit $status after $((SECONDS - begin)) s"
    grep -v Warning "$work/$name.log"
  } >>"$OUT/logs.txt"
  echo "== $name: exit $status after $((SECONDS - begin)) s"
  grep -v Warning "$work/$name.log" | tail -n "${LINES_SHOWN:-20}" | cut -c -250
  return $status
}
tests() { # name, seconds, pytest arguments
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" python3 -m pytest -q -o addopts= -W ignore -p no:cacheprovider --tb=short "$@"
}
ranks() { # number of processes, name, seconds, command of torchrun
  local number=$1 name=$2 limit=$3
  shift 3
  step "$name" "$limit" torchrun --standalone --nproc-per-node "$number" "$@"
}
run_steps() { # the functions to run, in order; the status is 1 if one fails
  local failed=0 name
  for name in "$@"; do "$name" || failed=1; done
  return $failed
}
known_steps() { # "names of all", names asked for: ends the script with 2 if one is unknown
  local all=" $1 " name
  shift
  for name in "$@"; do
    [[ $all == *" $name "* ]] || { echo "unknown step $name; known:$all" >&2; exit 2; }
  done
}
