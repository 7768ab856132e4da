"""ReplicatedMoE: one MoE layer with replicas, the one object that a plugin calls.

Decides the order of the serving flow and which replicas are resident. Knows neither engines nor how the executor moves
rows; metrics, the plan log and capture attach as observers. On an executor that plans on the device, the whole flow is
the executor's, and nothing here waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import InputError, UnsupportedError
from megaflux_serve.executors.base import Executor
from megaflux_serve.executors.device import DeviceExecutor, DeviceLayer
from megaflux_serve.planning.fast_planner import plan_replicas
from megaflux_serve.planning.gate import apply_gate
from megaflux_serve.planning.plan import ReplicaPlan, fixed_plan
from megaflux_serve.routing import CountArray, RoutingBatch, expert_counts
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertWeights, Workspace


@dataclass(frozen=True)
class LayerReport:
    """What one layer did for one batch, handed to observers after the batch is done.

    Attributes:
        layer: name of the layer.
        step: batches that the layer had served before this one.
        tokens: rows of the batch on all ranks.
        plan: the plan that was carried out.
        planner_ns: nanoseconds from the start of planning until the plan was known, exchange of counts included; None
            where the device plans.
        layer_ns: nanoseconds of the whole batch; None on a device, where it ends after the call does.
    """

    layer: str
    step: int
    tokens: int
    plan: ReplicaPlan
    planner_ns: int | None = None
    layer_ns: int | None = None


Observer = Callable[[LayerReport], None]


class ReplicatedMoE:
    """A replica-aware MoE layer on the local ranks of this process.

    ::

        config = MegaFluxConfig.parse({"replica_slots": 2})
        layout = config.slot_layout(num_experts, num_ranks)
        executor = select_executor(config, num_ranks, group)
        workspace = Workspace(layout.num_replica_slots, config.sticky)  # one for all layers of the process
        moe = ReplicatedMoE("model.layers.0.mlp", layout, config, executor, workspace, [ExpertWeights(w13, w2)])
        output = moe.forward_rank(RoutingBatch(hidden, topk_ids, topk_weights))

    Every rank of the expert-parallel group must make the same calls in the same order, ranks without rows too.

    Args:
        name: the layer's name, for reports.
        layout: ranks, experts and slots; equal on every rank.
        config: options; equal on every rank.
        executor: who carries plans out, or plans on the device.
        workspace: where replica slots come from.
        home: home weights a local rank, E/P experts each: views of the engine's parameters, which stay where they are.
            A device executor reads them from memory that peers can read, ``slots[i].home``: it copies those that are
            not from its ``home_weights``, and the engine's parameters must then be made views of that.
        observers: called with a ``LayerReport`` after every batch, in order. With a device executor a report waits for
            the batch to end.

    Raises:
        InputError: weights or layout that do not fit the executor.
    """

    def __init__(
        self,
        name: str,
        layout: SlotLayout,
        config: MegaFluxConfig,
        executor: Executor | DeviceExecutor,
        workspace: Workspace,
        home: Sequence[ExpertWeights],
        observers: Sequence[Observer] = (),
    ) -> None:
        if executor.num_ranks != layout.num_ranks:
            raise InputError("layout", f"has {layout.num_ranks} ranks", f"the executor's {executor.num_ranks}")
        if len(home) != len(executor.local_ranks):
            raise InputError("home", f"holds {len(home)} ranks", f"the {len(executor.local_ranks)} local ranks")
        for weights in home:
            if weights.num_experts != layout.experts_per_rank:
                raise InputError("home", f"holds {weights.num_experts} experts", f"{layout.experts_per_rank} a rank")
        self.name, self.layout, self.config = name, layout, config
        self.observers = list(observers)
        self.on_device: DeviceLayer | None = None
        self.slots = [workspace.slots(own, rank) for own, rank in zip(home, executor.local_ranks, strict=True)]
        if isinstance(executor, DeviceExecutor):
            self.on_device = executor.layer(layout, config, self.slots)
            self.slots = list(self.on_device.slots)
        else:
            self.executor = executor
        self.resident, self.is_stale = layout.no_replicas(), False
        self.step = 0

    def forward(self, batches: Sequence[RoutingBatch]) -> list[Tensor]:
        """Serve one batch: [M, H] for each local rank, every routed row computed once, none changed.

        Args:
            batches: rows and routes a local rank; any may have no rows.

        Raises:
            InputError: a tensor that breaks its contract.
        """
        if self.on_device is not None:
            return self.forward_on(self.on_device, batches)
        for batch, slots in zip(batches, self.slots, strict=True):
            batch.check(self.layout.num_experts, slots.home.hidden_size, slots.home.dtype)
        start = time.perf_counter_ns()
        local_counts = [expert_counts(batch.ids_array(), self.layout.num_experts) for batch in batches]
        counts = self.gather_counts(local_counts)
        plan = self.plan(counts)
        planned = time.perf_counter_ns()
        self.resident = self.layout.no_replicas()  # were the batch to fail, no replica slot could be trusted
        outputs = self.executor.execute(batches, plan, self.slots)
        layer_ns = time.perf_counter_ns() - start if outputs[0].device.type == "cpu" else None
        if self.config.sticky:
            self.resident = plan.replica_experts
        self.report(plan, batches[0].topk_ids.shape[1], planned - start, layer_ns)
        return outputs

    def forward_rank(self, batch: RoutingBatch) -> Tensor:
        """``forward`` for a process that holds one rank."""
        (output,) = self.forward([batch])
        return output

    def forward_on(self, layer: DeviceLayer, batches: Sequence[RoutingBatch]) -> list[Tensor]:
        """``forward`` without the host: only observers, if there are any, wait for the device."""
        for batch, slots in zip(batches, self.slots, strict=True):
            batch.check_shapes(slots.home.hidden_size, slots.home.dtype)
        outputs = layer.forward(batches)
        if self.observers:
            self.report(layer.last_plan(), batches[0].topk_ids.shape[1])
        else:
            self.step += 1
        return outputs

    def gather_counts(self, local_counts: Sequence[CountArray]) -> CountArray:
        """int64 [P, E]: exchange histograms, and with them whether a rank's weights changed since the last batch.

        Residency has to stay equal on every rank, whenever and wherever weights are updated: one stale rank makes all
        of them forget.
        """
        gathered = self.executor.gather_counts([np.append(counts, np.int64(self.is_stale)) for counts in local_counts])
        if gathered[:, -1].any():
            self.resident = self.layout.no_replicas()
        self.is_stale = False
        return np.ascontiguousarray(gathered[:, :-1])

    def plan(self, counts: CountArray) -> ReplicaPlan:
        """Which replicas this batch uses: the planner's choice, unless the gate says that it does not pay.

        Args:
            counts: int64 [P, E] rows by source rank and expert.
        """
        if self.layout.num_replica_slots == 0:
            return fixed_plan(counts, self.layout, self.config.block_rows)
        plan = plan_replicas(counts, self.layout, self.config.planner_options, self.resident)
        costs = self.config.gate_costs
        return plan if costs is None else apply_gate(plan, costs, self.resident)

    def report(self, plan: ReplicaPlan, top_k: int, planner_ns: int | None = None, layer_ns: int | None = None) -> None:
        """Tell the observers what the batch did."""
        tokens = int(plan.counts.sum()) // top_k
        report = LayerReport(self.name, self.step, tokens, plan, planner_ns, layer_ns)
        self.step += 1
        for observer in self.observers:
            observer(report)

    def check_home(self, w13: Tensor, w2: Tensor) -> None:
        """Hold an engine's parameters to the weights that this rank's layer reads; copies nothing.

        Args:
            w13: [E/P, 2I, H], the parameter as it is now.
            w2: [E/P, H, I], likewise.

        Raises:
            UnsupportedError: a parameter was replaced by another tensor, which the layer would never read.
        """
        home = self.slots[0].home
        if (w13.data_ptr(), w2.data_ptr()) != (home.w13.data_ptr(), home.w2.data_ptr()):
            raise UnsupportedError(
                self.name, "its weight tensors were replaced by others", "copy new weights into them"
            )

    def weights_updated(self) -> None:
        """Home weights of this process changed: before the next batch, every rank forgets its resident replicas."""
        if self.on_device is not None:
            self.on_device.forget_replicas()
        self.is_stale = True


__all__ = ["LayerReport", "Observer", "ReplicatedMoE"]
