"""The replica planner, compiled: equal to ``planner.plan_replicas`` block for block, slot for slot; the layer calls it.

Decides nothing of its own: steps, tie-breaks and bounds are those of ``planner``, whose numbering the body repeats.
What differs is the state. The specification keeps q as a dense [E, P] table; here, as on the device, a search keeps the
blocks left at each expert's home and one entry a replica slot, E + 2*P*s numbers in all.

The first call of a process loads machine code from numba's cache beside this file (0.2 s; the user's cache folder where
that is read-only), or compiles it where the cache is empty (10 s). The cache is renewed when this file changes and
looks at no other file, so all compiled code is here and what ``planner`` fixes comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaflux_serve.planning.plan import FIXED, ReplicaPlan, blocks_per_expert
from megaflux_serve.planning.planner import CANDIDATES, REFINE_MOVES_PER_RANK, PlannerOptions, check_resident
from megaflux_serve.routing import check_counts
from megaflux_serve.slots import IntArray, SlotLayout

Int64Array = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])


_SEARCHES = tuple((c.donor_priority == "overload", c.fan_out == "multiple", c.keeps_residents) for c in CANDIDATES)


def _compiled(function: Function) -> Function:
    """Compile a function that only compiled functions call, which halves the time that compilation takes."""
    return cast(Function, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


class _Search(NamedTuple):
    """State of one search.

    ``copy_expert[r, i]`` is the expert of the i-th entry of rank r, -1 for a free one; an entry is in use exactly while
    its blocks are positive. Entries say how many replicas a rank holds, not in which slot a replica will live.
    """

    home: Int64Array  # [E]
    owned: Int64Array  # [P, E/P], experts of each rank in increasing id
    resident: Int64Array  # [P, s]
    target: int  # tau
    home_blocks: Int64Array  # [E], blocks at the expert's home
    copy_expert: Int64Array  # [P, s]
    copy_blocks: Int64Array  # [P, s]
    load: Int64Array  # [P]


@_compiled
def _owned(home: Int64Array, num_ranks: int) -> Int64Array:
    """[P, E/P]: the experts of each rank, in increasing id."""
    owned = np.empty((num_ranks, home.size // num_ranks), np.int64)
    filled = np.zeros(num_ranks, np.int64)
    for expert, rank in enumerate(home):
        owned[rank, filled[rank]] = expert
        filled[rank] += 1
    return owned


@_compiled
def _new_search(blocks: Int64Array, home: Int64Array, owned: Int64Array, resident: Int64Array) -> _Search:
    num_ranks, num_replica_slots = resident.shape
    load = np.zeros(num_ranks, np.int64)
    for expert in range(blocks.size):
        load[home[expert]] += blocks[expert]
    target = -(-load.sum() // num_ranks)  # 1
    return _Search(
        home,
        owned,
        resident,
        target,
        blocks.copy(),
        np.full((num_ranks, num_replica_slots), -1, np.int64),
        np.zeros((num_ranks, num_replica_slots), np.int64),
        load,
    )


@_compiled
def _entry(table: Int64Array, rank: int, expert: int) -> int:
    """Index of ``expert`` (-1: of a free entry) in a rank's row, or -1."""
    for index in range(table.shape[1]):
        if table[rank, index] == expert:
            return index
    return -1


@_compiled
def _add(search: _Search, expert: int, rank: int, num_blocks: int) -> None:
    """Change q[expert][rank] and the rank's load, opening or closing an entry as its blocks leave or reach 0."""
    search.load[rank] += num_blocks
    if search.home[expert] == rank:
        search.home_blocks[expert] += num_blocks
        return
    index = _entry(search.copy_expert, rank, expert)
    if index < 0:
        index = _entry(search.copy_expert, rank, -1)
        search.copy_expert[rank, index] = expert
    search.copy_blocks[rank, index] += num_blocks
    if search.copy_blocks[rank, index] == 0:
        search.copy_expert[rank, index] = -1


@_compiled
def _blocks_at(search: _Search, expert: int, rank: int) -> int:
    """q[expert][rank]."""
    if search.home[expert] == rank:
        return search.home_blocks[expert]  # type: ignore[no-any-return]
    index = _entry(search.copy_expert, rank, expert)
    return search.copy_blocks[rank, index] if index >= 0 else 0


@_compiled
def _most_loaded(load: Int64Array) -> int:
    return int(np.argmax(load))  # the first of equals, so the lower rank


# ---- step 2: greedy search -------------------------------------------------------------------------------------------


@_compiled
def _run(search: _Search, by_overload: bool, multiple: bool, keeps: bool, transfer_cost: int) -> None:
    num_ranks, num_replica_slots = search.copy_expert.shape
    priority = np.empty(num_ranks, np.int64)
    for _ in range(num_replica_slots + 2):
        for rank in range(num_ranks):  # 0 marks a rank that is no donor of this round, or was visited
            priority[rank] = 0
            if search.load[rank] > search.target:
                priority[rank] = search.load[rank] if by_overload else 1 + _most_home_blocks(search, rank)
        moved = False
        while True:
            donor = _most_loaded(priority)
            if priority[donor] == 0:
                break
            priority[donor] = 0
            moved |= _visit(search, donor, multiple, keeps, transfer_cost)
        if not moved:
            return


@_compiled
def _most_home_blocks(search: _Search, rank: int) -> int:
    """The largest home allocation among the experts that ``rank`` owns."""
    most = 0
    for expert in search.owned[rank]:
        most = max(most, search.home_blocks[expert])
    return most


@_compiled
def _visit(search: _Search, donor: int, multiple: bool, keeps: bool, transfer_cost: int) -> bool:
    """Open copies of the donor's experts, largest first, until its load is at most tau.

    The specification first fills the donor's existing replicas, as the paper has it. That cannot move a block and is
    left out here: a shift ends with the receiver at tau or the expert's home blocks at 0; a receiver is never a donor,
    so its load does not fall again, and home blocks do not grow during a search.
    """
    moved = False
    visited = np.zeros(search.owned.shape[1], np.bool_)
    while search.load[donor] > search.target:
        best = -1
        for index, expert in enumerate(search.owned[donor]):
            blocks = search.home_blocks[expert]
            if not visited[index] and blocks > (search.home_blocks[search.owned[donor, best]] if best >= 0 else 0):
                best = index
        if best < 0:
            break
        visited[best] = True
        moved |= _spread(search, search.owned[donor, best], donor, multiple, keeps, transfer_cost)
    return moved


@_compiled
def _spread(search: _Search, expert: int, donor: int, multiple: bool, keeps: bool, transfer_cost: int) -> bool:
    """Open copies of one expert until the donor is relieved, its blocks are gone or no receiver is left."""
    moved = False
    opened = 0
    while search.load[donor] > search.target and search.home_blocks[expert] > 0:
        rank = _receiver(search, expert, donor, True, 0) if keeps else -1
        if rank < 0:
            rank = _receiver(search, expert, donor, False, transfer_cost)
            if rank < 0 or (not multiple and opened == 1):
                break
            opened += 1
        moved |= _shift(search, expert, donor, rank)
    return moved


@_compiled
def _receiver(search: _Search, expert: int, donor: int, resident: bool, transfer_cost: int) -> int:
    """The least-loaded rank below tau with a free entry, without the expert, with a resident copy if asked; or -1."""
    best = -1
    for rank in range(search.load.size):
        if (
            search.load[rank] < (search.load[best] if best >= 0 else search.target)
            and rank != donor
            and _entry(search.copy_expert, rank, -1) >= 0
            and _entry(search.copy_expert, rank, expert) < 0
            and (not resident or _entry(search.resident, rank, expert) >= 0)
        ):
            best = rank
    if best >= 0 and min(search.home_blocks[expert], search.target - search.load[best]) <= transfer_cost:
        return -1
    return best


@_compiled
def _shift(search: _Search, expert: int, donor: int, rank: int) -> bool:
    """Eq. 4; True if any block moved."""
    num_blocks = min(search.home_blocks[expert], max(0, search.target - search.load[rank]))
    if num_blocks > 0:
        _add(search, expert, donor, -num_blocks)
        _add(search, expert, rank, num_blocks)
    return bool(num_blocks > 0)


# ---- steps 3 to 6 ----------------------------------------------------------------------------------------------------


@_compiled
def _selection_key(search: _Search) -> tuple[int, int, int]:
    """(maximum load, new transfers, replicas): the smaller, the better."""
    transfers = replicas = 0
    for rank in range(search.load.size):
        for expert in search.copy_expert[rank]:
            if expert >= 0:
                replicas += 1
                transfers += _entry(search.resident, rank, expert) < 0
    return int(search.load.max()), transfers, replicas


@_compiled
def _insert(order: Int64Array, count: int, key: tuple[int, ...]) -> None:
    """Insert ``key`` into the first ``count`` rows of ``order``, which are sorted, keeping them sorted."""
    place = count
    while place > 0 and _less(key, order[place - 1]):
        for column in range(order.shape[1]):
            order[place, column] = order[place - 1, column]
        place -= 1
    for column in range(order.shape[1]):
        order[place, column] = key[column]


@_compiled
def _less(key: tuple[int, ...], row: Int64Array) -> bool:
    for column in range(row.size):
        if key[column] != row[column]:
            return bool(key[column] < row[column])
    return False


@_compiled
def _prune(search: _Search) -> None:
    num_ranks, num_replica_slots = search.copy_expert.shape
    limit = search.load.max()
    order = np.empty((num_ranks * num_replica_slots, 4), np.int64)
    held = 0
    for rank in range(num_ranks):
        for index in range(num_replica_slots):
            expert = search.copy_expert[rank, index]
            if expert >= 0:
                is_resident = 1 if _entry(search.resident, rank, expert) >= 0 else 0
                _insert(order, held, (is_resident, search.copy_blocks[rank, index], expert, rank))
                held += 1
    for i in range(held):
        expert, rank = order[i, 2], order[i, 3]
        allocation = _blocks_at(search, expert, rank)
        target = -1
        if search.load[search.home[expert]] + allocation <= limit:
            target = search.home[expert]
        else:
            for other in range(num_ranks):
                if (
                    other != rank
                    and search.load[other] + allocation <= limit
                    and (target < 0 or search.load[other] < search.load[target])
                    and _entry(search.copy_expert, other, expert) >= 0
                ):
                    target = other
        if target >= 0:
            _add(search, expert, rank, -allocation)
            _add(search, expert, target, allocation)


@_compiled
def _refine(search: _Search, max_moves: int) -> None:
    for _ in range(max_moves):
        high, low = _most_loaded(search.load), int(np.argmin(search.load))
        if search.load[high] - search.load[low] <= 1:
            return
        best, most = -1, 0
        for expert in search.copy_expert[low]:  # copies on low, whose blocks on high may be at home or in a copy
            blocks = _blocks_at(search, expert, high) if expert >= 0 else 0
            if blocks > most or (blocks == most and blocks > 0 and expert < best):
                best, most = expert, blocks
        for index, expert in enumerate(search.copy_expert[high]):  # copies on high of experts that low owns
            blocks = search.copy_blocks[high, index] if expert >= 0 and search.home[expert] == low else 0
            if blocks > most or (blocks == most and blocks > 0 and expert < best):
                best, most = expert, blocks
        if best < 0:
            return
        _add(search, best, high, -1)
        _add(search, best, low, 1)


@_compiled
def _reduction_cost(search: _Search, penalty: int) -> Int64Array:
    """l_r + lambda * n_r (Eq. 5)."""
    cost = search.load.copy()
    for expert in search.copy_expert.flat:
        if expert >= 0:
            cost[search.home[expert]] += penalty
    return cost


@_compiled
def _prune_for_reduction(search: _Search, penalty: int) -> None:
    num_ranks, num_replica_slots = search.copy_expert.shape
    while True:
        owner = _most_loaded(_reduction_cost(search, penalty))
        smallest = (penalty, -1, -1)
        for rank in range(num_ranks):
            for index in range(num_replica_slots):
                expert = search.copy_expert[rank, index]
                if expert >= 0 and search.home[expert] == owner:
                    key = (search.copy_blocks[rank, index], expert, rank)
                    smallest = key if key < smallest else smallest
        num_blocks, expert, rank = smallest
        if num_blocks >= penalty:
            return
        _add(search, expert, rank, -num_blocks)
        _add(search, expert, owner, num_blocks)


# ---- step 7 and the whole --------------------------------------------------------------------------------------------


@_compiled
def _assign_slots(search: _Search) -> tuple[IntArray, IntArray]:
    """Slots and transfers as ``planner.assign_slots`` gives them."""
    num_ranks, num_replica_slots = search.copy_expert.shape
    slots = search.resident.astype(np.int32)
    transfers = np.empty((num_ranks * num_replica_slots, 3), np.int32)
    count = 0
    new = np.empty((num_replica_slots, 1), np.int64)
    for rank in range(num_ranks):
        num_new = place = 0
        for expert in search.copy_expert[rank]:
            if expert >= 0 and _entry(search.resident, rank, expert) < 0:
                _insert(new, num_new, (expert,))
                num_new += 1
        for want_empty in (True, False):
            for slot in range(num_replica_slots):
                held = search.resident[rank, slot]
                if (held < 0) != want_empty or (held >= 0 and _entry(search.copy_expert, rank, held) >= 0):
                    continue
                if place < num_new:
                    slots[rank, slot] = new[place, 0]
                    place += 1
        for slot in range(num_replica_slots):
            if slots[rank, slot] != search.resident[rank, slot]:
                transfers[count, 0], transfers[count, 1], transfers[count, 2] = slots[rank, slot], rank, slot
                count += 1
    return slots, transfers[:count].copy()


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _plan(
    blocks: Int64Array,
    home: Int64Array,
    resident: Int64Array,
    searches: tuple[tuple[bool, bool, bool], ...],
    penalty: int,
    transfer_cost: int,
    refine_moves_per_rank: int,
) -> tuple[int, IntArray, IntArray, IntArray]:
    """Steps 1 to 7: (candidate or FIXED, q int32 [E, P], replica_experts int32 [P, s], transfers int32 [n, 3])."""
    owned, any_resident = _owned(home, resident.shape[0]), (resident >= 0).any()
    best = _new_search(blocks, home, owned, resident)
    winner = -1
    for candidate, (by_overload, multiple, keeps) in enumerate(searches):
        if not keeps and not any_resident:
            continue  # it would find what the same search with residents has found
        search = _new_search(blocks, home, owned, resident)
        _run(search, by_overload, multiple, keeps, transfer_cost)  # 2
        if winner < 0 or _selection_key(search) < _selection_key(best):  # 3
            best, winner = search, candidate
    _prune(best)  # 4
    _refine(best, refine_moves_per_rank * best.load.size)  # 5
    if penalty > 0:  # 6
        _prune_for_reduction(best, penalty)
        without = _new_search(blocks, home, owned, resident)
        if _reduction_cost(best, penalty).max() >= without.load.max():
            best = without
    if best.copy_expert.size == 0 or best.copy_expert.max() < 0:
        winner = FIXED
    slots, transfers = _assign_slots(best)  # 7
    q = np.zeros((blocks.size, best.load.size), np.int32)
    for expert in range(blocks.size):
        q[expert, home[expert]] = best.home_blocks[expert]
    for rank in range(best.load.size):
        for index, expert in enumerate(best.copy_expert[rank]):
            if expert >= 0:
                q[expert, rank] = best.copy_blocks[rank, index]
    return winner, q, slots, transfers


def plan_replicas(
    counts: ArrayLike,
    layout: SlotLayout,
    options: PlannerOptions = PlannerOptions(),
    resident: ArrayLike | None = None,
) -> ReplicaPlan:
    """``planner.plan_replicas``: same arguments, same plan, same errors, in tens of microseconds."""
    histogram = check_counts(counts, layout.num_ranks, layout.num_experts)
    held = check_resident(resident, layout)
    blocks = blocks_per_expert(histogram, options.block_rows)
    winner, q, replica_experts, transfers = _plan(
        blocks.astype(np.int64),
        layout.home_rank.astype(np.int64),
        held.astype(np.int64),
        _SEARCHES,
        options.reduction_penalty,
        options.transfer_cost_blocks,
        REFINE_MOVES_PER_RANK,
    )
    return ReplicaPlan(layout, options.block_rows, histogram, q, replica_experts, transfers, winner)
