# What the scripts gpu_*.sh share; sourced, from the repository's root. A step is a command with a time limit whose
# output grows in $OUT/NAME.log while it runs; at its end it moves to $OUT/logs.txt, and its last lines are shown. A
# failed step does not end the run. A signal does: what runs is cut short, nothing that it has started stays on the
# GPUs, and its log is kept as that of any step. SIGKILL does the same, but leaves $OUT/NAME.log where it is, and steps
# side by side run on to their ends.
set -uo pipefail
OUT=${OUT:-out}
mkdir -p "$OUT"
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD:$PWD/kernels:$PWD/plugins"
export CUDA_DEVICE_MAX_CONNECTIONS=32 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
# A program that uses NVLink multicast can put shared GPUs out of service; nothing here needs it.
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
work=$(mktemp -d)
trap end_steps EXIT
trap 'trap "" TERM INT HUP; exit 143' TERM INT HUP
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
if [ "$gpus" = 0 ] && [[ ! "$*" =~ ^(compile|report)( compile| report)*$ ]]; then
  echo "$0: nvidia-smi shows no GPU; allowed: a host with Hopper GPUs, or the steps compile and report" >&2
  exit 2
fi

step() { # name, seconds, command...; the last $LINES_SHOWN lines are shown
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  # In the background, because bash takes a signal while it waits, but not while it runs a command.
  python3 benchmarks/within.py "$limit" "$@" >"$OUT/$name.log" 2>&1 &
  echo $! >"$work/$name.pid"
  wait $!
  local status=$?
  keep_log "$name" "exit $status after $((SECONDS - begin)) s"
  return $status
}
keep_log() { # name of a step, what became of it; one at a time where steps run side by side
  local log="$OUT/$1.log"
  {
    flock 9
    [ -e "$log" ] || return
    { echo "== $1: $2"; grep -v Warning "$log"; } >&9
    echo "== $1: $2"
    grep -v Warning "$log" | tail -n "${LINES_SHOWN:-20}" | cut -c -250
    rm "$log" "$work/$1.pid"
  } 9>>"$OUT/logs.txt"
}
end_steps() { # however the script ends
  local pid pids
  for _ in {1..100}; do # at most 20 s
    pids=$(cat "$work"/*.pid 2>/dev/null) && kill $pids 2>/dev/null || break
    sleep 0.2
  done
  for pid in "$work"/*.pid; do
    [ ! -e "$pid" ] || keep_log "$(basename "$pid" .pid)" "cut short"
  done
  rm -rf "$work"
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
