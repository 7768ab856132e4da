"""What metrics cost a layer: with and without them, on the same ranks, weights and batches.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_metrics_overhead.py

``with``: the option ``metrics``, so that the device adds every batch to the layer's totals, and a meter that publishes
four times a second, a server's once. ``without``: neither. Both run ``LAYERS`` layers of one executor, captured into
one CUDA graph (``graph``) or launched one by one (``eager``). Spans take turns, in an order that swaps; the slowest
rank counts. Outputs of both must be equal bit for bit, and totals must have counted every batch.

Reported: overhead_pct, the median over the turns of what ``with`` takes more, and overhead_error_pct, the half width of
its interval of 95 % (from the turns' ranks); latency_ms of a layer in both.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import comb
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megaflux_kernels.totals_map import Total
from megaflux_kernels.worklist import LayerShape

from benchmarks.bench_layer import make_batch
from benchmarks.harness.rows import RESULTS, Plain, ResultRow
from benchmarks.harness.table import print_table
from benchmarks.layer_rig import expert_weights
from benchmarks.layer_timing import align, gather, save, say
from benchmarks.layer_workloads import SHAPES, routes
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors import DeviceExecutor, Executor, select_executor
from megaflux_serve.layer import ReplicatedMoE
from megaflux_serve.metrics.meter import Meter
from megaflux_serve.metrics.snapshot import Worker
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.workspace import ExpertWeights, Workspace

BENCH = "metrics_overhead"
LAYERS = 4
CASES = (("graph", 8), ("graph", 256), ("graph", 8192), ("eager", 256))
"""Launches and tokens a rank."""
PUBLISH_S = 0.25


class Variant:
    """Layers with or without metrics.

    Args:
        shape: of every layer.
        config: with its option ``metrics``.
        executor: of this rank, shared by all variants.
        home: weights that every layer gets a copy of.
    """

    def __init__(
        self, shape: LayerShape, config: MegaFluxConfig, executor: Executor | DeviceExecutor, home: ExpertWeights
    ) -> None:
        layout = config.slot_layout(shape.num_experts, shape.num_ranks)
        self.executor, self.top_k, self.metrics = executor, shape.top_k, config.metrics
        self.layers = [
            ReplicatedMoE(f"layers.{index}", layout, config, executor, Workspace(layout.num_replica_slots), [home])
            for index in range(LAYERS)
        ]

    def step(self, batch: RoutingBatch) -> list[torch.Tensor]:
        """One batch through every layer."""
        return [layer.forward_rank(batch) for layer in self.layers]

    @contextmanager
    def published(self, folder: Path) -> Iterator[None]:
        """Publish as a server's worker does, if there is anything to publish."""
        if not self.metrics:
            yield
            return
        worker = Worker("vllm", "0", "layers", dist.get_rank(), dist.get_world_size(), "megakernel", True, False)
        meter = Meter(worker, self.executor)
        for layer in self.layers:
            meter.watch(layer, self.top_k)
        meter.publish_every(PUBLISH_S, folder)
        try:
            yield
        finally:
            meter.stop()

    def batches_counted(self) -> int:
        """Batches that the device has added, all layers together."""
        totals = [layer.on_device.totals for layer in self.layers if layer.on_device is not None]
        return sum(int(of_layer[0, Total.BATCHES]) for of_layer in totals if of_layer is not None)


def span_ms(step: Callable[[], object], count: int) -> float:
    """Milliseconds of a step, the mean of ``count`` back to back on the slowest rank."""
    align()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    queued: list[torch.cuda.Event] = []
    begin.record()
    for _ in range(count):
        step()
        queued.append(torch.cuda.Event())
        queued[-1].record()
        if len(queued) > 16:
            queued.pop(0).synchronize()  # keep the queue short
    end.record()
    torch.cuda.synchronize()
    step_ms: float = begin.elapsed_time(end) / count
    return max(gather(step_ms))


def run_case(
    name: str, mode: str, tokens: int, variants: dict[str, Variant], options: argparse.Namespace
) -> list[ResultRow]:
    """Time one case; rows."""
    experts, hidden, intermediate, top_k, slots = SHAPES[name]
    shape = LayerShape(dist.get_world_size(), experts, slots, hidden, intermediate, top_k, tokens)
    batch = make_batch(shape, routes(shape, tokens, "zipf-3")[0][dist.get_rank()])
    steps: dict[str, Callable[[], object]] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    for variant, layers in variants.items():
        layers.step(batch)
        align()
        steps[variant] = partial(layers.step, batch)
        if mode == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs[variant] = layers.step(batch)
            steps[variant] = graph.replay
            graph.replay()
        else:
            outputs[variant] = layers.step(batch)
        align()
    same = all(torch.equal(a, b) for a, b in zip(outputs["with"], outputs["without"], strict=True))
    if not all(gather(same)):
        raise SystemExit(f"{mode} {tokens}: outputs with and without metrics differ")
    count = int(1000 * options.span_s / span_ms(steps["without"], 20)) + 1
    before = variants["with"].batches_counted()
    times: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for turn in range(options.turns + 1):
            for variant in ("with", "without") if turn % 2 else ("without", "with"):
                with variants[variant].published(Path(folder)):
                    times[variant].append(span_ms(steps[variant], count))
    counted, batches = variants["with"].batches_counted() - before, (options.turns + 1) * count * LAYERS
    if counted != batches:
        raise SystemExit(f"{mode} {tokens}: {counted} batches were counted, not {batches}")
    times = {variant: values[1:] for variant, values in times.items()}  # in the first turn clocks still settle
    more = 100 * (np.array(times["with"]) / np.array(times["without"]) - 1)
    low, high = median_interval(more)
    medians = {variant: float(np.median(values)) / LAYERS for variant, values in times.items()}
    say(
        f"{mode} {tokens}: {medians} ms a layer, with metrics {np.round(more, 2).tolist()} % more, {count} steps a turn"
    )
    case: dict[str, Plain] = {"shape": name, "tokens_per_rank": tokens, "ranks": shape.num_ranks, "mode": mode}
    return [
        ResultRow(BENCH, case, "overhead_pct", float(np.median(more)), "%"),
        ResultRow(BENCH, case, "overhead_error_pct", (high - low) / 2, "%"),
        *(ResultRow(BENCH, case | {"variant": name}, "latency_ms", ms, "ms") for name, ms in medians.items()),
    ]


def median_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """An interval that holds the median with at least 95 %, from the order of independent values.

    Values k and n + 1 - k of n in order do, for the largest k at which at most k - 1 of n fair coins fall on one side
    with 2.5 % or less.
    """
    ordered, n = np.sort(values), len(values)
    k = max(k for k in range(n // 2 + 1) if k == 0 or sum(comb(n, i) for i in range(k)) / 2**n <= 0.025)
    return float(ordered[max(k - 1, 0)]), float(ordered[n - max(k, 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    cases = [f"{mode}-{tokens}" for mode, tokens in CASES]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--turns", type=int, default=20, help="turns of each variant; from 6 the interval holds 95 %%")
    parser.add_argument("--span-s", type=float, default=0.15, help="seconds of a turn")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{BENCH}.json")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    experts, hidden, intermediate, top_k, slots = SHAPES[options.shape]
    shape = LayerShape(dist.get_world_size(), experts, slots, hidden, intermediate, top_k, 8192)
    config = MegaFluxConfig(executor="megakernel", replica_slots=slots, max_tokens=max(n for _, n in CASES))
    executor = select_executor(config, shape.num_ranks, dist.group.WORLD)
    layout = config.slot_layout(experts, shape.num_ranks)
    pairs = [expert_weights(shape, int(expert), 0) for expert in layout.home_experts(dist.get_rank())]
    home = ExpertWeights(*(torch.stack(stack) for stack in zip(*pairs, strict=True)))
    switches = {"with": True, "without": False}
    variants = {
        name: Variant(shape, config.model_copy(update={"metrics": on}), executor, home) for name, on in switches.items()
    }
    say("layers are there")
    rows: list[ResultRow] = []
    for mode, tokens in CASES:
        if f"{mode}-{tokens}" not in options.cases:
            continue
        rows += run_case(options.shape, mode, tokens, variants, options)
        save(options.out, rows)
    if dist.get_rank() == 0:
        print_table(rows, BENCH)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
