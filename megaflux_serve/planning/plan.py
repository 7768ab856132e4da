"""ReplicaPlan: which rank computes how many token blocks of which expert, and which weights must move for it.

The value that the planner hands to every executor. It holds no algorithm: only the decision, its checks and what can be
read off it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.errors import InputError
from megaflux_serve.routing import CountArray
from megaflux_serve.slots import IntArray, SlotLayout

FIXED = -1
"""``ReplicaPlan.candidate`` of a plan that opens no replica."""

MAX_BLOCKS = 2**31 - 1
"""Blocks of one layer and batch, so that every load and sum fits int32."""


def blocks_per_expert(counts: CountArray, block_rows: int) -> IntArray:
    """int32 [E]: b_e = ceil(c_e / block_rows) of int64 [P, E] counts (MegaFlux section 3.1).

    Raises:
        InputError: the blocks of all experts do not fit 32 bits, in which the device keeps loads.
    """
    blocks: CountArray = -(-counts.sum(axis=0) // block_rows)
    if blocks.sum() > MAX_BLOCKS:
        raise InputError("counts", f"fill {blocks.sum()} blocks of {block_rows} rows", f"at most {MAX_BLOCKS} blocks")
    return blocks.astype(np.int32)


@dataclass(frozen=True)
class ReplicaPlan:
    """Placement of replicas and assignment of token blocks for one layer and one batch.

    Attributes:
        layout: ranks, experts and slots.
        block_rows: rows of a full token block, beta.
        counts: int64 [P, E], the histogram that was planned for: rows by source rank and expert.
        blocks: int32 [E, P], q: blocks of expert e that rank r computes.
        replica_experts: int32 [P, s], the expert in each replica slot once the plan is carried out, -1 for an empty
            one.
            A resident copy that the plan does not use stays in its slot unless the plan needs the slot.
        transfers: int32 [n, 3], rows of (expert, rank, replica slot index 0..s-1): weights that must be copied from the
            expert's home before the blocks there can run; ordered by (rank, slot).
        candidate: which of the greedy searches won (see ``planner.CANDIDATES``), or ``FIXED``.
        gated: True when the gate chose the fixed placement although the search had found replicas.
    """

    layout: SlotLayout
    block_rows: int
    counts: CountArray
    blocks: IntArray
    replica_experts: IntArray
    transfers: IntArray
    candidate: int
    gated: bool = False

    @property
    def loads(self) -> NDArray[np.int64]:
        """int64 [P]: blocks that each rank computes, l_r (Eq. 3)."""
        loads: NDArray[np.int64] = self.blocks.sum(axis=0, dtype=np.int64)
        return loads

    @property
    def max_load(self) -> int:
        """Blocks on the busiest rank."""
        return int(self.loads.max())

    @property
    def fixed_loads(self) -> NDArray[np.int64]:
        """int64 [P]: blocks of each rank without replicas."""
        loads = np.zeros(self.layout.num_ranks, dtype=np.int64)
        np.add.at(loads, self.layout.home_rank, self.blocks.sum(axis=1, dtype=np.int64))
        return loads

    @property
    def replicas(self) -> IntArray:
        """int32 [n, 2]: (expert, rank) of every replica that computes at least one block, ordered."""
        away = self.blocks > 0
        away[np.arange(self.layout.num_experts), self.layout.home_rank] = False
        return np.argwhere(away).astype(np.int32)

    @property
    def num_replicas(self) -> int:
        """Replicas in use."""
        return len(self.replicas)

    @property
    def blocks_moved(self) -> int:
        """Blocks computed away from their expert's home."""
        experts, ranks = self.replicas.T
        return int(self.blocks[experts, ranks].sum())

    def rows(self) -> CountArray:
        """int64 [E, P]: routed rows (not padded) of expert e that rank r computes, N of Eq. 8 before summing.

        An expert's blocks go to its ranks in ascending rank order, so only the last rank can hold the partial block.
        """
        last = np.minimum(
            np.cumsum(self.blocks, axis=1, dtype=np.int64) * self.block_rows, self.counts.sum(axis=0)[:, None]
        )
        rows: CountArray = np.diff(last, axis=1, prepend=0)
        return rows

    def check(self) -> None:
        """Verify the constraints of Eq. 3 and the bookkeeping of slots.

        Raises:
            InputError: naming the first constraint that the plan breaks.
        """
        layout, experts = self.layout, np.arange(self.layout.num_experts)
        wanted = blocks_per_expert(self.counts, self.block_rows)
        if self.blocks.min(initial=0) < 0 or not np.array_equal(self.blocks.sum(axis=1), wanted):
            raise InputError("plan.blocks", "does not compute every block exactly once", "sum over ranks = b_e, q >= 0")
        away = self.blocks > 0
        away[experts, layout.home_rank] = False
        if (away.sum(axis=0) > layout.num_replica_slots).any():
            raise InputError(
                "plan.blocks", "uses more replicas on a rank than it has slots", f"{layout.num_replica_slots}"
            )
        held = layout.expert_to_index(self.replica_experts) >= 0
        if (away & ~held).any():
            raise InputError("plan.replica_experts", "lacks an expert that computes there", "a slot for every replica")
        for rank, slots in enumerate(self.replica_experts):
            used = slots[slots >= 0]
            if np.unique(used).size != used.size or (layout.home_rank[used] == rank).any():
                raise InputError(
                    "plan.replica_experts", f"repeats an expert on rank {rank}: {slots}", "distinct, not home"
                )
        for expert, rank, slot in self.transfers:
            if self.replica_experts[rank, slot] != expert or not away[expert, rank]:
                raise InputError(
                    "plan.transfers", f"moves expert {expert} to rank {rank} for nothing", "replicas in use"
                )


def fixed_plan(
    counts: CountArray, layout: SlotLayout, block_rows: int, resident: IntArray | None = None, gated: bool = False
) -> ReplicaPlan:
    """The plan without replicas, q0 of appendix A.1: every block on its expert's home rank.

    Args:
        counts: int64 [P, E] rows by source rank and expert.
        layout: ranks, experts and slots.
        block_rows: rows of a full block.
        resident: int32 [P, s], copies that stay in their slots, -1 for none.
        gated: see ``ReplicaPlan.gated``.
    """
    blocks = np.zeros((layout.num_experts, layout.num_ranks), dtype=np.int32)
    blocks[np.arange(layout.num_experts), layout.home_rank] = blocks_per_expert(counts, block_rows)
    stay = layout.no_replicas() if resident is None else resident.copy()
    return ReplicaPlan(layout, block_rows, counts, blocks, stay, np.empty((0, 3), np.int32), FIXED, gated)
