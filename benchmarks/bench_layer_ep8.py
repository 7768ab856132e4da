"""The whole layer on eight ranks over MegaFlux's grid: its figures 3, 4 and 5, on one to eight GPUs.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_layer_ep8.py --experts 256 --out layer_ep8_256_1.json

One process a GPU. With fewer than eight GPUs each holds several *virtual ranks*, with a share of the multiprocessors
and a copy of its own of everything: the share of a step that the busiest rank decides is real, but ranks of one GPU
reach each other through its memory and not over a link, so rows are marked ``emulated``. The layer is the paper's,
7168/2048, top-8, a quarter of spare capacity; BF16 here.

A step is what an engine calls: copies of the inputs, planner, forward kernel and combine. After 5 steps that warm up,
20 are timed with an all-reduce before each, so that processes begin together; the slowest process of each counts, and
the median of the 20 is one measurement. ``ep8_report`` makes results of those of several realisations and runs.

Variants: ``fixed``, a layer without replica slots; ``staged``, the transfer in a launch of its own; ``pipelined``,
replicas move inside the launch in every batch; ``resident``, the same plan with its replicas already there, for Figure
5 only. Outputs of all variants must be equal bit for bit. Layers are made one after another to save memory, so outputs
are compared by a 64-bit hash a rank, a sum over all bits with random weights.

Layers take batches as large as the grid's largest that fits, so that parts of the grid have the same kernels.

What does not fit into memory, which is decided before anything is allocated, or into ``--seconds`` is printed and
written as ``left_out_points``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megaflux_kernels.forward_map import ForwardMap
from megaflux_kernels.planner_map import PlannerMap
from megaflux_kernels.symmetric import local_ranks
from megaflux_kernels.worklist import LayerShape

from benchmarks.ep8_grid import (
    HIDDEN,
    HIDING_EXPERTS,
    HIDING_ROUTING,
    INTERMEDIATE,
    RANKS,
    SEEDS,
    TOKENS,
    TOP_K,
    Point,
    add_options,
    join,
    points,
    replica_slots,
    spread,
)
from benchmarks.harness.rows import RESULTS, Plain, ResultRow
from benchmarks.harness.table import print_table
from benchmarks.layer_timing import START, align, gather, save, say
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors.kernels import LayerKernels
from megaflux_serve.executors.megakernel import MegakernelExecutor, MegakernelLayer
from megaflux_serve.layer import ReplicatedMoE
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.workspace import Workspace

BENCH = "layer_ep8_runs"
WARM_UP, TIMED = 5, 20
REST_S = 0.1
"""Before every measurement, so that none begins in the heat of the one before."""
PAUSE_CYCLES = 20_000_000
"""A sleep of the device in which the host queues steps."""
TIMEOUT_S, RESERVE_BYTES = 30.0, 6 << 30
"""Bound of a wait; memory that is left to torch, NCCL and compiled code."""


class Fixed(NamedTuple):
    """Fixed placement at one point: hashes of the local ranks' outputs, blocks of the busiest rank, milliseconds."""

    hashes: list[int]
    max_load: int
    ms: float


class Layer:
    """The local ranks of the layer; weights depend on nothing but their expert's number."""

    def __init__(self, experts: int, slots: int, max_tokens: int) -> None:
        executor = MegakernelExecutor(RANKS, dist.group.WORLD, max_tokens, TIMEOUT_S)
        config = MegaFluxConfig(replica_slots=slots, max_tokens=max_tokens)
        layout, generator = config.slot_layout(experts, RANKS), torch.Generator("cuda")
        home = executor.home_weights(layout, HIDDEN, INTERMEDIATE)
        for rank, weights in zip(executor.local_ranks, home, strict=True):
            for index, expert in enumerate(layout.home_experts(rank)):
                generator.manual_seed(int(expert))
                weights.w13[index].normal_(std=HIDDEN**-0.5, generator=generator)
                weights.w2[index].normal_(std=INTERMEDIATE**-0.5, generator=generator)
        self.moe = ReplicatedMoE("moe", layout, config, executor, Workspace(slots), home)
        assert isinstance(self.moe.on_device, MegakernelLayer)
        self.on_device = self.moe.on_device
        self.on_device.prepare(TOP_K)

    def step(self, variant: str, batches: list[RoutingBatch]) -> list[Tensor]:
        """One batch; replicas move unless they are to be there already."""
        self.on_device.pipelined = variant != "staged"
        if variant != "resident":
            self.on_device.resident.fill_(-1)
        return self.moe.forward(batches)

    def last_plan(self) -> ReplicaPlan:
        """The last batch's plan; raises what a wait has left behind."""
        return self.on_device.last_plan()


def make_batches(point: Point, local_ranks: Sequence[int]) -> list[RoutingBatch]:
    """The batch of every local rank."""
    batches, routes = [], point.routes()
    for rank in local_ranks:
        generator = torch.Generator("cuda").manual_seed(rank)
        rows = torch.empty(point.tokens, HIDDEN, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
        weights = torch.rand(point.tokens, TOP_K, generator=generator, device="cuda")
        batches.append(
            RoutingBatch(rows, torch.from_numpy(routes[rank]).cuda(), weights / weights.sum(1, keepdim=True))
        )
    return batches


def digest(outputs: Sequence[Tensor]) -> list[int]:
    """A 64-bit hash of the bits of every output: a sum with random weights, of columns and then of rows."""
    hashes = []
    for output in outputs:
        generator = torch.Generator(output.device).manual_seed(1)
        columns, rows = (
            torch.randint(1 << 62, (n,), generator=generator, device=output.device) * 2 + 1
            for n in reversed(output.shape)
        )
        parts = zip(output.view(torch.int16).split(4096), rows.split(4096), strict=True)
        sums = [((part.long() * columns).sum(1) * scales).sum() for part, scales in parts]
        hashes.append(int(torch.stack(sums).sum()))
    return hashes


def step_ms(step: Callable[[], object]) -> float:
    """Median over the timed steps of the slowest process, milliseconds."""
    token = torch.zeros(1, device="cuda")
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + TIMED)] for _ in range(2))
    time.sleep(REST_S)
    align()
    torch.cuda._sleep(PAUSE_CYCLES)
    for begin, end in zip(begins, ends, strict=True):
        dist.all_reduce(token)
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)]
    return float(np.median(np.max(gather(times[WARM_UP:]), axis=0)))


def gpu_bytes(experts: int, slots: int, tokens: int, num_local: int) -> int:
    """Memory of a GPU for a layer of ``num_local`` ranks and its largest batch."""
    kernels = LayerKernels.of(LayerShape(RANKS, experts, slots, HIDDEN, INTERMEDIATE, TOP_K, tokens), num_local)
    buffers = sum(ForwardMap(kernels.shape, kernels.config.tiling).memory_use().values())
    buffers += PlannerMap(kernels.planner).num_bytes
    weights = (experts // RANKS + slots) * 6 * HIDDEN * INTERMEDIATE
    batch = tokens * (2 * 2 * HIDDEN + 3 * 4 * TOP_K)  # rows and outputs; routes twice, and their weights
    return num_local * (buffers + weights + batch) + RESERVE_BYTES


class Run:
    """What a run measures for one number of experts after another, and its rows.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.measured = options, list[ResultRow]()
        self.left: Counter[tuple[int, int, str]] = Counter()
        self.gpus, self.local = dist.get_world_size(), local_ranks(RANKS, dist.group.WORLD)
        self.case: dict[str, Plain] = {"shape": f"{HIDDEN}x{INTERMEDIATE}", **spread(self.gpus)}

    def measure(self, experts: int, seconds: float) -> None:
        """All points of a number of experts, those without replicas in a third of the time."""
        options, begin, slots = self.options, elapsed(), replica_slots(experts)
        asked = points(experts, options.tokens, options.routings, options.realisations)
        fitting, largest = self.in_memory(asked, experts, slots)
        if fitting:
            fixed = self.fixed(Layer(experts, 0, largest), self.in_time(fitting, begin + seconds / 3))
            free_memory()
            layer = Layer(experts, slots, largest)
            for point in self.in_time(list(fixed), begin + seconds):
                self.replicated(layer, point, fixed[point])

    def fixed(self, layer: Layer, asked: Iterable[Point]) -> dict[Point, Fixed]:
        """Check and time fixed placement."""
        found = {}
        for point in asked:
            batches = make_batches(point, self.local)
            outputs = layer.step("fixed", batches)
            finite = all(bool(output.isfinite().all()) for output in outputs)
            refuse(point, "fixed", [] if finite else ["values that are not finite"])
            hashes, ms = digest(outputs), step_ms(partial(layer.step, "fixed", batches))
            found[point] = Fixed(hashes, layer.last_plan().max_load, ms)
            self.add(point, "fixed", "latency_ms", ms, "ms")
        return found

    def replicated(self, layer: Layer, point: Point, fixed: Fixed) -> None:
        """Check and time the variants of one point that replicate."""
        batches, words = make_batches(point, self.local), f"{point}: fixed {fixed.ms:.2f} ms"
        hides = (point.experts, point.routing) == (HIDING_EXPERTS, HIDING_ROUTING)
        for variant in ("staged", "pipelined", "resident") if hides else ("staged", "pipelined"):
            hashes = zip(self.local, digest(layer.step(variant, batches)), fixed.hashes, strict=True)
            refuse(point, variant, [f"rank {rank} differs from fixed" for rank, mine, its in hashes if mine != its])
            ms, plan = step_ms(partial(layer.step, variant, batches)), layer.last_plan()
            if variant != "resident":
                moving = plan
            elif len(plan.transfers) or not np.array_equal(plan.blocks, moving.blocks):
                say(f"{point}: replicas that are there change the plan, so nothing says what hiding them saves")
                continue
            self.add(point, variant, "latency_ms", ms, "ms")
            words += f", {variant} {ms:.2f} ms {fixed.ms / ms:.3f}x"
        ideal = fixed.max_load / moving.max_load
        self.add(point, "pipelined", "ideal_speedup", ideal, "1")
        self.add(point, "pipelined", "replicas", len(moving.transfers), "1")
        say(f"{words}; {len(moving.transfers)} replicas, ideal {ideal:.3f}x")

    def in_memory(self, asked: list[Point], experts: int, slots: int) -> tuple[list[Point], int]:
        """The points that fit, and the largest batch of the grid that does; those that do not are listed."""
        free = min(gather(torch.cuda.mem_get_info()[0]))
        need = {tokens: gpu_bytes(experts, slots, tokens, len(self.local)) for tokens in TOKENS}
        largest = max((tokens for tokens in TOKENS if need[tokens] <= free), default=0)
        for tokens, found in groupby(asked, lambda point: point.tokens):
            if tokens > largest:
                gib = need[min(m for m in TOKENS if m >= tokens)] / 2**30
                self.leave_out(list(found), f"memory: {gib:.0f} GiB a GPU, {free / 2**30:.0f} free")
        return [point for point in asked if point.tokens <= largest], largest

    def in_time(self, asked: list[Point], until: float) -> Iterator[Point]:
        """The points one after another while there is time; the rest is listed."""
        for index, point in enumerate(asked):
            if elapsed() > until:
                for _, found in groupby(asked[index:], lambda left: left.tokens):
                    self.leave_out(list(found), "time")
                return
            yield point

    def leave_out(self, left: list[Point], reason: str) -> None:
        """Say that points of one batch size are not measured."""
        self.left[left[0].experts, left[0].tokens, reason] += len(left)
        say(f"LEFT OUT E {left[0].experts}, {left[0].tokens} tokens a rank, {len(left)} points: {reason}")

    def add(self, point: Point, variant: str, metric: str, value: float, unit: str) -> None:
        """One row."""
        case = {**self.case, "experts": point.experts, "tokens_per_rank": point.tokens, "routing": point.routing}
        case |= {"realisation": point.seed, "process": self.options.process, "variant": variant}
        self.measured.append(ResultRow(BENCH, case, metric, value, unit))

    def rows(self) -> list[ResultRow]:
        """What was measured, and how many points were not."""
        rows = list(self.measured)
        for (experts, tokens, reason), count in self.left.items():
            case = {**self.case, "experts": experts, "tokens_per_rank": tokens, "process": self.options.process}
            rows.append(ResultRow(BENCH, case | {"reason": reason}, "left_out_points", count, "1"))
        return rows


def free_memory() -> None:
    """Give back what is no more used, once no process reads it."""
    gc.collect()
    align()
    torch.cuda.empty_cache()
    align()


def elapsed() -> float:
    """Seconds since the start, the same in every process."""
    return max(gather(time.monotonic() - START))


def refuse(point: Point, variant: str, problems: list[str]) -> None:
    """End all processes if one has a problem."""
    found = [f"process {process}: {text}" for process, texts in enumerate(gather(problems)) for text in texts]
    if found:
        raise SystemExit(f"{point} {variant}: {'; '.join(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser)
    parser.add_argument("--realisations", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1))
    parser.add_argument("--process", type=int, default=1, help="number of this run; the paper has two fresh processes")
    parser.add_argument("--seconds", type=float, default=540, help="from the start; what does not fit is listed")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer_ep8_runs.json")
    options = parser.parse_args()
    join()
    run = Run(options)
    if len(run.local) > 1:
        say(f"{RANKS} ranks on {run.gpus} GPU(s): {len(run.local)} virtual ranks each, rows are marked emulated")
    for index, experts in enumerate(options.experts):
        run.measure(experts, (options.seconds - elapsed()) / (len(options.experts) - index))
        free_memory()
        save(options.out, run.rows())
    if dist.get_rank() == 0:
        print_table([row for row in run.measured if row.metric == "latency_ms"], BENCH)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
