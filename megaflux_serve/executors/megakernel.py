"""The megakernel executor: three launches a layer and batch, planner, forward kernel and combine, on Hopper GPUs.

Decides what is allocated, for whom, and in which order launches follow. Layers of one shape share planner, tables and
row buffers, since they run one after another; each layer has home weights and a table of resident replicas of its own,
and the replica slots that it is given.
Nothing is synchronised with the host, and a batch can be captured into a CUDA graph after one that was not.

A rank is a process with a GPU of its own, or a *virtual rank*: several ranks, or all, share the GPU of a process, each
with its share of the SMs, which tests what P GPUs would do. CUDA_DEVICE_MAX_CONNECTIONS must then exceed the ranks of a
GPU, since a launch that waits must not stand before one that it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from megaflux_kernels.forward import ForwardConfig
from megaflux_kernels.forward_buffers import ForwardBuffers, ForwardLayer, WeightPool
from megaflux_kernels.forward_map import ForwardMap, WeightMap
from megaflux_kernels.layout import MAX_BLOCKS, STALE, Header
from megaflux_kernels.planner_buffers import LaunchOptions, PlannerBuffers, WorkTables, launch_planner
from megaflux_kernels.planner_map import PlannerMap
from megaflux_kernels.symmetric import SymmetricMemory, local_ranks
from megaflux_kernels.sync.record import RECORD_WORDS, failed_wait
from megaflux_kernels.totals_map import Total
from megaflux_kernels.worklist import BLOCK_ROWS, LayerShape
from torch import Tensor

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import CapacityError, InputError, PeerTimeoutError, UnsupportedError
from megaflux_serve.executors.device import DeviceExecutor, DeviceLayer, MemoryUse
from megaflux_serve.executors.kernels import LayerKernels
from megaflux_serve.executors.limits import kernel_limits, layer_shape
from megaflux_serve.planning.gate import GateCosts
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.totals import totals_map
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertSlots, ExpertWeights, replica_bytes


class MegakernelExecutor(DeviceExecutor):
    """Layers on the current GPU.

    Args:
        num_ranks: P.
        group: N processes with a GPU each, which hold P/N ranks each, with any backend; None: this one holds all. They
            meet in it to allocate and until all have compiled; batches do without it.
        max_tokens: rows of the largest batch of a rank.
        timeout_s: the longest wait for a peer, in seconds. It covers what a slow peer may do between two layers.
    """

    kind = "megakernel"

    def __init__(
        self, num_ranks: int, group: dist.ProcessGroup | None = None, max_tokens: int = 8192, timeout_s: float = 60.0
    ) -> None:
        self.num_ranks, self.group, self.max_tokens, self.timeout_s = num_ranks, group, max_tokens, timeout_s
        with kernel_limits():
            self.local_ranks = local_ranks(num_ranks, group)
        self._shared: dict[tuple[LayerShape, SlotLayout], SharedBuffers] = {}
        self._awaited: dict[int, WeightPool] = {}  # by address: pools whose layer is not made yet
        self._weight_bytes = 0
        self._replica_bytes: dict[int, int] = {}  # by address

    def home_weights(self, layout: SlotLayout, hidden: int, intermediate: int) -> list[ExpertWeights]:
        s, tokens = layout.num_replica_slots, self.max_tokens
        layer_shape(layout.num_ranks, layout.num_experts, s, hidden, intermediate, top_k=1, max_tokens=tokens)
        pools = self.allocate_pools(layout, hidden, intermediate)
        self._awaited |= {pool.w1.data_ptr(): pool for pool in pools}
        return [ExpertWeights(pool.w1, pool.w2) for pool in pools]

    def layer(self, layout: SlotLayout, config: MegaFluxConfig, slots: Sequence[ExpertSlots]) -> DeviceLayer:
        if config.block_rows != BLOCK_ROWS:
            raise UnsupportedError(
                f"block_rows = {config.block_rows}", f"the kernels' blocks have {BLOCK_ROWS} rows", "leave it out"
            )
        for weights in (own.home for own in slots):
            if weights.dtype != torch.bfloat16 or weights.device.type != "cuda":
                raise UnsupportedError(
                    f"{weights.dtype} weights on {weights.device}", "the kernels compute in BF16", "use staged"
                )
        with kernel_limits():
            return MegakernelLayer(self, layout, config, slots)

    def note_failures(self) -> None:
        for shared in self._shared.values():
            shared.note_failures()

    def raise_failure(self) -> None:
        for shared in self._shared.values():
            shared.raise_failure()

    def timeouts(self) -> list[str]:
        records = [record.tolist() for shared in self._shared.values() for record in shared.failures]
        return [failure.wait.name.lower() for record in records if (failure := failed_wait(record)) is not None]

    def memory_use(self) -> MemoryUse:
        workspace = sum(shared.num_bytes for shared in self._shared.values())
        return MemoryUse(self._weight_bytes, sum(self._replica_bytes.values()), workspace)

    def pools(self, layout: SlotLayout, home: Sequence[ExpertWeights]) -> list[WeightPool]:
        """The home weights of a layer where peers can read them: those that ``home_weights`` made, or copies."""
        addresses = [weights.w13.data_ptr() for weights in home]
        if all(address in self._awaited for address in addresses):
            return [self._awaited.pop(address) for address in addresses]
        pools = self.allocate_pools(layout, home[0].hidden_size, home[0].w2.shape[2])
        for pool, weights in zip(pools, home, strict=True):
            pool.w1.copy_(weights.w13)
            pool.w2.copy_(weights.w2)
        return pools

    def allocate_pools(self, layout: SlotLayout, hidden: int, intermediate: int) -> list[WeightPool]:
        """Memory for the home weights of one layer, a local rank; collective."""
        weights = WeightMap(layout.experts_per_rank, hidden, intermediate)
        pools = [WeightPool(weights, memory) for memory in self.allocate(weights.num_bytes)]
        self._weight_bytes += len(pools) * weights.num_bytes
        return pools

    def note_replicas(self, slots: Sequence[ExpertSlots]) -> None:
        """Count replica slots of a layer, once however many layers share them."""
        self._replica_bytes |= replica_bytes(slots)

    def allocate(self, num_bytes: int) -> list[SymmetricMemory]:
        """Symmetric memory of the local ranks; collective."""
        return SymmetricMemory.allocate(num_bytes, self.num_ranks, self.group)

    def shared(self, shape: LayerShape, layout: SlotLayout) -> SharedBuffers:
        """What layers of one shape share, allocated with the first of them; collective then."""
        if (shape, layout) not in self._shared:
            self._shared[shape, layout] = SharedBuffers(self, shape, layout)
        return self._shared[shape, layout]

    def barrier(self) -> None:
        """Wait for all ranks, so that none launches while another still compiles."""
        torch.cuda.synchronize()
        if self.group is not None:
            dist.barrier(self.group)


class SharedBuffers:
    """Planner, forward buffers and inputs of the local ranks, for all layers of one shape.

    Args:
        executor: who allocates.
        shape: the layers.
        layout: ranks, experts and slots.

    Attributes:
        topk_ids: int32 [local, max_tokens, k], routes of virtual ranks, or those that have another dtype.
        sizes: int32 [max_tokens + 1], every number of tokens, so that none has to be written.
        failures: int32 [local, 8] on the host, the error records as last noted.
        num_bytes: of all buffers.
    """

    def __init__(self, executor: MegakernelExecutor, shape: LayerShape, layout: SlotLayout) -> None:
        num_local = len(executor.local_ranks)
        num_sms = torch.cuda.get_device_properties().multi_processor_count
        kernels = LayerKernels.of(shape, num_local, num_sms)
        config, planner, totals = kernels.config, kernels.planner, kernels.totals
        tables = executor.allocate(ForwardMap(shape, config.tiling).symmetric_bytes)
        self.shape, self.timeout_s = shape, executor.timeout_s
        self.forward = [ForwardBuffers(shape, config, memory, executor.timeout_s) for memory in tables]
        self.planners = [
            PlannerBuffers(planner, memory, layout.home_rank, _work_tables(buffers, config), totals=totals)
            for memory, buffers in zip(executor.allocate(PlannerMap(planner).num_bytes), self.forward, strict=True)
        ]
        for buffers, planning in zip(self.forward, self.planners, strict=True):
            buffers.error = planning.regions["error"]  # a rank that could not plan must not compute
        device = self.forward[0].x.device
        self.topk_ids = torch.zeros(num_local, shape.max_tokens, shape.top_k, dtype=torch.int32, device=device)
        self.sizes = torch.arange(shape.max_tokens + 1, dtype=torch.int32, device=device)
        self.num_bytes = self.topk_ids.nbytes + sum(planning.map.num_bytes for planning in self.planners)
        self.num_bytes += sum(sum(buffers.map.memory_use().values()) for buffers in self.forward)
        self.failures = torch.zeros(num_local, RECORD_WORDS, dtype=torch.int32, pin_memory=True)
        self.streams = [torch.cuda.Stream() for _ in self.forward]
        executor.barrier()

    def load(self, batches: Sequence[RoutingBatch]) -> tuple[Tensor, Tensor]:
        """Copy rows to where peers read them, in the ranks' own streams beside the planner.

        Returns:
            int32 [local, M, k] and [local]: routes and numbers of tokens, for the planner.

        Raises:
            CapacityError: more rows than ``max_tokens``.
        """
        current = torch.cuda.current_stream()
        for batch, buffers, stream in zip(batches, self.forward, self.streams, strict=True):
            num_tokens = batch.hidden.shape[0]
            if num_tokens > self.shape.max_tokens:
                raise CapacityError(
                    f"a batch of {num_tokens} rows does not fit max_tokens = {self.shape.max_tokens}; allowed: at most "
                    "that many rows a rank, or a larger max_tokens"
                )
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                buffers.x[:num_tokens].copy_(batch.hidden)
        if len(batches) == 1:
            ids, size = batches[0].topk_ids, batches[0].topk_ids.shape[0]
            if size and ids.dtype == torch.int32 and ids.is_contiguous():
                return ids[None], self.sizes[size : size + 1]
        for index, batch in enumerate(batches):
            self.topk_ids[index, : batch.topk_ids.shape[0]].copy_(batch.topk_ids)
        sizes = [self.sizes[batch.hidden.shape[0] :][:1] for batch in batches]
        return self.topk_ids, sizes[0] if len(sizes) == 1 else torch.cat(sizes)

    def note_failures(self) -> None:
        """Copy the error records to the host, in stream order."""
        for index, buffers in enumerate(self.forward):
            self.failures[index].copy_(buffers.error, non_blocking=True)

    def raise_failure(self) -> None:
        """Raise the first failed wait that has been noted.

        Raises:
            PeerTimeoutError: naming rank, phase and slot.
        """
        if not self.failures.any():
            return
        for buffers in self.forward:
            torch.cuda.synchronize(buffers.error.device)  # the copy of a record may not be whole yet
            failure = failed_wait(buffers.error.tolist())
            if failure is not None:
                raise PeerTimeoutError(failure.rank, failure.wait.name.lower(), failure.slot, self.timeout_s)


class MegakernelLayer(DeviceLayer):
    """One layer; see ``DeviceExecutor.layer``.

    The first batch tells k; what depends on it is allocated and compiled then, which every rank does together.
    """

    def __init__(
        self, executor: MegakernelExecutor, layout: SlotLayout, config: MegaFluxConfig, slots: Sequence[ExpertSlots]
    ) -> None:
        self.executor, self.layout, self.config = executor, layout, config
        self.options, self.pipelined = launch_options(config), config.transfer == "pipelined"
        home = [own.home for own in slots]
        _, double, hidden = home[0].w13.shape
        self.shape = LayerShape(
            *(layout.num_ranks, layout.num_experts, layout.num_replica_slots, hidden, double // 2),
            top_k=1,  # until the first batch
            max_tokens=executor.max_tokens,
        )
        self.pools = executor.pools(layout, home)
        self.slots = [
            ExpertSlots(ExpertWeights(pool.w1, pool.w2), own.replicas)
            for pool, own in zip(self.pools, slots, strict=True)
        ]
        executor.note_replicas(self.slots)
        extents = (len(self.pools), layout.num_ranks, layout.num_replica_slots)
        self.resident = torch.full(extents, -1, dtype=torch.int32, device=self.pools[0].w1.device)
        self.totals, self.ends = None, [None] * len(self.pools)
        if config.metrics:
            num_words = totals_map(layout.num_ranks, layout.num_experts).num_words
            self.totals = self.resident.new_zeros((len(self.pools), num_words), dtype=torch.int64)
            self.ends = list(self.totals[:, Total.FINISHED])
        self._bound: BoundLayer | None = None
        executor.barrier()

    def prepare(self, top_k: int) -> None:
        self.bound(top_k)

    def forward(self, batches: Sequence[RoutingBatch]) -> list[Tensor]:
        shared, layers = self.bound(batches[0].topk_ids.shape[1])
        shared.raise_failure()
        topk_ids, num_tokens = shared.load(batches)
        if not self.config.sticky:
            self.resident.fill_(-1)
        launch_planner(
            *(shared.planners, topk_ids, num_tokens, self.resident),
            *(self.options, shared.timeout_s, self.totals),
        )
        weights = [batch.topk_weights.contiguous() for batch in batches]
        outputs = [torch.empty_like(batch.hidden, memory_format=torch.contiguous_format) for batch in batches]
        current = torch.cuda.current_stream()
        for stream, layer, scales, out, end in zip(shared.streams, layers, weights, outputs, self.ends, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                if not self.pipelined:
                    layer.transfer()
                layer.forward(self.pipelined)
                layer.buffers.combine(scales, out, end)
        for stream in shared.streams:
            current.wait_stream(stream)
        if self.executor.notes_batches:
            shared.note_failures()
        return outputs

    def last_plan(self) -> ReplicaPlan:
        if self._bound is None:
            raise InputError("last_plan", "no batch has been served", "a layer that has served a batch")
        self._bound.shared.note_failures()
        torch.cuda.synchronize()
        self._bound.shared.raise_failure()
        return plan_on_host(self._bound.shared.planners[0], self.layout)

    def forget_replicas(self) -> None:
        self.resident.fill_(STALE)  # the next plan tells the other ranks

    def bound(self, top_k: int) -> tuple[SharedBuffers, list[ForwardLayer]]:
        """Shared buffers and launches for k; collective in the first batch.

        Raises:
            InputError: another k than before.
            UnsupportedError: a shape that the kernels cannot serve.
        """
        if self._bound is None:
            self._bound = self._bind(top_k)
        if self.shape.top_k != top_k:
            raise InputError("topk_ids", f"has {top_k} columns", f"{self.shape.top_k}, as before")
        return self._bound.shared, self._bound.layers

    def _bind(self, top_k: int) -> BoundLayer:
        with kernel_limits():
            self.shape = replace(self.shape, top_k=top_k)
            shared = self.executor.shared(self.shape, self.layout)
        replicas = [(own.replicas.w13, own.replicas.w2) for own in self.slots]
        layers = [ForwardLayer(*of_rank) for of_rank in zip(shared.forward, self.pools, replicas, strict=True)]
        self.executor.barrier()
        return BoundLayer(shared, layers)


@dataclass(frozen=True)
class BoundLayer:
    """What a layer launches, once k is known; one ``ForwardLayer`` a local rank."""

    shared: SharedBuffers
    layers: list[ForwardLayer]


def launch_options(config: MegaFluxConfig) -> LaunchOptions:
    """The planner's options as the device takes them."""
    gate = config.gate_costs
    if gate is None:
        return LaunchOptions(config.transfer_cost_blocks, config.reduction_penalty)
    if gate.block_ns == 0:  # no plan can save anything, but 0 would leave the device's gate out
        gate = GateCosts(block_ns=1, replica_ns=0, plan_ns=MAX_BLOCKS, hidden_permille=0)
    return LaunchOptions(
        *(config.transfer_cost_blocks, config.reduction_penalty),
        *(gate.block_ns, gate.replica_ns, gate.plan_ns, gate.hidden_permille),
    )


def plan_on_host(planner: PlannerBuffers, layout: SlotLayout) -> ReplicaPlan:
    """The last plan of a rank; waits for the device."""
    regions = planner.plan()
    header = regions["header"]
    counts = planner.regions["counts"][int(header[Header.EPOCH]) & 1].cpu().numpy().astype(np.int64)
    table = layout.slot_to_expert(regions["replica_experts"])
    rank, slot = np.nonzero(table >= 0)
    blocks = np.zeros((layout.num_experts, layout.num_ranks), dtype=np.int32)
    np.add.at(blocks, (table[rank, slot], rank), regions["slot_blocks"][rank, slot])
    return ReplicaPlan(
        layout,
        BLOCK_ROWS,
        counts,
        blocks,
        regions["replica_experts"].copy(),
        regions["transfers"][: regions["transfer_first"][-1]].copy(),
        int(header[Header.CANDIDATE]),
        bool(header[Header.GATED]),
    )


def _work_tables(buffers: ForwardBuffers, config: ForwardConfig) -> WorkTables:
    """Where the planner writes what the forward kernel reads."""
    return WorkTables(
        buffers.shape,
        config.tiling,
        buffers.header,
        buffers.tasks,
        buffers.transfers,
        buffers.counters,
        buffers.peers,
    )


__all__ = ["MegakernelExecutor", "MegakernelLayer", "kernel_limits", "launch_options", "plan_on_host"]
