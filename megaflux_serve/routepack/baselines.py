"""Baselines: the schedules that others use, as layouts to compare with.

Decides nothing of its own: each function is one published policy, by trajectory length only. DP-local FFD is the
RoutePack paper's in-house baseline (section 4.2), global FFD its planner's starting point; the other two are the
policies of verl and slime. Every one returns a legal layout; where the policy itself would not (verl checks no
capacity, slime lets a long sample exceed it), the row count grows until it does.
"""

from __future__ import annotations

import heapq

import numpy as np

from megaflux_serve.errors import InputError
from megaflux_serve.routepack.demand import Int64Array
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.rows import RowChoice, balance_bins, check_cells, fill_empty_cells, first_fit_decreasing
from megaflux_serve.routepack.topology import Topology

GROUP_SIZE = 8
"""Trajectories of a prompt group; DP-local FFD deals whole groups to slots."""


def global_ffd(lengths: Int64Array, topology: Topology, choice: RowChoice) -> Layout:
    """The whole window first-fit decreasing by length; consecutive cells form a row.

    Where FFD needs more cells than R* rows have, the stronger packing that justified R* takes its place.
    """
    num_cells = choice.num_rows * topology.num_slots
    bins = first_fit_decreasing(lengths, topology.capacity)
    if bins.max() >= num_cells:
        bins = choice.bins
    return Layout.of_cells(balance_bins(bins, lengths, num_cells), topology.num_slots, lengths.size)


def dp_local_ffd(lengths: Int64Array, topology: Topology, window: int = 0, seed: int = 42) -> Layout:
    """Base of section 4.2: every slot packs its own trajectories.

    1. Consecutive groups of eight, of fewer where a slot would get none, go to the slots in turn. 2. Each slot orders
    its trajectories by decreasing length, ties shuffled, and puts each in the open cell with room that holds the fewest
    trajectories (ties: the earlier cell), or opens one. 3. The slot with the most cells decides the row count; the
    others split cells until they have as many. Row r is the r-th cell of every slot.

    Args:
        lengths: int64 [N].
        topology: slots and capacity.
        window: ordinal of the window, which with ``seed`` decides how ties are shuffled.
        seed: base seed of the shuffle.

    Raises:
        InputError: a slot gets fewer trajectories than rows.
    """
    slots = topology.num_slots
    shuffled = np.random.default_rng((seed, window)).permutation(lengths.size)
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    group = min(GROUP_SIZE, max(1, lengths.size // slots))
    slot_of = np.arange(lengths.size) // group % slots  # step 1
    packed = [
        _fewest_first(lengths, order[slot_of[order] == slot], topology.capacity) for slot in range(slots)
    ]  # step 2
    num_rows = max(topology.min_rows, *(len(cells) for cells in packed))  # step 3
    for cells in packed:
        cells += [[] for _ in range(num_rows - len(cells))]
        fill_empty_cells(cells)
    return Layout.of_cells((packed[slot][row] for row in range(num_rows) for slot in range(slots)), slots, lengths.size)


def _fewest_first(lengths: Int64Array, order: Int64Array, capacity: int) -> list[list[int]]:
    """Cells of one slot, each trajectory in the open one with room that holds the fewest."""
    cells: list[list[int]] = []
    tokens: list[int] = []
    for i in order.tolist():
        length = int(lengths[i])
        fitting = [c for c in range(len(cells)) if tokens[c] + length <= capacity]
        if fitting:
            chosen = min(fitting, key=lambda c: len(cells[c]))
            cells[chosen].append(i)
            tokens[chosen] += length
        else:
            cells.append([i])
            tokens.append(length)
    return cells


def verl_karmarkar_karp(lengths: Int64Array, topology: Topology) -> Layout:
    """verl's two balancing steps, both by the largest differencing method.

    1. Split the window into D parts of equal size and nearly equal tokens. 2. Split every part into R micro-batches of
    nearly equal tokens. R starts at the largest ``ceil(tokens / C)`` of a part.

    Raises:
        InputError: N is no multiple of D, or no row count keeps the capacity.
    """
    slots = topology.num_slots
    if lengths.size % slots:
        raise InputError("lengths", f"has {lengths.size} trajectories", f"a multiple of the {slots} slots")
    parts = karmarkar_karp(list(range(lengths.size)), lengths, slots, equal_size=True)
    fewest = max(-(-int(lengths[part].sum()) // topology.capacity) for part in parts)
    for num_rows in range(max(fewest, topology.min_rows), lengths.size // slots + 1):
        packed = [karmarkar_karp(part, lengths, num_rows, equal_size=False) for part in parts]
        if all(lengths[cell].sum() <= topology.capacity for cells in packed for cell in cells):
            cells = [packed[slot][row] for row in range(num_rows) for slot in range(slots)]
            return Layout.of_cells(cells, slots, lengths.size)
    raise InputError(
        "lengths", "equal parts do not fit the cells", f"trajectories of at most {topology.capacity} tokens"
    )


def karmarkar_karp(items: list[int], lengths: Int64Array, num_parts: int, equal_size: bool) -> list[list[int]]:
    """Split ``items`` into ``num_parts`` of nearly equal tokens: the largest differencing method, k-way.

    Partial splits with the widest spread are merged, the heaviest part of one with the lightest of the other. With
    ``equal_size``, partial splits start as runs of ``num_parts`` neighbours by length, so that parts end equal in
    number.
    """
    ordered = sorted(items, key=lambda i: (int(lengths[i]), i))
    runs = (
        [ordered[at : at + num_parts] for at in range(0, len(ordered), num_parts)]
        if equal_size
        else [[i] for i in ordered]
    )
    heap = []
    for index, run in enumerate(runs):
        parts = [(int(lengths[i]), [i]) for i in reversed(run)] + [(0, [])] * (num_parts - len(run))
        heap.append((parts[-1][0] - parts[0][0], index, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, index, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], index, merged))
    return [sorted(members) for _, members in heap[0][2]]


def slime_schedule(lengths: Int64Array, topology: Topology) -> Layout:
    """slime's policy: pack first, distribute second.

    1. First fit in the order of arrival. 2. Split the micro-batch with the most tokens that holds several samples,
    until their number is a multiple of D. 3. Deal them to the slots in turn.

    Raises:
        InputError: fewer trajectories than cells.
    """
    cells: list[list[int]] = []
    tokens: list[int] = []
    for i, length in enumerate(lengths.tolist()):  # step 1
        fitting = next((c for c in range(len(cells)) if tokens[c] + length <= topology.capacity), None)
        if fitting is None:
            cells.append([i])
            tokens.append(length)
        else:
            cells[fitting].append(i)
            tokens[fitting] += length
    num_rows = max(-(-len(cells) // topology.num_slots), topology.min_rows)
    check_cells(lengths, num_rows, topology)
    while len(cells) < num_rows * topology.num_slots:  # step 2
        widest = max((c for c in range(len(cells)) if len(cells[c]) > 1), key=tokens.__getitem__)
        halves = karmarkar_karp(cells[widest], lengths, 2, equal_size=False)
        for half, at in zip(halves, (widest, len(cells)), strict=True):
            cells[at : at + 1], tokens[at : at + 1] = [half], [int(lengths[half].sum())]
    return Layout.of_cells(cells, topology.num_slots, lengths.size)  # step 3
