"""The planner's memory on one rank as tensors, and its launch.

Allocates everything of ``planner_map.py`` once; addresses never change, so that a launch can be captured into a CUDA
graph. Refuses on the host what the device could only answer with a wrong result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from numpy.typing import NDArray
from torch import Tensor

from megaflux_kernels.layout import MAX_PENALTY, ShapeError
from megaflux_kernels.own_tables import ForwardTables
from megaflux_kernels.planner import compile_planner
from megaflux_kernels.planner_map import PlannerMap, PlannerShape, Work
from megaflux_kernels.symmetric import SymmetricMemory
from megaflux_kernels.sync.record import FailedWait, failed_wait
from megaflux_kernels.totals_map import TotalsMap
from megaflux_kernels.worklist import LayerShape, Tiling


@dataclass(frozen=True)
class LaunchOptions:
    """Options of the reference planner and the gate's coefficients; integers.

    Attributes:
        transfer_cost_blocks: a new, non-resident replica must win more blocks than this; at least 0.
        reduction_penalty: lambda in blocks, 0 to 4096; 0 leaves the pass out.
        block_ns: time of one block in nanoseconds; 0 leaves the gate out.
        replica_ns: time to move one replica's weights.
        plan_ns: time of planning.
        hidden_permille: share of the transfer time that computing hides, 0 to 1000.
    """

    transfer_cost_blocks: int = 0
    reduction_penalty: int = 0
    block_ns: int = 0
    replica_ns: int = 0
    plan_ns: int = 0
    hidden_permille: int = 0

    def __post_init__(self) -> None:
        for name in ("transfer_cost_blocks", "block_ns", "replica_ns", "plan_ns"):
            if not 0 <= getattr(self, name) < 1 << 31:
                raise ShapeError(name, getattr(self, name), "0 to 2**31 - 1")
        for name, high in (("reduction_penalty", MAX_PENALTY), ("hidden_permille", 1000)):
            if not 0 <= getattr(self, name) <= high:
                raise ShapeError(name, getattr(self, name), f"0 to {high}")


class WorkTables(NamedTuple):
    """The forward kernel's tables on one rank (``worklist.py``), which a launch fills.

    Attributes:
        shape: the layer.
        tiling: tiles, groups and lag.
        header: int32 [8].
        tasks: int64 [max_tasks].
        transfers: int32 [s, 4].
        counters: int32 [``Counters.size``].
        peers: int64 [P, 7], see ``peers.py``.
    """

    shape: LayerShape
    tiling: Tiling
    header: Tensor
    tasks: Tensor
    transfers: Tensor
    counters: Tensor
    peers: Tensor


class PlannerBuffers:
    """The planner's memory of one rank.

    Args:
        shape: what the launch is compiled for.
        memory: at least ``PlannerMap(shape).num_bytes`` bytes on every rank.
        home_rank: int [E], the rank that owns each expert, E/P experts a rank; default: ``e // (E/P)``.
        forward: the forward kernel's tables, or None.
        trace: record the ends of the stages.
        totals: memory map of the totals that ``launch_planner`` may be given, or None.

    Raises:
        ShapeError: the memory is too small or of another number of ranks, the homes are uneven, or the forward kernel
            is of another shape.
    """

    def __init__(
        self,
        shape: PlannerShape,
        memory: SymmetricMemory,
        home_rank: NDArray[np.integer] | None = None,
        forward: WorkTables | None = None,
        trace: bool = False,
        totals: TotalsMap | None = None,
    ) -> None:
        search, self.totals = shape.search, totals
        self.shape, self.map, self.memory, self.rank = shape, PlannerMap(shape), memory, memory.rank
        if memory.num_ranks != search.num_ranks:
            raise ShapeError("memory.addresses", memory.num_ranks, f"the {search.num_ranks} ranks compiled for")
        if memory.buffer.numel() < self.map.num_bytes:
            raise ShapeError("memory.buffer", memory.buffer.numel(), f"at least {self.map.num_bytes} bytes")
        self.regions = {name: self._view(name) for name in self.map.regions}
        self.regions["homes"].copy_(torch.from_numpy(home_table(search.num_experts, search.num_ranks, home_rank)))
        self.regions["peers"].copy_(torch.tensor(memory.addresses, dtype=torch.int64))
        tables = None
        if forward is not None:
            tables = ForwardTables(forward.shape, forward.tiling)
            self._attach(forward)
        self.compiled = compile_planner(shape, tables, trace, totals)

    def _view(self, name: str) -> Tensor:
        region, first = self.map.regions[name], self.map.offsets[name]
        flat = self.memory.buffer[first : first + region.num_bytes]
        return flat.view(getattr(torch, region.dtype)).view(region.extents)

    def _attach(self, forward: WorkTables) -> None:
        """Note where the forward kernel's tables are."""
        search, theirs = self.shape.search, forward.shape
        for name, mine, other in (
            ("num_ranks", search.num_ranks, theirs.num_ranks),
            ("num_experts", search.num_experts, theirs.num_experts),
            ("num_replica_slots", search.num_replica_slots, theirs.num_replica_slots),
            ("block_rows", search.block_rows, 128),
            ("top_k", self.shape.top_k, theirs.top_k),
            ("max_tokens", self.shape.max_tokens, theirs.max_tokens),
        ):
            if mine != other:
                raise ShapeError(f"forward.{name}", other, f"the planner's {mine}")
        addresses = [0] * int(Work.SIZE)
        for field, tensor in (
            (Work.HEADER, forward.header),
            (Work.TASKS, forward.tasks),
            (Work.TRANSFERS, forward.transfers),
            (Work.COUNTERS, forward.counters),
            (Work.PEERS, forward.peers),
        ):
            addresses[int(field)] = tensor.data_ptr()
        self.regions["work"].copy_(torch.tensor(addresses, dtype=torch.int64))

    def plan(self) -> dict[str, NDArray[np.int32]]:
        """The last plan, copied to the host: the regions of ``layout.PlanLayout``; synchronises with the device."""
        return self.shape.search.plan.split(self.regions["plan"].cpu().numpy())

    def failure(self) -> FailedWait | None:
        """The first wait of this rank that has failed, or None; synchronises with the device."""
        return failed_wait(self.regions["error"].tolist())


def home_table(num_experts: int, num_ranks: int, home_rank: NDArray[np.integer] | None = None) -> NDArray[np.int32]:
    """int32 [2, E]: expert of every home slot (rank * E/P + index), then home slot of every expert.

    Raises:
        ShapeError: not E/P experts on every rank.
    """
    own = num_experts // num_ranks
    home = np.arange(num_experts) // own if home_rank is None else np.asarray(home_rank)
    even = home.shape == (num_experts,) and np.array_equal(np.unique(home), np.arange(num_ranks))
    if not even or not (np.bincount(home) == own).all():
        raise ShapeError("home_rank", home.tolist(), f"{own} of {num_experts} experts on each of {num_ranks} ranks")
    expert_of = np.argsort(home, kind="stable").astype(np.int32)
    home_of = np.empty(num_experts, dtype=np.int32)
    home_of[expert_of] = np.arange(num_experts, dtype=np.int32)
    return np.stack([expert_of, home_of])


def launch_planner(
    ranks: Sequence[PlannerBuffers],
    topk_ids: Tensor,
    num_tokens: Tensor,
    resident: Tensor,
    options: LaunchOptions = LaunchOptions(),
    timeout_s: float = 10.0,
    totals: Tensor | None = None,
) -> None:
    """Plan and route one batch of the local ranks: one launch on the current stream, nothing is waited for.

    Args:
        ranks: buffers of the ranks that this process holds, consecutive ones in order.
        topk_ids: int32 [local, M, k], logical expert ids, M at most ``max_tokens``; on the device, contiguous. The ids
            of a token are distinct and in range: routers give such ids, and the device does not check.
        num_tokens: int32 [local], tokens of each rank that are routed, 0 to M.
        resident: int32 [local, P, s], copies held before, -1 for none; overwritten with those held afterwards. A rank
            whose weights have changed fills its own with ``layout.STALE``, and all ranks forget.
        options: options; the same on every rank.
        timeout_s: bound of each wait, seconds.
        totals: int64 [local, ``TotalsMap.num_words``], to which the batch is added; needs ranks that were made for it.

    Raises:
        ShapeError: a buffer of another shape, dtype or device.
    """
    first, search = ranks[0], ranks[0].shape.search
    device, local = first.memory.buffer.device, len(ranks)
    if topk_ids.dim() != 3 or not 0 < topk_ids.shape[1] <= first.shape.max_tokens:
        raise ShapeError(
            "topk_ids", list(topk_ids.shape), f"[{local}, 1 to {first.shape.max_tokens}, {first.shape.top_k}]"
        )
    for name, tensor, extents in (
        ("topk_ids", topk_ids, (local, topk_ids.shape[1], first.shape.top_k)),
        ("num_tokens", num_tokens, (local,)),
        ("resident", resident, (local, search.num_ranks, search.num_replica_slots)),
    ):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != extents or not tensor.is_contiguous():
            raise ShapeError(name, f"{tensor.dtype} {list(tensor.shape)}", f"contiguous torch.int32 {list(extents)}")
        if tensor.device != device:
            raise ShapeError(name, f"on {tensor.device}", f"on {device}")
    if totals is not None:
        allowed = (local, first.totals.num_words) if first.totals else None
        if tuple(totals.shape) != allowed or totals.dtype != torch.int64 or not totals.is_contiguous():
            raise ShapeError("totals", f"{totals.dtype} {list(totals.shape)}", f"None, or torch.int64 {allowed}")
        if totals.device != device:
            raise ShapeError("totals", f"on {totals.device}", f"on {device}")
    bases = [rank.memory.buffer.data_ptr() for rank in ranks]
    stride = bases[1] - bases[0] if local > 1 else 0
    numbers = [rank.rank for rank in ranks]
    evenly = bases == [bases[0] + i * stride for i in range(local)]
    if not evenly or numbers != list(range(first.rank, first.rank + local)):
        raise ShapeError("ranks", numbers, "consecutive ranks whose memory is equally far apart")
    first.compiled(
        Int64(topk_ids.data_ptr()),
        Int64(4 * topk_ids.stride(0)),
        Int64(num_tokens.data_ptr()),
        Int64(resident.data_ptr()),
        Int64(0 if totals is None else totals.data_ptr()),
        Int64(bases[0]),
        Int64(stride),
        Int32(first.rank),
        Int32(local),
        Int32(options.transfer_cost_blocks),
        Int32(options.reduction_penalty),
        Int64(options.block_ns),
        Int64(options.replica_ns),
        Int64(options.plan_ns),
        Int32(options.hidden_permille),
        Int64(int(timeout_s * 1e9)),
        CUstream(torch.cuda.current_stream(device).cuda_stream),
    )


__all__ = ["LaunchOptions", "PlannerBuffers", "home_table", "launch_planner"]
