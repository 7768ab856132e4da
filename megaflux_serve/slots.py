"""Where expert weights live: ranks, home map, and slot = (rank, index).

Decides the numbering that every other module shares, and translates logical expert ids to slots and back. Knows nothing
of routing, plans or devices. Outside the core everything speaks logical expert ids; slots exist only inside.

Each rank owns ``E / P`` *home* slots, indices ``0 .. E/P - 1``, followed by ``s`` *replica* slots, indices
``E/P .. E/P + s - 1``. A *slot id* is ``rank * slots_per_rank + index``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.errors import ConfigError

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class SlotLayout:
    """Ranks, experts and slots of one MoE layer.

    Args:
        num_experts: logical experts E, at least 1.
        num_ranks: expert-parallel ranks P, at least 1; must divide E.
        num_replica_slots: replica slots s on each rank, at least 0.
        home_rank: int32 [E], the rank that owns each expert, exactly E/P experts a rank; default: rank ``e // (E/P)``.

    Raises:
        ConfigError: naming the field, when a value breaks the ranges above.
    """

    num_experts: int
    num_ranks: int
    num_replica_slots: int
    home_rank: IntArray = field(default=None)  # type: ignore[arg-type]
    home_index: IntArray = field(init=False)

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ConfigError("num_experts", self.num_experts, "an integer of at least 1")
        if self.num_ranks < 1 or self.num_experts % self.num_ranks:
            raise ConfigError("num_ranks", self.num_ranks, f"a divisor of the {self.num_experts} experts")
        if self.num_replica_slots < 0:
            raise ConfigError("replica_slots", self.num_replica_slots, "an integer of at least 0")
        if self.home_rank is None:
            home = np.arange(self.num_experts, dtype=np.int32) // np.int32(self.experts_per_rank)
        else:
            home = np.array(self.home_rank, dtype=np.int32)
            if home.shape != (self.num_experts,):
                raise ConfigError("home_rank", home.shape, f"shape ({self.num_experts},)")
            if home.min() < 0 or home.max() >= self.num_ranks:
                raise ConfigError("home_rank", home.tolist(), f"ranks 0 to {self.num_ranks - 1}")
            if not (np.bincount(home, minlength=self.num_ranks) == self.experts_per_rank).all():
                raise ConfigError("home_rank", home.tolist(), f"exactly {self.experts_per_rank} experts on every rank")
        index = np.empty(self.num_experts, dtype=np.int32)
        for rank in range(self.num_ranks):
            owned = np.flatnonzero(home == rank)
            index[owned] = np.arange(owned.size, dtype=np.int32)
        for array in (home, index):
            array.setflags(write=False)
        object.__setattr__(self, "home_rank", home)
        object.__setattr__(self, "home_index", index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SlotLayout):
            return NotImplemented
        same = (self.num_experts, self.num_ranks, self.num_replica_slots) == (
            other.num_experts,
            other.num_ranks,
            other.num_replica_slots,
        )
        return same and bool(np.array_equal(self.home_rank, other.home_rank))

    def __hash__(self) -> int:
        return hash((self.num_experts, self.num_ranks, self.num_replica_slots, self.home_rank.tobytes()))

    @property
    def experts_per_rank(self) -> int:
        """Home slots of a rank, E / P."""
        return self.num_experts // self.num_ranks

    @property
    def slots_per_rank(self) -> int:
        """Home and replica slots of a rank, E / P + s."""
        return self.experts_per_rank + self.num_replica_slots

    def home_experts(self, rank: int) -> IntArray:
        """int32 [E/P]: the logical experts that ``rank`` owns, by slot index."""
        return np.flatnonzero(self.home_rank == rank).astype(np.int32)

    def slot_to_expert(self, replica_experts: IntArray) -> IntArray:
        """int32 [P, E/P + s]: the logical expert in every slot, -1 for an empty one.

        Args:
            replica_experts: int32 [P, s], the expert in each replica slot, -1 for none.
        """
        table = np.full((self.num_ranks, self.slots_per_rank), -1, dtype=np.int32)
        table[self.home_rank, self.home_index] = np.arange(self.num_experts, dtype=np.int32)
        table[:, self.experts_per_rank :] = replica_experts
        return table

    def expert_to_index(self, replica_experts: IntArray) -> IntArray:
        """int32 [E, P]: the slot index at which a rank holds an expert, -1 where it holds none.

        Args:
            replica_experts: int32 [P, s], the expert in each replica slot, -1 for none.
        """
        table = np.full((self.num_experts, self.num_ranks), -1, dtype=np.int32)
        ranks, slots = np.nonzero(replica_experts >= 0)
        table[replica_experts[ranks, slots], ranks] = self.experts_per_rank + slots
        table[np.arange(self.num_experts), self.home_rank] = self.home_index
        return table

    def no_replicas(self) -> IntArray:
        """int32 [P, s] of -1: every replica slot empty."""
        return np.full((self.num_ranks, self.num_replica_slots), -1, dtype=np.int32)
