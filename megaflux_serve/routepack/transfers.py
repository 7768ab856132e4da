"""What moves between two placements, and in which steps. Pure: knows no tensors and no ranks' processes.

Slots are all taken, so what comes into a slot waits beside it until what was there has been read: a step is received
whole before anything of it is written. Steps are whole layers; after each of them every layer is in its old slots or in
its new ones, never in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.errors import CapacityError, ConfigError, InputError
from megaflux_serve.routepack.placement import Placement

Moves = NDArray[np.int32]
"""int32 [n, 4]: layer, expert, slot before, slot after; slots are ``rank * E/P + index``."""


@dataclass(frozen=True)
class RankTraffic:
    """Experts that cross between ranks, all layers together.

    Attributes:
        sent, received: int64 [P], by rank.
        local: int64 [P], experts that change their slot on the same rank.
        staged: int64 [P], the most that a rank receives for one layer, changes of slot included.
    """

    sent: NDArray[np.int64]
    received: NDArray[np.int64]
    local: NDArray[np.int64]
    staged: NDArray[np.int64]


@dataclass(frozen=True)
class TransferPlan:
    """The moves from one placement to another.

    Args:
        before: what the slots hold.
        after: what they shall hold.

    Raises:
        InputError: placements of other layers, experts or ranks.
    """

    before: Placement
    after: Placement

    def __post_init__(self) -> None:
        old, new = (
            f"{placement.num_ranks} ranks, layers and experts {placement.slots.shape}"
            for placement in (self.before, self.after)
        )
        if old != new:
            raise InputError("after", f"has {new}", f"{old}, as before has")

    @cached_property
    def moves(self) -> Moves:
        """Every expert that changes its slot, ascending by layer and expert."""
        layer, expert = np.nonzero(self.after.moved_from(self.before))
        columns = (layer, expert, self.before.slots[layer, expert], self.after.slots[layer, expert])
        return np.stack(columns, axis=1).astype(np.int32)

    def ranks(self, moves: Moves) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """int32 [n] each: the ranks that moves leave and reach."""
        per_rank = np.int32(self.before.experts_per_rank)
        return moves[:, 2] // per_rank, moves[:, 3] // per_rank

    def traffic(self) -> RankTraffic:
        """How many experts cross, by rank."""
        num_layers, num_ranks = len(self.before.slots), self.before.num_ranks
        source, destination = self.ranks(self.moves)
        crosses = source != destination
        by_layer = np.zeros((num_layers, num_ranks), dtype=np.int64)
        np.add.at(by_layer, (self.moves[:, 0], destination), 1)
        sent, received, local = (
            np.bincount(ranks, minlength=num_ranks).astype(np.int64)
            for ranks in (source[crosses], destination[crosses], source[~crosses])
        )
        return RankTraffic(sent, received, local, by_layer.max(axis=0, initial=0))

    def steps(self, expert_bytes: int, staging_bytes: int | None = None) -> list[Moves]:
        """Moves of whole layers that are made together, layers ascending.

        Args:
            expert_bytes: everything that belongs to one expert of one layer.
            staging_bytes: the most that a rank may hold beside its slots; None for what the largest layer needs.

        Raises:
            ConfigError: less than a byte of an expert.
            CapacityError: a layer brings more than that to one rank.
        """
        if expert_bytes < 1:
            raise ConfigError("expert_bytes", expert_bytes, "at least 1")
        limit = int(self.traffic().staged.max()) if staging_bytes is None else staging_bytes // expert_bytes
        steps: list[list[Moves]] = []
        held = np.zeros(self.before.num_ranks, dtype=np.int64)
        for layer in np.unique(self.moves[:, 0]):
            moves = self.moves[self.moves[:, 0] == layer]
            comes = np.bincount(self.ranks(moves)[1], minlength=len(held))
            if comes.max() > limit:
                raise CapacityError(
                    f"staging_bytes = {staging_bytes}: layer {layer} brings {comes.max()} experts to rank "
                    f"{comes.argmax()}; allowed: at least {int(comes.max()) * expert_bytes}"
                )
            if not steps or (held + comes).max() > limit:
                steps.append([])
                held = np.zeros_like(held)
            steps[-1].append(moves)
            held += comes
        return [np.concatenate(step) for step in steps]


__all__ = ["Moves", "RankTraffic", "TransferPlan"]
