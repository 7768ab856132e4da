"""The device planner set up for tests and benchmarks: the ranks of this device, which are all or some of P.

Knows how to allocate and launch; decides nothing about cases, checks or timing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.peers import PEER_WORDS, Peer
from megaflux_kernels.plan_counts import compile_plan_counts
from megaflux_kernels.planner_buffers import (
    LaunchOptions,
    PlannerBuffers,
    WorkTables,
    home_table,
    launch_planner,
)
from megaflux_kernels.planner_map import PlannerMap, PlannerShape
from megaflux_kernels.symmetric import SymmetricMemory
from megaflux_kernels.worklist import HEADER_WORDS, Counters, LayerShape, Tiling, work_bounds
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from benchmarks.planner_cases import Group

PLAIN = LaunchOptions()
"""No transfer cost, no reduction penalty, no gate."""
TIMEOUT_S = float(os.environ.get("MEGAFLUX_WAIT_S", "2"))
"""Bound of a wait in tests and benchmarks: a hang ends soon. A sanitizer, under which all is slow, needs more."""


def num_chunks(local_ranks: int) -> int:
    """Histogram and route blocks a rank, so that all blocks of ``local_ranks`` ranks are resident on this device."""
    return max(1, torch.cuda.get_device_properties().multi_processor_count // local_ranks - 1)


@dataclass
class Rig:
    """Planners of the local ranks with their inputs.

    Attributes:
        ranks: buffers of the local ranks.
        tables: the forward kernel's tables of the local ranks, or None each.
        topk_ids: int32 [local, max_tokens, k].
        num_tokens: int32 [local].
        resident: int32 [local, P, s].
    """

    ranks: list[PlannerBuffers]
    tables: Sequence[Tables | None]
    topk_ids: Tensor
    num_tokens: Tensor
    resident: Tensor

    def launch(self, options: LaunchOptions = PLAIN) -> None:
        """Plan and route what the inputs hold."""
        launch_planner(self.ranks, self.topk_ids, self.num_tokens, self.resident, options, TIMEOUT_S)

    def load(self, batches: list[NDArray[np.int32]]) -> None:
        """Copy the ids of the local ranks, int32 [M_r, k] each, into the inputs."""
        for local, ids in enumerate(batches):
            self.topk_ids[local, : len(ids)].copy_(torch.from_numpy(ids))
        self.num_tokens.copy_(torch.tensor([len(ids) for ids in batches], dtype=torch.int32))

    def assert_no_failure(self) -> None:
        """Raise the first failed wait of a local rank."""
        for rank in self.ranks:
            failure = rank.failure()
            if failure is not None:
                raise RuntimeError(f"on rank {rank.rank}: {failure}")


def planner_shape(search: SearchShape, top_k: int, max_tokens: int, local_ranks: int) -> PlannerShape:
    """The shape for this device: as many chunks as fit beside the planning blocks."""
    return PlannerShape(search, top_k, max_tokens, num_chunks(local_ranks))


def make_rig(
    shape: PlannerShape,
    group: ProcessGroup | None = None,
    home_rank: NDArray[np.int32] | None = None,
    layer: LayerShape | None = None,
    trace: bool = False,
) -> Rig:
    """The local ranks; collective.

    Args:
        shape: what to plan and route.
        group: processes that hold the ranks evenly, a device each; None: all ranks are on this device.
        home_rank: int32 [E], default contiguous.
        layer: the layer whose forward tables are filled, or None.
        trace: record the ends of the stages.
    """
    num_ranks = shape.search.num_ranks
    memories = SymmetricMemory.allocate(PlannerMap(shape).num_bytes, num_ranks, group)
    tables: list[Tables] | list[None] = [None] * len(memories)
    if layer is not None:
        shared = SymmetricMemory.allocate(Tables.num_bytes(layer), num_ranks, group)
        tables = [Tables(layer, memory) for memory in shared]
    rig = _rig([planner(shape, *pair, home_rank, trace) for pair in zip(memories, tables, strict=True)], tables)
    if group is not None:
        torch.cuda.synchronize()
        torch.distributed.barrier(group)
    return rig


def planner(
    shape: PlannerShape,
    memory: SymmetricMemory,
    tables: Tables | None,
    home_rank: NDArray[np.int32] | None,
    trace: bool,
) -> PlannerBuffers:
    """The planner of one rank."""
    work = None
    if tables is not None:
        work = WorkTables(
            tables.layer,
            Tiling(),
            tables.header,
            tables.tasks,
            tables.transfers,
            tables.counters,
            tables.peers,
        )
    return PlannerBuffers(shape, memory, home_rank, work, trace)


class Tables:
    """The forward kernel's tables of one rank without the kernel; poisoned, so that a word not written is seen."""

    def __init__(self, layer: LayerShape, memory: SymmetricMemory) -> None:
        bounds, device = work_bounds(layer), memory.buffer.device
        self.layer = layer
        memory.buffer.fill_(0x5A)
        num_bytes = 4 * bounds.max_rows
        self.row_source = memory.buffer[:num_bytes].view(torch.int32)
        places = memory.buffer[num_bytes:][: 4 * layer.num_ranks * layer.max_tokens * layer.top_k]
        self.places = places.view(torch.int32).view(layer.num_ranks, layer.max_tokens, layer.top_k)
        self.header = torch.full((HEADER_WORDS,), 0, dtype=torch.int32, device=device)
        self.tasks = torch.full((bounds.max_tasks,), -1, dtype=torch.int64, device=device)
        self.transfers = torch.full((max(1, layer.num_replica_slots), 4), -1, dtype=torch.int32, device=device)
        size = Counters(bounds.max_blocks, layer.num_replica_slots).size
        self.counters = torch.full((size,), 7, dtype=torch.int32, device=device)
        table = torch.zeros(layer.num_ranks, PEER_WORDS, dtype=torch.int64)
        for rank, base in enumerate(memory.addresses):
            table[rank, Peer.ROW_SOURCE], table[rank, Peer.PLACES] = base, base + num_bytes
        self.peers = table.to(device)

    @staticmethod
    def num_bytes(layer: LayerShape) -> int:
        """Bytes of the tables that other ranks write."""
        return 4 * (work_bounds(layer).max_rows + layer.num_ranks * layer.max_tokens * layer.top_k)


def _rig(ranks: list[PlannerBuffers], tables: Sequence[Tables | None]) -> Rig:
    shape, local, device = ranks[0].shape, len(ranks), ranks[0].memory.buffer.device
    search = shape.search
    return Rig(
        ranks,
        tables,
        torch.zeros(local, shape.max_tokens, shape.top_k, dtype=torch.int32, device=device),
        torch.zeros(local, dtype=torch.int32, device=device),
        torch.full((local, search.num_ranks, search.num_replica_slots), -1, dtype=torch.int32, device=device),
    )


def plan_group(group: Group) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Plan all cases of a group in one launch.

    Returns:
        int32 [n, plan words] and the copies held afterwards, int32 [n, P, s].
    """
    from cuda.bindings.driver import CUstream
    from cutlass import Int32, Int64

    layout = group.layout
    search = SearchShape(layout.num_experts, layout.num_ranks, layout.num_replica_slots)
    compiled = compile_plan_counts(search)
    num = len(group.counts)
    counts = torch.from_numpy(group.counts.astype(np.int32)).cuda()
    homes = torch.from_numpy(home_table(layout.num_experts, layout.num_ranks, layout.home_rank)).cuda()
    resident = torch.from_numpy(group.resident.copy()).cuda()
    plans = torch.full((num, search.plan.num_words), -77, dtype=torch.int32, device="cuda")
    gate = group.gate
    costs = (gate.block_ns, gate.replica_ns, gate.plan_ns, gate.hidden_permille) if gate else (0, 0, 0, 0)
    compiled(
        *(Int64(tensor.data_ptr()) for tensor in (counts, homes, resident, plans)),
        Int32(num),
        Int32(group.options.transfer_cost_blocks),
        Int32(group.options.reduction_penalty),
        *(Int64(cost) for cost in costs[:3]),
        Int32(costs[3]),
        CUstream(torch.cuda.current_stream().cuda_stream),
    )
    return plans.cpu().numpy(), resident.cpu().numpy()


__all__ = ["TIMEOUT_S", "Rig", "make_rig", "num_chunks", "plan_group", "planner_shape"]
