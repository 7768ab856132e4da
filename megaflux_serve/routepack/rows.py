"""Rows: how few execution rows can hold the window (RoutePack section 3.1), as bin packing by length.

Decides the row count R* and one feasible packing for it. Knows no demand. A row count is *certified* when a lower bound
meets it: the capacity bound ``ceil(sum t / C)`` or Martello and Toth's bound L2, which sees that long trajectories
cannot share a cell. First-fit decreasing is tried first; where it misses the bound, a stronger packing (cells filled
one after another to the smallest slack, over perturbed lengths) is tried at every smaller row count.
``optimum.pack_exactly`` decides with CP-SAT what these leave open.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megaflux_serve.errors import InputError
from megaflux_serve.routepack.compiled import compiled
from megaflux_serve.routepack.demand import FloatArray, Int32Array, Int64Array
from megaflux_serve.routepack.topology import Topology

PACKING_TRIALS = 32
"""Perturbed packings tried at a row count before it counts as out of reach; the first 8 find nearly all that 256
find."""


@dataclass(frozen=True)
class RowChoice:
    """The row count of a window.

    Attributes:
        num_rows: R*.
        lower_bound: rows that no packing can undercut, pipeline floor included.
        bins: int32 [N], a packing into at most R* D cells that respects the capacity; cells may still be empty.
    """

    num_rows: int
    lower_bound: int
    bins: Int32Array

    @property
    def certified(self) -> bool:
        """True when R* is the smallest legal row count."""
        return self.num_rows == self.lower_bound


def choose_rows(lengths: Int64Array, topology: Topology) -> RowChoice:
    """R* = max(R_min, pipeline floor), or the best known row count where R_min cannot be certified.

    1. Lower bound from L2. 2. First-fit decreasing. 3. Stronger packing at every row count between the two.

    Raises:
        InputError: a trajectory longer than a cell, or fewer trajectories than the cells of R* rows.
    """
    if lengths.max() > topology.capacity:
        i = int(lengths.argmax())
        raise InputError("lengths", f"trajectory {i} has {lengths[i]} tokens", f"the cell capacity {topology.capacity}")
    slots = topology.num_slots
    bound = max(-(-cell_bound(lengths, topology.capacity) // slots), topology.min_rows)  # step 1
    bins = first_fit_decreasing(lengths, topology.capacity)  # step 2
    rows = max(-(-(int(bins.max()) + 1) // slots), bound)
    for fewer in range(bound, rows):  # step 3
        packed = pack_into(lengths, topology.capacity, fewer * slots)
        if packed is not None:
            bins, rows = packed, fewer
            break
    check_cells(lengths, rows, topology)
    return RowChoice(rows, bound, bins)


def check_cells(lengths: Int64Array, num_rows: int, topology: Topology) -> None:
    """Refuse a row count that would leave a cell empty.

    Raises:
        InputError: R * D is above N.
    """
    if num_rows * topology.num_slots > lengths.size:
        raise InputError(
            "lengths",
            f"{lengths.size} trajectories cannot fill {num_rows} rows of {topology.num_slots} cells",
            f"at least {num_rows * topology.num_slots} trajectories, or fewer slots",
        )


def cell_bound(lengths: Int64Array, capacity: int) -> int:
    """Cells that no packing can undercut: Martello and Toth's L2, at least ``ceil(sum t / C)``.

    For a threshold k: trajectories above C - k need a cell of their own and share it with none of k or more; those
    above C / 2 cannot share with each other; what of the rest (k or more) does not fit beside them needs further cells.
    """
    ordered = np.sort(lengths)
    sums = np.concatenate(([0], np.cumsum(ordered)))
    thresholds = np.unique(np.concatenate(([0], ordered[2 * ordered <= capacity])))
    alone = np.searchsorted(ordered, capacity - thresholds, side="right")
    half = np.full_like(alone, np.searchsorted(2 * ordered, capacity, side="right"))
    half = np.minimum(half, alone)
    small = np.searchsorted(ordered, thresholds, side="left")
    free = (alone - half) * capacity - (sums[alone] - sums[half])
    beside = np.maximum(0, sums[half] - sums[small] - free)
    return int((ordered.size - alone + (alone - half) - (-beside // capacity)).max())


@compiled
def first_fit_decreasing(lengths: Int64Array, capacity: int) -> Int32Array:
    """int32 [N]: the bin of every trajectory; longest first (ties: lower index), into the first bin with room."""
    bins = np.zeros(lengths.size, dtype=np.int32)
    room = np.full(lengths.size, capacity, dtype=np.int64)
    for i in np.argsort(-lengths, kind="mergesort"):
        b = 0
        while room[b] < lengths[i]:
            b += 1
        bins[i] = b
        room[b] -= lengths[i]
    return bins


def pack_into(lengths: Int64Array, capacity: int, num_bins: int) -> Int32Array | None:
    """int32 [N], a packing into ``num_bins`` bins, or None where the trials find none.

    Every trial fills one bin after another; trials after the first perturb the order in which trajectories are chosen.
    """
    rng = np.random.default_rng(0)
    for trial in range(PACKING_TRIALS):
        keys = lengths * (1 + (0.02 * trial / PACKING_TRIALS) * rng.random(lengths.size))
        bins = _fill_bins(lengths, keys, capacity, num_bins)
        if bins.min() >= 0:
            return bins
    return None


@compiled
def _fill_bins(lengths: Int64Array, keys: FloatArray, capacity: int, num_bins: int) -> Int32Array:
    """Fill ``num_bins`` bins: the first free trajectory by descending key, then the single one or the pair that leaves
    the smallest slack, until none fits. Trajectories left over keep -1."""
    order, free = np.argsort(-keys, kind="mergesort"), np.argsort(lengths, kind="mergesort")
    bins = np.full(lengths.size, -1, dtype=np.int32)
    for b in range(num_bins):
        room = capacity
        for i in order:
            if bins[i] < 0 and lengths[i] <= room:
                bins[i] = b
                room -= lengths[i]
                break
        free = free[bins[free] < 0]
        while True:
            best, first, second = 0, -1, -1
            low, high = 0, free.size - 1  # from both ends: a pair that fits grows, one that does not shrinks
            while low <= high:
                i, j = free[low], free[high]
                if bins[i] >= 0:
                    low += 1
                elif bins[j] >= 0 or lengths[j] > room:
                    high -= 1
                else:
                    if lengths[j] > best:
                        best, first, second = lengths[j], j, -1
                    if low == high or lengths[i] + lengths[j] > room:
                        high -= 1
                    else:
                        if lengths[i] + lengths[j] > best:
                            best, first, second = lengths[i] + lengths[j], j, i
                        low += 1
            if first < 0:
                break
            bins[first] = b
            if second >= 0:
                bins[second] = b
            room -= best
    return bins


def balance_bins(bins: Int32Array, lengths: Int64Array, num_cells: int) -> list[list[int]]:
    """``num_cells`` non-empty cells from a packing int32 [N] into at most that many bins, long trajectories first.

    Raises:
        InputError: fewer trajectories than cells.
    """
    cells: list[list[int]] = [[] for _ in range(num_cells)]
    for trajectory in np.argsort(-lengths, kind="stable").tolist():
        cells[bins[trajectory]].append(trajectory)
    fill_empty_cells(cells)
    return cells


def fill_empty_cells(cells: list[list[int]]) -> None:
    """Give every empty cell the last trajectory of the cell that then holds the most (ties: the lower cell), in place.

    Raises:
        InputError: fewer trajectories than cells.
    """
    for cell in cells:
        if not cell:
            donor = max(cells, key=len)
            if len(donor) < 2:
                raise InputError(
                    "lengths", f"{sum(map(len, cells))} trajectories cannot fill {len(cells)} cells", "one each"
                )
            cell.append(donor.pop())
