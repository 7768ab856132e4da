"""The gate's costs of one layer shape, measured with the layer itself on as many ranks as run it.

One batch with its hottest experts on one rank goes through four layers that differ in what they pay: ``fixed`` keeps
every row at home; ``staged`` copies its replicas before it computes, ``pipelined`` while it does; ``resident`` finds
them in place. Their differences, with the planner's time beside them, are the four costs. Used by ``megaflux
calibrate``, which starts the ranks, and by the layer's benchmark, whose ranks are there already.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.planner_buffers import launch_planner
from megaflux_kernels.worklist import LayerShape

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import UnsupportedError
from megaflux_serve.executors.megakernel import MegakernelExecutor, MegakernelLayer, kernel_limits
from megaflux_serve.planning.fast_planner import plan_replicas
from megaflux_serve.planning.gate import GateCosts
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.workload import SEEDS, realise_routes, scale_counts, split_by_source, zipf_shares
from megaflux_serve.routing import CountArray, RoutingBatch
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertWeights, Workspace

RUNS, WARMUP = 20, 4
PAUSE_CYCLES = 2_000_000
"""A run is queued behind a pause of about a millisecond, so that the host's time does not count."""

KAPPA = 3.0
NOISE = 0.02
"""Share of a layer's time below which a transfer cannot be told from noise."""


@dataclass(frozen=True)
class MeasuredShape:
    """A layer and batch size.

    Args:
        experts, hidden, intermediate, top_k: E, H, I, k.
        replica_slots: s of a rank.
        tokens: of every rank's batch.
    """

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    replica_slots: int
    tokens: int

    def check(self, num_ranks: int) -> None:
        """Refuse what the kernels cannot serve, or what needs no replicas, before any rank is started.

        Raises:
            UnsupportedError: naming the field, or the batch.
            ConfigError: ranks or slots that do not fit the experts.
        """
        layout = MegaFluxConfig.parse({"replica_slots": self.replica_slots}).slot_layout(self.experts, num_ranks)
        with kernel_limits():
            SearchShape(self.experts, num_ranks, self.replica_slots)
            LayerShape(
                *(num_ranks, self.experts, self.replica_slots, self.hidden, self.intermediate, self.top_k, self.tokens)
            )
        plan = plan_replicas(split_by_source(self.hot_rows(num_ranks), num_ranks), layout)
        if len(plan.transfers) == 0 or plan.max_load == plan.fixed_loads.max():
            batch = f"a batch of {self.tokens} tokens a rank, {self.top_k} of {self.experts} experts each"
            raise UnsupportedError(batch, "needs no replicas, so they cost nothing here", "measure a larger one")

    def hot_rows(self, num_ranks: int) -> CountArray:
        """int64 [E]: rows of the batch that is measured, the hottest experts first."""
        shares = zipf_shares(self.experts, max(1.0, min(KAPPA, 0.9 * self.experts / self.top_k)))
        return scale_counts(shares, num_ranks * self.tokens, self.top_k)


@dataclass(frozen=True)
class LayerTimes:
    """Times of one batch on the slowest rank, nanoseconds; ``plan`` is what planning with replica slots adds."""

    fixed: float
    staged: float
    pipelined: float
    resident: float
    plan: float


def gate_costs(times: LayerTimes, fixed_load: int, plan: ReplicaPlan) -> GateCosts:
    """What the times say.

    A block costs what a block less on the busiest rank has saved; a replica what ``staged`` pays over ``resident``, a
    replica of the busiest link; hidden is the part of it that ``pipelined`` does not pay, 0 where it is within noise.

    Args:
        times: of one batch.
        fixed_load: blocks of the busiest rank at the fixed placement, more than with ``plan``.
        plan: of the other three, with transfers.
    """
    block = (times.fixed - times.resident + times.plan) / (fixed_load - plan.max_load)
    separate = times.staged - times.resident
    hidden = 0.0
    if separate > NOISE * times.resident:
        hidden = min(1.0, max(0.0, 1 - (times.pipelined - times.resident) / separate))
    replica = separate / GateCosts(0, 1, 0, 0).exposed_ns(plan)
    block_ns, replica_ns, plan_ns = (max(0, round(cost)) for cost in (block, replica, times.plan))
    return GateCosts(block_ns, replica_ns, plan_ns, int(1000 * hidden))


def measure_costs(shape: MeasuredShape, group: dist.ProcessGroup, max_tokens: int | None = None) -> GateCosts:
    """Measure on the ranks of ``group``, one GPU each; collective, the same on every rank.

    Args:
        shape: the layer and batch.
        group: NCCL.
        max_tokens: what the buffers are made for, if not for this batch; kernels are compiled for it.

    Raises:
        UnsupportedError: a shape that the kernels cannot serve.
        RuntimeError: the batch gave no transfers, or no rank was relieved.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    shape.check(num_ranks)
    executor = MegakernelExecutor(num_ranks, group, max_tokens or shape.tokens)
    batch = hot_batch(shape, num_ranks, rank)
    choices = {
        "fixed": MegaFluxConfig(replica_slots=0),
        "staged": MegaFluxConfig(replica_slots=shape.replica_slots, sticky=False, transfer="staged"),
        "pipelined": MegaFluxConfig(replica_slots=shape.replica_slots, sticky=False),
        "resident": MegaFluxConfig(replica_slots=shape.replica_slots, sticky=True),
    }
    times, plans, planning = {}, {}, {}
    for name, config in choices.items():
        layout = config.slot_layout(shape.experts, num_ranks)
        home = random_weights(shape, layout, rank)
        layer = executor.layer(layout, config, [Workspace(layout.num_replica_slots).slots(home, rank)])
        assert isinstance(layer, MegakernelLayer)
        times[name] = slowest_ns(lambda layer=layer: layer.forward([batch]), group)  # type: ignore[misc]
        plans[name] = layer.last_plan()
        if name in ("fixed", "pipelined"):
            planning[name] = slowest_ns(planner(layer, batch), group)
            layer.last_plan()
        del layer
    plan = plans["pipelined"]
    if len(plan.transfers) == 0 or plan.max_load >= plans["fixed"].max_load:
        raise RuntimeError(f"{asdict(shape)}: a batch of kappa {KAPPA} needed no replicas, so they cost nothing here")
    added = max(0.0, planning["pipelined"] - planning["fixed"])
    return gate_costs(LayerTimes(**times, plan=added), plans["fixed"].max_load, plan)


def hot_batch(shape: MeasuredShape, num_ranks: int, rank: int) -> RoutingBatch:
    """A rank's batch of Zipf routes; the hottest experts have the lowest ids, which are at home on rank 0."""
    ids = realise_routes(shape.hot_rows(num_ranks), num_ranks, shape.top_k, SEEDS[0])
    return RoutingBatch(
        torch.randn(shape.tokens, shape.hidden, device="cuda", dtype=torch.bfloat16),
        torch.from_numpy(np.ascontiguousarray(ids[rank])).int().cuda(),
        torch.full((shape.tokens, shape.top_k), 1 / shape.top_k, device="cuda"),
    )


def random_weights(shape: MeasuredShape, layout: SlotLayout, rank: int) -> ExpertWeights:
    """Home weights of a rank, of the size that makes outputs of order one."""
    own, hidden, intermediate = len(layout.home_experts(rank)), shape.hidden, shape.intermediate
    w13 = torch.empty(own, 2 * intermediate, hidden, device="cuda", dtype=torch.bfloat16)
    w2 = torch.empty(own, hidden, intermediate, device="cuda", dtype=torch.bfloat16)
    return ExpertWeights(w13.normal_(std=hidden**-0.5), w2.normal_(std=intermediate**-0.5))


def planner(layer: MegakernelLayer, batch: RoutingBatch) -> Callable[[], None]:
    """The planner alone, as the layer launches it for this batch."""
    shared, _ = layer.bound(batch.topk_ids.shape[1])
    routes, sizes = shared.load([batch])

    def run() -> None:
        layer.resident.fill_(-1)
        inputs = (routes, sizes, layer.resident)
        launch_planner(shared.planners, *inputs, layer.options, shared.timeout_s)

    return run


def slowest_ns(run: Callable[[], object], group: dist.ProcessGroup) -> float:
    """Median over runs of the slowest rank's time, nanoseconds, from a rest with the ranks together."""
    together = torch.zeros(1 << 22, device="cuda")  # 16 MB wake a sleeping link, one element does not
    samples = []
    for _ in range(WARMUP + RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        time.sleep(0.01)
        dist.barrier(group)
        torch.cuda._sleep(PAUSE_CYCLES)
        dist.all_reduce(together, group=group)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(1e6 * begin.elapsed_time(end))
    of_ranks: list[list[float]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, samples[WARMUP:], group=group)
    return float(np.median(np.max(of_ranks, axis=0)))


__all__ = ["LayerTimes", "MeasuredShape", "gate_costs", "measure_costs"]
