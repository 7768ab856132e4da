"""Hardware counters of a forward kernel and its combine at real shapes, read by Nsight Compute.

    python3 benchmarks/layer_counters.py --shapes qwen3-30b-a3b mixtral-8x7b

One rank without peers, see ``profile_layer``: replays of a kernel would keep other ranks waiting. Two launches of each
kernel are read, at the clock that the GPU takes by itself and with its caches as they are.

Reported: latency_ms of the launch; dram_read_gb and dram_write_gb; l2_hit_pct of all sectors asked for;
tensor_active_pct, the share of the cycles in which the matrix units were at work.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.harness.rows import RESULTS, Plain, ResultRow, RunContext, write_results
from benchmarks.harness.table import print_table
from benchmarks.layer_workloads import SHAPES

BENCH, TOKENS, LAUNCHES = "layer_counters", 8192, 2
COUNTERS = {
    "gpu__time_duration.sum": ("latency_ms", "ms"),
    "dram__bytes_read.sum": ("dram_read_gb", "GB"),
    "dram__bytes_write.sum": ("dram_write_gb", "GB"),
    "lts__t_sector_hit_rate.pct": ("l2_hit_pct", "%"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("tensor_active_pct", "%"),
}
"""Counter of Nsight Compute: metric and unit of its row."""

SCALES = {
    "s": 1e3,
    "ms": 1.0,
    "us": 1e-3,
    "ns": 1e-6,
    "Gbyte": 1.0,
    "Mbyte": 1e-3,
    "Kbyte": 1e-6,
    "byte": 1e-9,
    "%": 1.0,
}
"""What a printed unit is in that of the row."""

KERNEL = re.compile(r"^  kernel_\S*?(Forward|Combine)_object")
VALUE = re.compile(r"^\s+(\S+)\s+(\S+)\s+([\d.,]+)\s*$")


def profile(shape: str) -> str:
    """What Nsight Compute prints.

    Raises:
        subprocess.CalledProcessError: it fails, or the program that it runs.
    """
    command = ["ncu", "--metrics", ",".join(COUNTERS), "--clock-control", "none", "--cache-control", "none"]
    # The first launches of both kernels, over empty tables, load them.
    command += ["-k", "regex:Forward_object|Combine_object", "--launch-skip", "2", "--launch-count", str(2 * LAUNCHES)]
    program = Path(__file__).with_name("profile_layer.py")
    command += [sys.executable, str(program), "--shape", shape, "--tokens", str(TOKENS), "--launches", str(LAUNCHES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    done.check_returncode()
    return done.stdout


def rows(shape: str, text: str) -> Iterator[ResultRow]:
    """Means over the launches of each kernel.

    Args:
        shape: of the layer.
        text: printed by ``ncu``.

    Raises:
        ValueError: a kernel or a counter is missing.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    kernel = ""
    for line in text.splitlines():
        if match := KERNEL.match(line):
            kernel = match[1].lower()
        elif kernel and (match := VALUE.match(line)) and match[1] in COUNTERS:
            found[kernel, match[1]].append(float(match[3].replace(",", "")) * SCALES[match[2]])
    for kernel in ("forward", "combine"):
        case: dict[str, Plain] = {"shape": shape, "tokens_per_rank": TOKENS, "routing": "uniform"}
        case |= {"ranks": 1, "kernel": kernel}
        for counter, (metric, unit) in COUNTERS.items():
            if len(found[kernel, counter]) != LAUNCHES:
                raise ValueError(f"{shape}: {len(found[kernel, counter])} of {LAUNCHES} values of {kernel} {counter}")
            yield ResultRow(BENCH, case, metric, mean(found[kernel, counter]), unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--shapes", nargs="+", default=["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3-e64"], choices=SHAPES
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"{BENCH}.json")
    options = parser.parse_args()
    import torch

    context = RunContext.current(torch.cuda.get_device_name(), "torch", "nvidia-cutlass-dsl")
    found: list[ResultRow] = []
    for shape in options.shapes:
        found += rows(shape, profile(shape))
        write_results(options.out, found, context)
    print_table(found, BENCH)


if __name__ == "__main__":
    main()
