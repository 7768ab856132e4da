"""Memory map of the planner: what it keeps on each rank, how large, and where. No DSL, no torch.

All regions lie in one symmetric allocation a rank, at the same offsets everywhere; peers write only ``counts_flags``
and ``counts``. The local ranks of a launch are slices of one allocation, equally far apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from megaflux_kernels.forward_map import Region
from megaflux_kernels.layout import MAX_ASSIGNMENTS, MAX_BLOCKS, SearchShape, ShapeError
from megaflux_kernels.sync.record import RECORD_WORDS

ALIGNMENT = 256
"""Bytes: regions begin on multiples of this."""
THREADS = 512
WARPS = THREADS // 32
PASS_CHOICES = 8192
"""Assignments that a chunk orders at a time, 12 bytes of shared memory each; 16 bits hold one's number."""


class State(IntEnum):
    """Words of ``state``; each flag has a cache line of its own, since all blocks poll it."""

    EPOCH = 0  # launches completed
    HISTOGRAMS = 32  # histogram blocks that have published, all launches
    PLAN = 64  # launch whose plan is ready
    SIZE = 96


class Work(IntEnum):
    """Words of ``work``: addresses of the forward kernel's tables on this rank (``forward_map.py``, ``peers.py``)."""

    HEADER = 0
    TASKS = 1
    TRANSFERS = 2
    COUNTERS = 3
    PEERS = 4
    SIZE = 8


class Mark(IntEnum):
    """Words of ``trace``: SM clocks at the ends of the stages, and the global timer where a name ends in NS.

    START to PLAN are of the planning block, COUNTED to ROUTED of chunk 0, on another multiprocessor's clock.
    """

    START = 0
    HISTOGRAM = 1
    SENT = 2
    EXCHANGE = 3
    BLOCKS = 4
    SEARCH = 5
    REFINE = 6
    PLAN = 7
    COUNTED = 8
    READY = 9
    SEEN = 10
    LOADED = 11
    ROUTED = 12
    START_NS = 13
    PLAN_NS = 14
    ROUTED_NS = 15
    SIZE = 16


NANOSECONDS = {Mark.START: Mark.START_NS, Mark.PLAN: Mark.PLAN_NS, Mark.ROUTED: Mark.ROUTED_NS}
"""Marks that record the global timer too."""


@dataclass(frozen=True)
class PlannerShape:
    """What the planner's launch is compiled for.

    Attributes:
        search: ranks, experts, slots and block rows.
        top_k: k, choices of a token, 1 to 16.
        max_tokens: tokens of the largest batch of a rank.
        num_chunks: histogram and route blocks of a rank; one more block plans.
    """

    search: SearchShape
    top_k: int
    max_tokens: int
    num_chunks: int

    def __post_init__(self) -> None:
        experts = self.search.num_experts
        if not 1 <= self.top_k <= min(16, experts):
            raise ShapeError("top_k", self.top_k, f"1 to {min(16, experts)}")
        if not 1 <= self.max_tokens * self.top_k < MAX_ASSIGNMENTS:
            raise ShapeError("max_tokens", self.max_tokens, f"at least 1, times top_k below {MAX_ASSIGNMENTS}")
        if self.num_chunks < 1:
            raise ShapeError("num_chunks", self.num_chunks, "at least 1")
        rows = self.search.num_ranks * self.max_tokens * self.top_k
        if rows // self.search.block_rows + experts > MAX_BLOCKS:
            raise ShapeError("max_tokens", self.max_tokens, f"at most {MAX_BLOCKS} token blocks on all ranks")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a warp routes at once: one lane a choice."""
        return 32 // self.top_k

    @property
    def pass_tokens(self) -> int:
        """Tokens that a chunk orders at a time: whole steps of all warps, no more than its largest share needs."""
        unit = WARPS * self.tokens_per_step
        largest = -(-self.max_tokens // self.num_chunks)
        return min(PASS_CHOICES // (unit * self.top_k), -(-largest // unit)) * unit


@dataclass(frozen=True)
class PlannerMap:
    """Regions of one rank.

    ``counts_flags``  int32 [P], launch whose counts each rank has sent. Remote.
    ``counts``        int32 [2, P, E], by parity of the launch: rows by source rank and expert. Remote.
    ``state``         int32 [State.SIZE].
    ``error``         int32 [8], see ``sync/record.py``.
    ``homes``         int32 [2, E], expert of every home slot (rank * E/P + index), home slot of every expert.
    ``peers``         int64 [P], this map's base address on every rank, as mapped here.
    ``work``          int64 [Work.SIZE], the forward kernel's tables.
    ``rank_counts``   int32 [E], this rank's histogram while it is gathered; zero between launches.
    ``chunk_counts``  int32 [chunks, E], histogram of each chunk of tokens.
    ``plan``          int32, ``layout.PlanLayout``.
    ``route_place``   int32 [max_tokens, k], destination rank << 16 | slot index there.
    ``route_row``     int32 [max_tokens, k], row in the destination's pool: block position * block_rows + row.
    ``trace``         int64 [Mark.SIZE].
    """

    shape: PlannerShape

    @cached_property
    def regions(self) -> dict[str, Region]:
        """Regions by name, in the order of their offsets."""
        shape, search = self.shape, self.shape.search
        ranks, experts = search.num_ranks, search.num_experts
        return {
            "counts_flags": Region("int32", (ranks,)),
            "counts": Region("int32", (2, ranks, experts)),
            "state": Region("int32", (int(State.SIZE),)),
            "error": Region("int32", (RECORD_WORDS,)),
            "homes": Region("int32", (2, experts)),
            "peers": Region("int64", (ranks,)),
            "work": Region("int64", (int(Work.SIZE),)),
            "rank_counts": Region("int32", (experts,)),
            "chunk_counts": Region("int32", (shape.num_chunks, experts)),
            "plan": Region("int32", (search.plan.num_words,)),
            "route_place": Region("int32", (shape.max_tokens, shape.top_k)),
            "route_row": Region("int32", (shape.max_tokens, shape.top_k)),
            "trace": Region("int64", (int(Mark.SIZE),)),
        }

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of every region."""
        table, at = {}, 0
        for name, region in self.regions.items():
            table[name] = at
            at += -(-region.num_bytes // ALIGNMENT) * ALIGNMENT
        return table

    @property
    def num_bytes(self) -> int:
        """Bytes of a rank's allocation."""
        name, region = list(self.regions.items())[-1]
        return self.offsets[name] + -(-region.num_bytes // ALIGNMENT) * ALIGNMENT


__all__ = [
    "ALIGNMENT",
    "NANOSECONDS",
    "PASS_CHOICES",
    "THREADS",
    "WARPS",
    "Mark",
    "PlannerMap",
    "PlannerShape",
    "State",
    "Work",
]
