"""The replica planner of MegaFlux section 3.1 and appendix A, in plain Python: the specification.

A pure function of (counts, layout, options, resident copies). The compiled planner (``fast_planner``) and the device
planner (``megaflux_kernels.planner``) equal it exactly, block for block and slot for slot, so every tie-break and every
bound is written down here.

Steps, numbered again in the body:

1. Count blocks, ``b_e = ceil(c_e / block_rows)``; target ``tau = ceil(sum(b) / P)`` blocks a rank.
2. Run the greedy searches of ``CANDIDATES`` from the no-replica assignment: the paper's four (donor priority x
   fan-out), each with resident copies first and without regard to them.
3. Select the smallest maximum load; ties: fewest new transfers, then fewest replicas, then the earlier candidate.
4. Prune replicas whose whole allocation fits on another copy under the selected maximum.
5. Refine by single blocks from the most to the least loaded rank.
6. With ``reduction_penalty > 0``: prune by the owner-side reduction cost, or fall back to no replicas (appendix A.2).
7. Give every replica a slot; resident copies keep theirs.

Where the paper leaves a choice open, this is the choice (``load`` in blocks, ``q[e][r]`` blocks of expert e on rank r):

* Ranks are compared by load, ties go to the lower rank; experts by allocation, ties to the lower id.
* A round orders its donors once, at its start: every rank above ``tau``, by decreasing overload ``load - tau`` or by
  decreasing ``max(q[e][d] for e owned by d)``. Receivers are filled to ``tau`` at most, so no donor appears later.
* The pass over a donor's existing replicas is the paper's. From the no-replica assignment it never moves a block: a
  shift leaves its receiver at ``tau`` or the expert without home blocks, and neither is undone during a search.
* The test "load has fallen to tau or below" is made after every move, also between two copies of one expert.
* *Resident* copies (weights already in a slot of r, not yet used by this plan) are tried before a new copy of the same
  expert is opened. They take a slot of the budget but are no new copy: they do not count for single fan-out. With few
  slots they can stand in the way of a better balance, hence the searches without regard to them, for which every copy
  is a new one. Where nothing is resident these find what the others find, and the others win the tie.
* *Transfer-aware*: a new, non-resident copy is opened only if it wins more than ``transfer_cost_blocks`` blocks.
* Refinement stops after ``REFINE_MOVES_PER_RANK * P`` moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.planning.plan import FIXED, MAX_BLOCKS, ReplicaPlan, blocks_per_expert, fixed_plan
from megaflux_serve.routing import check_counts
from megaflux_serve.slots import IntArray, SlotLayout

REFINE_MOVES_PER_RANK = 4
"""Bound of step 5, in single-block moves a rank."""


class Candidate(NamedTuple):
    """One greedy search: which donor goes first, how many new copies of an expert a round may open, residents first."""

    donor_priority: Literal["overload", "hottest_expert"]
    fan_out: Literal["single", "multiple"]
    keeps_residents: bool


CANDIDATES = (
    Candidate("overload", "single", True),
    Candidate("overload", "multiple", True),
    Candidate("hottest_expert", "single", True),
    Candidate("hottest_expert", "multiple", True),
    Candidate("overload", "single", False),
    Candidate("overload", "multiple", False),
    Candidate("hottest_expert", "single", False),
    Candidate("hottest_expert", "multiple", False),
)


@dataclass(frozen=True)
class PlannerOptions:
    """What the planner may do.

    Attributes:
        block_rows: beta, rows of a full token block; at least 1 (the kernels need 128).
        reduction_penalty: lambda of appendix A.2 in blocks, at least 0; 0 (inference) leaves the pass out, the paper's
            backward uses 12.
        transfer_cost_blocks: a new, non-resident replica must win more blocks than this; at least 0, the paper's 0
            accepts any gain.

    All are integers of at most ``MAX_BLOCKS``.
    """

    block_rows: int = 128
    reduction_penalty: int = 0
    transfer_cost_blocks: int = 0

    def __post_init__(self) -> None:
        for name, low in (("block_rows", 1), ("reduction_penalty", 0), ("transfer_cost_blocks", 0)):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or not low <= value <= MAX_BLOCKS:
                raise ConfigError(name, value, f"an integer of at least {low} and at most {MAX_BLOCKS}")


def check_resident(resident: ArrayLike | None, layout: SlotLayout) -> IntArray:
    """The resident copies as int32 [P, s], -1 for an empty slot.

    Raises:
        InputError: wrong shape or dtype, an id out of range, an expert twice on a rank or on its own home rank.
    """
    if resident is None:
        return layout.no_replicas()
    given = np.asarray(resident)
    shape = (layout.num_ranks, layout.num_replica_slots)
    if given.shape != shape:
        raise InputError("resident", f"has shape {given.shape}", f"{shape} (rank, replica slot)")
    if given.size and given.dtype.kind not in "iu":
        raise InputError("resident", f"has dtype {given.dtype}", "an integer dtype")
    if given.size and (given.min() < -1 or given.max() >= layout.num_experts):
        raise InputError("resident", "holds an expert id out of range", f"-1 or 0 to {layout.num_experts - 1}")
    table = given.astype(np.int32, copy=False)
    for rank, slots in enumerate(table):
        held = slots[slots >= 0]
        if np.unique(held).size != held.size or (layout.home_rank[held] == rank).any():
            raise InputError("resident", f"rank {rank} holds {slots.tolist()}", "distinct experts of other ranks")
    return table


class _Search:
    """State of one search: q, loads and slots in use, with the only two ways to change them."""

    def __init__(self, blocks: IntArray, layout: SlotLayout, resident: IntArray, options: PlannerOptions) -> None:
        num_experts, num_ranks = layout.num_experts, layout.num_ranks
        self.layout, self.options = layout, options
        self.home = layout.home_rank.tolist()
        self.owned = [layout.home_experts(rank).tolist() for rank in range(num_ranks)]
        self.target = -(-int(blocks.sum()) // num_ranks)  # step 1
        self.q = [[0] * num_ranks for _ in range(num_experts)]
        for expert, num_blocks in enumerate(blocks.tolist()):
            self.q[expert][self.home[expert]] = num_blocks
        self.load = [sum(self.q[e][r] for e in self.owned[r]) for r in range(num_ranks)]
        self.slots_used = [0] * num_ranks
        self.is_resident = np.zeros((num_experts, num_ranks), dtype=bool)
        ranks, slots = np.nonzero(resident >= 0)
        self.is_resident[resident[ranks, slots], ranks] = True

    def move(self, expert: int, source: int, destination: int, num_blocks: int) -> None:
        """Hand ``num_blocks`` of an expert over, opening or closing replicas as allocations leave or reach zero."""
        row = self.q[expert]
        self.slots_used[destination] += row[destination] == 0 and destination != self.home[expert]
        row[source] -= num_blocks
        row[destination] += num_blocks
        self.slots_used[source] -= row[source] == 0 and source != self.home[expert]
        self.load[source] -= num_blocks
        self.load[destination] += num_blocks

    def replicas(self) -> list[tuple[int, int]]:
        """(expert, rank) of every replica in use, ordered."""
        return [(e, r) for e, row in enumerate(self.q) for r, num in enumerate(row) if num > 0 and r != self.home[e]]

    def num_transfers(self) -> int:
        """Replicas in use whose weights are not resident."""
        return sum(not self.is_resident[e, r] for e, r in self.replicas())

    # ---- step 2: greedy search ------------------------------------------------------------------------------------

    def run(self, candidate: Candidate) -> None:
        """Rounds of donor visits; at most s + 2, or until a round moves nothing."""
        for _ in range(self.layout.num_replica_slots + 2):
            moved = [self.visit(donor, candidate) for donor in self.donors(candidate.donor_priority)]
            if not any(moved):
                return

    def donors(self, priority: str) -> list[int]:
        """Overloaded ranks in the order in which this round visits them."""
        over = [r for r, load in enumerate(self.load) if load > self.target]
        if priority == "overload":
            return sorted(over, key=lambda r: (-self.load[r], r))
        return sorted(over, key=lambda r: (-max(self.q[e][r] for e in self.owned[r]), r))

    def visit(self, donor: int, candidate: Candidate) -> bool:
        """Shift blocks of ``donor`` until its load is at most tau or its experts are exhausted; True if any moved."""
        moved = False
        for expert, rank in self.existing_replicas(donor):
            if self.load[donor] <= self.target:
                return moved
            moved |= self.shift(expert, donor, rank)
        for expert in sorted(
            (e for e in self.owned[donor] if self.q[e][donor] > 0), key=lambda e: (-self.q[e][donor], e)
        ):
            opened = 0
            while self.load[donor] > self.target and self.q[expert][donor] > 0:
                rank = self.receiver(expert, donor, resident=True) if candidate.keeps_residents else -1
                if rank < 0:
                    rank = self.receiver(expert, donor, resident=False)
                    if rank < 0 or (candidate.fan_out == "single" and opened == 1):
                        break
                    opened += 1
                moved |= self.shift(expert, donor, rank)
            if self.load[donor] <= self.target:
                return moved
        return moved

    def existing_replicas(self, donor: int) -> list[tuple[int, int]]:
        """Replicas of the donor's experts, by decreasing receiver capacity at visit entry, then expert, then rank."""
        held = [(e, r) for e in self.owned[donor] for r, num in enumerate(self.q[e]) if num > 0 and r != donor]
        return sorted(held, key=lambda pair: (-max(0, self.target - self.load[pair[1]]), *pair))

    def receiver(self, expert: int, donor: int, resident: bool) -> int:
        """The least-loaded rank that may open a copy of ``expert``, or -1.

        Eligible: below tau, a free replica slot, no copy in use, and a resident one if asked. A new copy also has to
        win more blocks than it costs; the least-loaded rank wins most, so no other can qualify.
        """
        ranks = [
            r
            for r, load in enumerate(self.load)
            if load < self.target
            and self.slots_used[r] < self.layout.num_replica_slots
            and self.q[expert][r] == 0
            and r != donor
            and (not resident or self.is_resident[expert, r])
        ]
        if not ranks:
            return -1
        rank = min(ranks, key=lambda r: (self.load[r], r))
        wins = min(self.q[expert][donor], self.target - self.load[rank])
        return rank if resident or wins > self.options.transfer_cost_blocks else -1

    def shift(self, expert: int, donor: int, rank: int) -> bool:
        """Move v = min(q[e][h(e)], max(0, tau - l_r)) blocks from the owner (Eq. 4); True if v > 0."""
        num_blocks = min(self.q[expert][donor], max(0, self.target - self.load[rank]))
        if num_blocks > 0:
            self.move(expert, donor, rank, num_blocks)
        return bool(num_blocks > 0)

    # ---- steps 4 and 5: refinement --------------------------------------------------------------------------------

    def prune(self) -> None:
        """Close replicas whose allocation fits on another copy: the owner first, else the least-loaded copy.

        Order at pass entry: copies that need a transfer before resident ones, then smallest allocation, expert, rank.
        """
        limit = max(self.load)
        order = sorted(self.replicas(), key=lambda p: (bool(self.is_resident[p]), self.q[p[0]][p[1]], *p))
        for expert, rank in order:
            allocation, home = self.q[expert][rank], self.home[expert]
            copies = [r for r, num in enumerate(self.q[expert]) if num > 0 and r not in (rank, home)]
            fits = [r for r in copies if self.load[r] + allocation <= limit]
            if self.load[home] + allocation <= limit:
                self.move(expert, rank, home, allocation)
            elif fits:
                self.move(expert, rank, min(fits, key=lambda r: (self.load[r], r)), allocation)

    def refine(self) -> None:
        """Single blocks from the most to the least loaded rank, where both hold a copy of the expert.

        The expert is the one with most blocks on the most loaded rank; an owner holds its experts' weights always.
        """
        ranks = range(len(self.load))
        for _ in range(REFINE_MOVES_PER_RANK * len(self.load)):
            high = min(ranks, key=lambda r: (-self.load[r], r))
            low = min(ranks, key=lambda r: (self.load[r], r))
            shared = [e for e, row in enumerate(self.q) if row[high] > 0 and (row[low] > 0 or self.home[e] == low)]
            if self.load[high] - self.load[low] <= 1 or not shared:
                return
            self.move(min(shared, key=lambda e: (-self.q[e][high], e)), high, low, 1)

    # ---- step 6: reduction-aware pruning --------------------------------------------------------------------------

    def reduction_cost(self) -> list[int]:
        """l_r + lambda * n_r of every rank, n_r counting remote replicas of its experts (Eq. 5)."""
        cost = list(self.load)
        for expert, _ in self.replicas():
            cost[self.home[expert]] += self.options.reduction_penalty
        return cost

    def prune_for_reduction(self) -> None:
        """Return the smallest replica of the costliest owner while it is smaller than lambda (appendix A.2)."""
        while True:
            cost = self.reduction_cost()
            owner = min(range(len(cost)), key=lambda r: (-cost[r], r))
            remote = [(self.q[e][r], e, r) for e, r in self.replicas() if self.home[e] == owner]
            if not remote or min(remote)[0] >= self.options.reduction_penalty:
                return
            num_blocks, expert, rank = min(remote)
            self.move(expert, rank, owner, num_blocks)


def plan_replicas(
    counts: ArrayLike,
    layout: SlotLayout,
    options: PlannerOptions = PlannerOptions(),
    resident: ArrayLike | None = None,
) -> ReplicaPlan:
    """Choose replicas and assign token blocks for one batch of one layer (MegaFlux section 3.1, appendix A).

    Args:
        counts: integers [P, E], rows that each source rank routes to each expert.
        layout: ranks, experts and slots.
        options: block size and the two extensions beyond the paper.
        resident: int32 [P, s], experts whose weights are still in a replica slot, -1 for none; default: none.

    Returns:
        The plan; every rank that calls this with the same arguments gets the same one.

    Raises:
        InputError: counts or resident copies that break their contract.
    """
    histogram = check_counts(counts, layout.num_ranks, layout.num_experts)
    held = check_resident(resident, layout)
    blocks = blocks_per_expert(histogram, options.block_rows)

    searches = []
    for candidate in CANDIDATES:  # 2
        search = _Search(blocks, layout, held, options)
        search.run(candidate)
        searches.append(search)
    keys = [(max(s.load), s.num_transfers(), len(s.replicas()), i) for i, s in enumerate(searches)]
    winner = min(keys)[-1]  # 3
    best = searches[winner]
    best.prune()  # 4
    best.refine()  # 5
    if options.reduction_penalty > 0:  # 6
        best.prune_for_reduction()
        without = _Search(blocks, layout, held, options)
        if max(best.reduction_cost()) >= max(without.reduction_cost()):
            best = without

    if not best.replicas():
        return fixed_plan(histogram, layout, options.block_rows, held)
    q = np.array(best.q, dtype=np.int32).reshape(layout.num_experts, layout.num_ranks)
    replica_experts, transfers = assign_slots(q, layout, held)  # 7
    return ReplicaPlan(layout, options.block_rows, histogram, q, replica_experts, transfers, winner)


def assign_slots(blocks: IntArray, layout: SlotLayout, resident: IntArray) -> tuple[IntArray, IntArray]:
    """Give every replica in use a slot: residents keep theirs, new ones take free slots.

    New replicas of a rank, in increasing expert id, take empty slots in increasing index, then the slots of resident
    copies that this plan does not use, in increasing index.

    Args:
        blocks: int32 [E, P], q.
        layout: ranks, experts and slots.
        resident: int32 [P, s], experts in the replica slots before, -1 for none.

    Returns:
        int32 [P, s] experts in the replica slots afterwards, and int32 [n, 3] transfers (expert, rank, slot), ordered
        by (rank, slot).
    """
    slots_after, transfers = resident.copy(), []
    for rank in range(layout.num_ranks):
        used = {int(e) for e in np.flatnonzero(blocks[:, rank] > 0) if layout.home_rank[e] != rank}
        held = [int(e) for e in resident[rank]]
        free = [i for i, e in enumerate(held) if e < 0] + [i for i, e in enumerate(held) if e >= 0 and e not in used]
        placed = zip(sorted(used - set(held)), free, strict=False)  # slots may stay free
        for slot, expert in sorted((slot, expert) for expert, slot in placed):
            slots_after[rank, slot] = expert
            transfers.append((expert, rank, slot))
    return slots_after, np.array(transfers, dtype=np.int32).reshape(-1, 3)


__all__ = ["CANDIDATES", "FIXED", "Candidate", "PlannerOptions", "assign_slots", "check_resident", "plan_replicas"]
