"""Layout: which trajectory trains in which cell, the value that every scheduler here returns.

Decides what a legal schedule is (Eq. 7 to 9) and which layouts are the same. Knows no demand and no cost. Cell
``row * D + slot`` is B_{r,d}.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megaflux_serve.errors import InputError
from megaflux_serve.routepack.demand import Int32Array, Int64Array
from megaflux_serve.routepack.topology import Topology


@dataclass(frozen=True)
class Layout:
    """x: the cell of every trajectory.

    Attributes:
        cell: int32 [N], ``row * num_slots + slot``.
        num_rows: R.
        num_slots: D.
    """

    cell: Int32Array
    num_rows: int
    num_slots: int

    @classmethod
    def of_cells(cls, cells: Iterable[Sequence[int]], num_slots: int, num_trajectories: int) -> Layout:
        """The layout of R * D lists of trajectories, in cell order."""
        cell = np.full(num_trajectories, -1, dtype=np.int32)
        index = -1
        for index, members in enumerate(cells):
            cell[list(members)] = index
        return cls(cell, (index + 1) // num_slots, num_slots)

    @property
    def num_cells(self) -> int:
        """R * D."""
        return self.num_rows * self.num_slots

    def cells(self) -> list[list[int]]:
        """The trajectories of every cell in cell order, ascending."""
        members: list[list[int]] = [[] for _ in range(self.num_cells)]
        for trajectory, cell in enumerate(self.cell.tolist()):
            members[cell].append(trajectory)
        return members

    def rows(self) -> list[list[list[int]]]:
        """``rows()[r][d]``: the trajectories of cell (r, d)."""
        cells = self.cells()
        return [cells[r * self.num_slots : (r + 1) * self.num_slots] for r in range(self.num_rows)]

    def tokens(self, lengths: Int64Array) -> Int64Array:
        """int64 [R, D]: tokens in every cell."""
        totals = np.zeros(self.num_cells, dtype=np.int64)
        np.add.at(totals, self.cell, lengths)
        return totals.reshape(self.num_rows, self.num_slots)

    def check(self, lengths: Int64Array, topology: Topology) -> None:
        """Verify Eq. 7 to 9: every trajectory exactly once, no empty cell, no cell above its capacity.

        Raises:
            InputError: naming the first constraint that the layout breaks, and where.
        """
        if self.num_slots != topology.num_slots or self.cell.shape != lengths.shape:
            raise InputError(
                "layout",
                f"has {self.num_slots} slots, {self.cell.size} trajectories",
                f"{topology.num_slots}, {lengths.size}",
            )
        if self.cell.min() < 0 or self.cell.max() >= self.num_cells:
            raise InputError(
                "layout", f"puts a trajectory in cell {self.cell.max()}", f"cells 0 to {self.num_cells - 1}"
            )
        empty = np.bincount(self.cell, minlength=self.num_cells) == 0
        if empty.any():
            raise InputError(
                "layout", f"leaves cell {divmod(int(empty.argmax()), self.num_slots)} empty", "a trajectory in each"
            )
        tokens = self.tokens(lengths)
        if tokens.max() > topology.capacity:
            where = np.unravel_index(int(tokens.argmax()), tokens.shape)
            raise InputError(
                "layout", f"puts {tokens.max()} tokens in cell {tuple(map(int, where))}", f"{topology.capacity}"
            )

    def canonical(self, num_shards: int) -> Layout:
        """The same schedule with its symmetries removed.

        Slots of a shard are exchangeable within a row, and so are rows: cells are ordered by their first trajectory
        inside each row-shard, then rows by theirs. The order of trajectories inside a cell is not part of a layout.
        """
        first = np.full(self.num_cells, self.cell.size, dtype=np.int64)
        np.minimum.at(first, self.cell, np.arange(self.cell.size))
        by_shard = first.reshape(self.num_rows, num_shards, -1)
        slot_order = by_shard.argsort(axis=2, kind="stable")
        row_order = first.reshape(self.num_rows, -1).min(axis=1).argsort(kind="stable")
        cells = np.arange(self.num_cells).reshape(by_shard.shape)
        order = np.take_along_axis(cells, slot_order, axis=2)[row_order].reshape(-1)
        renamed = np.empty(self.num_cells, dtype=np.int32)
        renamed[order] = np.arange(self.num_cells, dtype=np.int32)
        return Layout(renamed[self.cell], self.num_rows, self.num_slots)
