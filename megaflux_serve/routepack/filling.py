"""A window that is still filling: demand collected as trajectories finish, and a placement before the window is sealed.

Decides when work that needs only totals can start. Moving expert state takes seconds and waits for the placement, while
the placement needs only the window's totals, which a part of the window predicts. So the placement is made early, state
starts to move, and the sealed window is planned from that placement: few experts are left to move.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from megaflux_serve.errors import InputError
from megaflux_serve.routepack.demand import Demand, Int32Array, Int64Array
from megaflux_serve.routepack.placement import Placement, PlacementOptions, repair_placement


class FillingWindow:
    """Trajectories of one window in the order in which they finish::

        window = FillingWindow(num_layers=24, num_experts=32)
        window.add(counts, length)  # as each trajectory finishes
        early = window.early_placement(before)  # when most have: state may start to move
        plan = plan_window(window.seal(), None, topology, options, before=early)

    Args:
        num_layers: L, MoE layers.
        num_experts: E, logical experts.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._loads = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._counts: list[Int32Array] = []
        self._lengths: list[int] = []

    def __len__(self) -> int:
        """Trajectories so far."""
        return len(self._lengths)

    def add(self, counts: ArrayLike, length: int) -> None:
        """Take one finished trajectory.

        Args:
            counts: whole numbers [L, E], routed rows.
            length: tokens, at least 1.

        Raises:
            InputError: as ``Demand.of``, or another shape than the window's.
        """
        one = Demand.of(np.asarray(counts)[None], [length])
        if one.counts.shape[1:] != self._loads.shape:
            raise InputError("counts", f"have shape {one.counts.shape[1:]}", f"{self._loads.shape}")
        self._counts.append(one.counts[0])
        self._lengths.append(length)
        self._loads += one.counts[0]

    def expert_loads(self) -> Int64Array:
        """int64 [L, E]: rows so far."""
        return self._loads.copy()

    def early_placement(self, before: Placement, options: PlacementOptions | None = None) -> Placement:
        """The repair of ``before`` for the trajectories so far."""
        return repair_placement(self._loads, before, options or PlacementOptions())

    def seal(self) -> Demand:
        """The whole window.

        Raises:
            InputError: it is empty.
        """
        if not self._counts:
            raise InputError("window", "is empty", "at least one trajectory")
        return Demand.of(np.stack(self._counts), self._lengths)
