"""Compile the kernels of the layer benchmarks at once, a process a kernel, into the kernel cache.

    python3 benchmarks/layer_compile.py [bench] [layer] [stress] [sanitize]
    python3 benchmarks/layer_compile.py ep8 --gpus 2

A benchmark that compiles one shape after another leaves its GPUs idle for minutes. Shapes, ranks and batch sizes are
those of ``gpu_layer_forward.sh`` and, for ``ep8``, of ``gpu_ep8.sh``; what is missing is compiled where it is used.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.planner_map import PlannerShape
from megaflux_kernels.worklist import LayerShape

from benchmarks.ep8_grid import EXPERTS, HIDDEN, INTERMEDIATE, RANKS, TOP_K, replica_slots
from benchmarks.layer_workloads import SHAPES
from megaflux_serve.planning.totals import totals_map
from tests.kernels.layer_cases import EIGHT_RANKS

SMS = 132
"""Multiprocessors of an H100 or H200, on which launches depend."""

LARGEST = dict.fromkeys(SHAPES, (8192,)) | {"qwen3-30b-a3b": (8192, 32768), "deepseek-v3-e64": (8192, 32768)}
"""Largest batches of the runs of a shape."""

WHOLE_LAYER = dict.fromkeys(("qwen3-30b-a3b", "deepseek-v3-e64"), 16384)
EP8_LARGEST = {1: 8192, 2: 16384, 4: 32768, 8: 65536}
"""Largest batch of a rank in ``bench_layer_ep8`` by GPUs of 141 GB; that program asks for the free memory."""

SANITIZED, STRESSED = (8, 320, 192, 2, 300), (32, 512, 256, 4, 2048)
"""E, H, I, k and largest batch of ``sanitize_layer`` and ``stress_layer``."""


class Job(NamedTuple):
    """One kernel of a layer on ``num_local`` ranks of a GPU."""

    kernel: str
    shape: LayerShape
    num_local: int = 1


Layers = set[tuple[LayerShape, int]]
"""Layers, each with the ranks that share a GPU."""


def bench() -> Layers:
    """Over tables made on the host: no planner."""
    return {
        (LayerShape(2, experts, slots, hidden, intermediate, top_k, tokens), 1)
        for name, (experts, hidden, intermediate, top_k, slots) in SHAPES.items()
        for tokens in LARGEST[name]
    }


def layer() -> Layers:
    """The whole layer on two ranks, without replica slots and with."""
    layers = set()
    for name, tokens in WHOLE_LAYER.items():
        experts, hidden, intermediate, top_k, slots = SHAPES[name]
        layers |= {(LayerShape(2, experts, s, hidden, intermediate, top_k, tokens), 1) for s in (0, slots)}
    return layers


def ep8(gpus: int) -> Layers:
    """The paper's layer on eight ranks, and those of the tests with real ranks."""
    widths, num_local = (HIDDEN, INTERMEDIATE, TOP_K, EP8_LARGEST[gpus]), RANKS // gpus
    paper = [LayerShape(RANKS, experts, s, *widths) for experts in EXPERTS for s in (0, replica_slots(experts))]
    tests = [case.shape(slots) for case in EIGHT_RANKS.values() for slots in (0, case.num_slots)]
    return {(shape, num_local) for shape in (*paper, *tests)}


def stress() -> Layers:
    """The layer of ``stress_layer``."""
    return {(LayerShape(2, STRESSED[0], slots, *STRESSED[1:]), 1) for slots in (0, 4)}


def sanitize() -> Layers:
    """The layer of ``sanitize_layer``."""
    return {(LayerShape(ranks, SANITIZED[0], s, *SANITIZED[1:]), ranks) for ranks, s in ((1, 0), (2, 0), (2, 2))}


PLANNED = {"layer": layer, "stress": stress, "sanitize": sanitize}
"""Groups that plan on the device."""


def jobs(groups: Sequence[str], gpus: int) -> list[Job]:
    """Every kernel once, those that take longest first."""
    planned = {one for group in groups if group in PLANNED for one in PLANNED[group]()}
    planned |= ep8(gpus) if "ep8" in groups else set()
    every = planned | (bench() if "bench" in groups else set())
    kernels = ("forward", "transfer", "combine")
    return [Job("planner", *one) for one in planned] + [Job(kernel, *one) for kernel in kernels for one in every]


def compile_job(job: Job) -> float:
    """Compile one kernel, or find it stored; seconds."""
    from megaflux_kernels.combine import compile_combine
    from megaflux_kernels.forward import compile_forward, shared_config
    from megaflux_kernels.own_tables import ForwardTables
    from megaflux_kernels.planner import compile_planner
    from megaflux_kernels.transfer import compile_transfer

    begin, shape, config = time.monotonic(), job.shape, shared_config(job.num_local, SMS)
    if job.kernel == "forward":
        compile_forward(shape, config)
    elif job.kernel == "transfer":
        compile_transfer(shape, config.tiling)
    elif job.kernel == "combine":
        compile_combine(shape.hidden, shape.top_k)
    else:
        search = SearchShape(shape.num_experts, shape.num_ranks, shape.num_replica_slots)
        planner = PlannerShape(search, shape.top_k, shape.max_tokens, SMS // job.num_local - 1)
        totals = totals_map(shape.num_ranks, shape.num_experts)
        compile_planner(planner, ForwardTables(shape, config.tiling), totals=totals)
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = ["bench", *PLANNED]
    parser.add_argument("groups", nargs="*", default=default, help=f"ep8, or any of {', '.join(default)}, the default")
    parser.add_argument("--gpus", type=int, default=8, choices=EP8_LARGEST, help="of ep8, for eight ranks")
    options = parser.parse_args()
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    begin, every = time.monotonic(), jobs(options.groups, options.gpus)
    processes = max(1, (os.cpu_count() or 2) - 2)
    with multiprocessing.get_context("spawn").Pool(min(processes, len(every))) as pool:
        seconds = pool.map(compile_job, every, chunksize=1)
    print(f"{len(every)} kernels in {time.monotonic() - begin:.1f} s, {sum(seconds):.0f} s of compiling")


if __name__ == "__main__":
    main()
