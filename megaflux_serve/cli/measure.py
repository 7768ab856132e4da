"""Times of a block, a replica and a plan on this machine's GPUs, for ``megaflux calibrate``.

Each is the median of repeated runs between two events, behind a warm-up; the device sleeps while a run is queued.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from cutlass import Int32, Int64
from cutlass.cuda import default_stream
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.plan_counts import compile_plan_counts
from megaflux_kernels.planner_buffers import home_table, launch_planner

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors.megakernel import MegakernelExecutor, MegakernelLayer, kernel_limits
from megaflux_serve.planning.workload import SEEDS, permute, scale_counts, split_by_source, zipf_shares
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertWeights

TOKENS, EXPERTS, TOP_K, BLOCK_ROWS = 8192, 8, 2, 128
RUNS, WARMUP = 30, 5
REPLICAS = 16
"""Copied in one run, so that the start of a copy counts little."""


def median_ns(prepare: Callable[[], object], run: Callable[[], object]) -> float:
    """Device time of ``run`` on the default stream, nanoseconds; ``prepare`` comes before it each time."""
    samples = []
    for _ in range(WARMUP + RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        prepare()
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(1e6 * begin.elapsed_time(end))
    return float(np.median(samples[WARMUP:]))


def block_ns(hidden: int, intermediate: int) -> int:
    """One token block through the forward kernel, with the whole GPU at work on 128 of them.

    Raises:
        UnsupportedError: a shape that the kernel cannot serve.
    """
    executor = MegakernelExecutor(1, max_tokens=TOKENS)
    w13 = torch.randn(EXPERTS, 2 * intermediate, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    w2 = torch.randn(EXPERTS, hidden, intermediate, device="cuda", dtype=torch.bfloat16) * intermediate**-0.5
    layer = executor.layer(SlotLayout(EXPERTS, 1, 0), MegaFluxConfig(replica_slots=0), [ExpertWeights(w13, w2)])
    assert isinstance(layer, MegakernelLayer)
    batch = RoutingBatch(
        torch.randn(TOKENS, hidden, device="cuda", dtype=torch.bfloat16),
        torch.arange(TOP_K * TOKENS, device="cuda").view(TOKENS, TOP_K) % EXPERTS,
        torch.full((TOKENS, TOP_K), 1 / TOP_K, device="cuda"),
    )
    shared, launches = layer.bound(TOP_K)
    shared.load([batch])

    def plan() -> None:
        inputs = (shared.topk_ids, shared.num_tokens, layer.resident)
        launch_planner(shared.planners, *inputs, layer.options, shared.timeout_s)

    nanoseconds = median_ns(plan, launches[0].forward)
    shared.note_failures()
    torch.cuda.synchronize()
    shared.raise_failure()
    return round(nanoseconds * BLOCK_ROWS / (TOP_K * TOKENS))


def replica_ns(hidden: int, intermediate: int) -> int:
    """The weights of one expert from the second GPU to the first."""
    words = 3 * hidden * intermediate * REPLICAS
    source = torch.zeros(words, device="cuda:1", dtype=torch.bfloat16)
    destination = torch.empty(words, device="cuda:0", dtype=torch.bfloat16)
    torch.cuda.synchronize(1)
    return round(median_ns(lambda: None, lambda: destination.copy_(source, non_blocking=True)) / REPLICAS)


def plan_ns(experts: int, ranks: int) -> int:
    """One plan from counts, for a skewed batch; counting, exchange and routes are needed without replicas as well.

    Raises:
        UnsupportedError: a shape that the kernel cannot plan.
    """
    with kernel_limits():
        search = SearchShape(experts, ranks, max(1, experts // (4 * ranks)) if ranks > 1 else 0)
        compiled = compile_plan_counts(search)
    batch = permute(scale_counts(zipf_shares(experts, 6.0), ranks * TOKENS, min(8, experts)), SEEDS[0])
    counts = torch.from_numpy(split_by_source(batch, ranks).astype(np.int32)).cuda()
    homes = torch.from_numpy(home_table(experts, ranks)).cuda()
    resident = torch.full((max(1, search.num_replicas),), -1, dtype=torch.int32, device="cuda")
    plan = torch.empty(search.plan.num_words, dtype=torch.int32, device="cuda")
    addresses = [Int64(tensor.data_ptr()) for tensor in (counts, homes, resident, plan)]
    options = (Int32(0), Int32(0), Int64(0), Int64(0), Int64(0), Int32(0))
    run = functools.partial(compiled, *addresses, Int32(1), *options, default_stream())
    return round(median_ns(lambda: resident.fill_(-1), run))
