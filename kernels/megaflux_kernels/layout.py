"""Limits, wait codes and the layout of a plan. Imports neither torch nor the DSL.

Decides what a shape may be, how a plan lies in memory and what each bounded wait is called; host and device code read
the same definition. Memory maps built on it: ``planner_map`` and ``forward_map``. ``P`` ranks, ``E`` experts, ``s``
replica slots a rank, ``k`` top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

MAX_RANKS = 127  # a rank is 7 bits of the packed keys of the search and of ``row_source``
MAX_EXPERTS = 512  # an expert is 9 bits there
MAX_HOME_SLOTS = 256  # of a rank that replicates: 8 bits beside a load
MAX_REPLICAS = 2048  # a (rank, replica slot) pair is 11 bits
MAX_REPLICA_SLOTS = 32  # one lane a slot
MAX_SHARED_BYTES = 226 * 1024  # of a block; 1 KiB of the 227 KiB is left to alignment
MAX_BLOCKS = (1 << 23) - 1  # a load is 23 bits
MAX_ASSIGNMENTS = 1 << 24  # token * k + j is 24 bits of ``row_source``
MAX_PENALTY = 4096  # lambda * P * s stays below a load's range

STALE = -2
"""In a table of resident copies: this rank's weights are newer than the copies of them, wherever they are."""
STALE_COUNT = 1 << 30
"""Added to the count of expert 0 that a stale rank sends; a count is below 2**24."""


class ShapeError(ValueError):
    """A shape that the kernels cannot serve; the message names field, value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {value!r} is not allowed; allowed: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class Wait(IntEnum):
    """Every bounded wait, by the code that it leaves in the error record."""

    HISTOGRAM = (
        1  # the planner block waits for the histogram blocks of its own rank; slot: histogram blocks still missing
    )
    COUNTS = 2  # the planner block waits for a peer's counts; slot: launches that the peer has not made yet
    PLAN = 3  # a route block waits for the plan of its own rank; slot: the route block
    FORWARD_START = 4  # the forward kernel waits until a peer may be read and written; slot: epoch
    ROWS = 5  # FC1 waits for the token rows of a block; slot: pool block
    REPLICA_W1 = 6  # FC1 waits for a replica's W1; slot: replica slot
    REPLICA_W2 = 7  # FC2 waits for a replica's W2; slot: replica slot
    ACTIVATIONS = 8  # FC2 waits for FC1 of a block; slot: pool block
    RESULTS = 9  # the forward kernel waits until a peer has returned all results; slot: epoch
    PULL = 10  # a pull warp waits for a piece from a peer; slot: pool row, or slot of the weights


class Header(IntEnum):
    """Words of the plan's header, int32."""

    CANDIDATE = 0  # index of the winning search, -1 for the fixed plan
    GATED = 1  # 1 when the gate refused the replicas that the search had found
    MAX_LOAD = 2  # blocks on the busiest rank
    FIXED_MAX_LOAD = 3  # the same without replicas
    NUM_BLOCKS = 4  # blocks of all ranks
    NUM_REPLICAS = 5  # replicas that compute at least one block
    EPOCH = 6  # launch number, from 1
    SIZE = 16


@dataclass(frozen=True)
class SearchShape:
    """What the search of one CTA is compiled for.

    Attributes:
        num_experts: E, a multiple of P.
        num_ranks: P.
        num_replica_slots: s.
        block_rows: rows of a token block.
    """

    num_experts: int
    num_ranks: int
    num_replica_slots: int
    block_rows: int = 128

    def __post_init__(self) -> None:
        _within("num_ranks", self.num_ranks, 1, MAX_RANKS)
        _within("num_experts", self.num_experts, 1, MAX_EXPERTS)
        _within("num_replica_slots", self.num_replica_slots, 0, MAX_REPLICA_SLOTS)
        _within("block_rows", self.block_rows, 1, 1 << 15)
        if self.num_experts % self.num_ranks:
            raise ShapeError("num_experts", self.num_experts, f"a multiple of the {self.num_ranks} ranks")
        if self.num_replica_slots and self.experts_per_rank > MAX_HOME_SLOTS:
            raise ShapeError("num_experts", self.num_experts, f"at most {MAX_HOME_SLOTS} a rank with replica slots")
        if self.num_replicas > MAX_REPLICAS:
            raise ShapeError("num_replica_slots", self.num_replica_slots, f"at most {MAX_REPLICAS} on all ranks")

    @property
    def experts_per_rank(self) -> int:
        """Home slots of a rank."""
        return self.num_experts // self.num_ranks

    @property
    def slots_per_rank(self) -> int:
        """Home and replica slots of a rank."""
        return self.experts_per_rank + self.num_replica_slots

    @property
    def num_replicas(self) -> int:
        """Replica slots of all ranks: bound of the replicas in use."""
        return self.num_ranks * self.num_replica_slots

    @property
    def num_segments(self) -> int:
        """Bound of (expert, rank) pairs that compute blocks: every home and every replica."""
        return self.num_experts + self.num_replicas

    @property
    def mask_words(self) -> int:
        """32-bit words of a set of ranks."""
        return -(-self.num_ranks // 32)

    @property
    def plan(self) -> PlanLayout:
        """Layout of the plan's buffer."""
        return PlanLayout(self)


@dataclass(frozen=True)
class PlanLayout:
    """Regions of a plan, in int32 words from its start. A slot id is ``rank * slots_per_rank + index``.

    ``header``          [16], see ``Header``.
    ``slot_blocks``     [P, E/P + s] blocks that each slot computes: q, home slots first.
    ``slot_base``       [P, E/P + s] pool position of the slot's first block.
    ``replica_experts`` [P, s] expert in each replica slot once the plan is carried out, -1 for an empty one.
    ``loads``           [P] blocks of each rank.
    ``transfers``       [P * s, 3] (expert, rank, replica slot), ordered by (rank, slot).
    ``transfer_first``  [P + 1] first transfer of each rank.
    ``expert_rows``     [E] rows of each expert, of all sources.
    ``source_base``     [E] rows of each expert on the sources before this one.
    ``segment_first``   [E + 1] first segment of each expert. A segment is a run of blocks of one expert on one rank;
                        those of an expert are in ascending rank order.
    ``segment_end``     [E + P * s] block number, within the expert, after the segment's last.
    ``segment_place``   [E + P * s] rank << 16 | slot index.
    ``segment_base``    [E + P * s] pool position of the expert's block 0 if the segment began with it: block j is at
                        ``segment_base + j``.
    """

    shape: SearchShape

    @cached_property
    def words(self) -> dict[str, tuple[int, int]]:
        """First word and length of every region."""
        shape = self.shape
        sizes = {
            "header": int(Header.SIZE),
            "slot_blocks": shape.num_ranks * shape.slots_per_rank,
            "slot_base": shape.num_ranks * shape.slots_per_rank,
            "replica_experts": shape.num_replicas,
            "loads": shape.num_ranks,
            "transfers": 3 * shape.num_replicas,
            "transfer_first": shape.num_ranks + 1,
            "expert_rows": shape.num_experts,
            "source_base": shape.num_experts,
            "segment_first": shape.num_experts + 1,
            "segment_end": shape.num_segments,
            "segment_place": shape.num_segments,
            "segment_base": shape.num_segments,
        }
        table, at = {}, 0
        for name, size in sizes.items():
            table[name] = (at, size)
            at += _aligned(size, 4)
        return table

    def split(self, plan: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
        """The regions of a plan that was copied to the host, int32 [num_words], in their shapes."""
        shape = self.shape
        extents = {
            "slot_blocks": (shape.num_ranks, shape.slots_per_rank),
            "slot_base": (shape.num_ranks, shape.slots_per_rank),
            "replica_experts": (shape.num_ranks, shape.num_replica_slots),
            "transfers": (shape.num_replicas, 3),
        }
        return {
            name: plan[first : first + size].reshape(extents.get(name, (size,)))
            for name, (first, size) in self.words.items()
        }

    @property
    def num_words(self) -> int:
        """Words of a plan, a multiple of 64 so that plans lie one behind the other on cache lines."""
        first, size = list(self.words.values())[-1]
        return _aligned(first + size, 64)


def _within(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ShapeError(field, value, f"{low} to {high}")


def _aligned(value: int, unit: int) -> int:
    return -(-value // unit) * unit
