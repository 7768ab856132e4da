"""What the forward kernel reads for one launch: task stream, origin of pool rows, places of tokens, transfers.

This module is the meaning of those tables, in numpy. The route kernel writes the same values on the device; the
forward kernel only reads them. It decides the order in which tiles are computed and how much memory the tables can
need. It knows neither how the plan was found nor where the buffers lie; it imports neither torch nor the kernel
language.

On each rank, for one launch:

============== ======================== ================================================================================
header         int32 [8]                ``HEADER``: number of tasks, blocks and transfers of this rank, launch number
tasks          int64 [num_tasks]        ``pack_task`` words in the order in which clusters claim them
row_source     int32 [blocks * 128]     pool row -> ``source_rank << 24 | token * k + choice``; -1 for a padding row
places         int32 [P, tokens, k]     pool row on this rank of (source rank, token, choice); -1: computed elsewhere
transfers      int32 [num_transfers, 4] (source rank, source slot, destination slot, expert), by destination slot
counters       int32 [num_counters]     zero before the launch; see ``Counters``
============== ======================== ================================================================================

A token row crosses a link once for each destination rank: it is pulled when the pull warps meet its *first* pool row,
the smallest of its places here, and written from shared memory to all of its places. Walking the pool in order
therefore brings the rows in the order in which the blocks need them, without a list of pulls.

Every wait is for an earlier task or for communication, and communication never waits for a task, so that no order of
execution can deadlock:

* FC1 of a block waits until ``rows_ready[block]`` counts 128 rows, padding included, in pieces; a gated task, whose
  slot's weights arrive in this launch, also until ``weights_ready[replica slot, 0]`` counts the pieces of W1.
* FC2 of a block waits until ``act_ready[block]`` counts the FC1 tiles; a gated task also for the pieces of W2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_kernels.layout import ShapeError

BLOCK_ROWS = 128
"""Rows of a token block; the M extent of every tile."""

CLUSTER = 2
"""CTAs that take one task word together: two blocks and one N tile, or one block and two N tiles."""

MAX_PIECE_BYTES = 4096
"""A row or a weight tensor crosses a link in pieces of at most this size: one bulk copy, one shared-memory stage."""

SOURCE_SHIFT = 24
"""``row_source`` holds the source rank above this bit and ``token * k + choice`` below it."""

HEADER_WORDS = 8
"""int32 words of the header."""


class WorkHeader(IntEnum):
    """Words of the header."""

    NUM_TASKS = 0
    NUM_BLOCKS = 1
    NUM_TRANSFERS = 2
    LAUNCH = 3


class Kind(IntEnum):
    """What a task computes."""

    FC1 = 0
    FC2 = 1
    END = 2


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer as the forward kernel sees it.

    Args:
        num_ranks: P, 1 to 127.
        num_experts: E, a multiple of P.
        num_replica_slots: s, replica slots of a rank.
        hidden: H, a multiple of 64.
        intermediate: I, a multiple of 64.
        top_k: k, 1 to 16.
        max_tokens: tokens of the largest batch of a rank; ``max_tokens * top_k`` below 2**24.

    Raises:
        ShapeError: naming the field, its value and what is allowed.
    """

    num_ranks: int
    num_experts: int
    num_replica_slots: int
    hidden: int
    intermediate: int
    top_k: int
    max_tokens: int

    def __post_init__(self) -> None:
        allowed = {
            "num_ranks": (1 <= self.num_ranks <= 127, "1 to 127"),
            "num_experts": (
                self.num_experts >= 1 and self.num_experts % max(1, self.num_ranks) == 0,
                "a multiple of num_ranks",
            ),
            "num_replica_slots": (self.num_replica_slots >= 0, "at least 0"),
            "hidden": (self.hidden >= 64 and self.hidden % 64 == 0, "a multiple of 64, above 0"),
            "intermediate": (self.intermediate >= 64 and self.intermediate % 64 == 0, "a multiple of 64, above 0"),
            "top_k": (1 <= self.top_k <= min(16, self.num_experts), "1 to 16, at most num_experts"),
            "max_tokens": (
                1 <= self.max_tokens * self.top_k < 1 << SOURCE_SHIFT,
                "at least 1, times top_k below 2**24",
            ),
        }
        for name, (holds, phrase) in allowed.items():
            if not holds:
                raise ShapeError(name, getattr(self, name), phrase)

    @property
    def home_slots(self) -> int:
        """Home slots of a rank, E / P."""
        return self.num_experts // self.num_ranks

    @property
    def slots(self) -> int:
        """Slots of a rank, E / P + s."""
        return self.home_slots + self.num_replica_slots

    @property
    def pieces_per_row(self) -> int:
        """Equal pieces, multiples of 16 bytes, in which a BF16 row of H columns crosses a link."""
        row_bytes = 2 * self.hidden
        pieces = -(-row_bytes // MAX_PIECE_BYTES)
        while row_bytes % (16 * pieces):
            pieces += 1
        return pieces

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece of a row; weights cross in pieces of the same size."""
        return 2 * self.hidden // self.pieces_per_row

    @property
    def w1_pieces(self) -> int:
        """Pieces of one expert's W1, BF16 [2I, H]."""
        return 2 * self.intermediate * self.pieces_per_row

    @property
    def w2_pieces(self) -> int:
        """Pieces of one expert's W2, BF16 [H, I]."""
        return self.intermediate * self.pieces_per_row

    @property
    def rows_need(self) -> int:
        """Value of ``rows_ready`` at which a block is complete."""
        return BLOCK_ROWS * self.pieces_per_row


@dataclass(frozen=True)
class Tiling:
    """How a block's products are cut into tasks and in which order tasks are claimed.

    Args:
        tile_columns: N extent of a tile. FC1 tiles hold gate and up columns, so they yield half as many activations.
        group_blocks: blocks of one slot whose tiles are computed together, so that weights are reused from L2.
        lag: FC1 task words between the end of a group's FC1 and its FC2, so that FC2 need not wait.
    """

    tile_columns: int = 256
    group_blocks: int = 16
    lag: int = 128

    def fc1_tiles(self, shape: LayerShape) -> int:
        """N tiles of FC1."""
        return -(-2 * shape.intermediate // self.tile_columns)

    def fc2_tiles(self, shape: LayerShape) -> int:
        """N tiles of FC2."""
        return -(-shape.hidden // self.tile_columns)


@dataclass(frozen=True)
class Counters:
    """Offsets, in int32 words, into the local counters of a launch.

    Args:
        max_blocks: bound of the blocks of a rank.
        num_replica_slots: s.
    """

    max_blocks: int
    num_replica_slots: int

    TASK_QUEUE = 0
    """Task words claimed."""
    WEIGHT_QUEUE = 1
    """Weight pieces claimed, all transfers of the rank in one sequence: every W1, then every W2."""
    CTAS_DONE = 2
    """CTAs whose results have arrived and whose pulls are over."""
    FIRST_BLOCK = 4

    @property
    def act_ready(self) -> int:
        """FC1 tiles stored, one counter a block."""
        return self.FIRST_BLOCK

    @property
    def rows_ready(self) -> int:
        """Pieces of pool rows written, one counter a block."""
        return self.FIRST_BLOCK + self.max_blocks

    @property
    def weights_ready(self) -> int:
        """Pieces of replica weights written, two counters a replica slot: W1, W2."""
        return self.FIRST_BLOCK + 2 * self.max_blocks

    @property
    def size(self) -> int:
        """All counters; to be cleared before every launch."""
        return self.weights_ready + 2 * self.num_replica_slots


@dataclass(frozen=True)
class WorkBounds:
    """Largest extents that any routing and plan of a shape can need on one rank."""

    max_blocks: int
    max_rows: int
    max_tasks: int
    max_transfers: int


def work_bounds(shape: LayerShape, tiling: Tiling = Tiling()) -> WorkBounds:
    """Extents of tables and pool for ``shape.max_tokens`` tokens on every rank, all routed as unluckily as can be."""
    rows = shape.num_ranks * shape.max_tokens * min(shape.top_k, shape.slots)
    used_slots = min(shape.slots, rows)
    max_blocks = (rows + (BLOCK_ROWS - 1) * used_slots) // BLOCK_ROWS
    tiles = (tiling.fc1_tiles(shape), tiling.fc2_tiles(shape))
    words_a_block = sum(-(-n // CLUSTER) for n in tiles)
    return WorkBounds(max_blocks, max_blocks * BLOCK_ROWS, max_blocks * words_a_block, shape.num_replica_slots)


# ---- task stream --------------------------------------------------------------------------------------------------


def pack_task(kind: int, block: int, tile: int, slot: int, share_rows: bool, gated: bool) -> int:
    """A task word: block in bits 0-23, N tile in 24-39, slot in 40-55, kind in 56-57, share_rows in 58, gated in 59.

    CTA c of the cluster takes block + c and the tile, or, with ``share_rows``, the block and tile + c; a tile beyond
    the last is computed on zeros and not stored. A *gated* task waits for its slot's weights,
    which arrive in this launch.
    """
    return block | tile << 24 | slot << 40 | kind << 56 | share_rows << 58 | gated << 59


def unpack_task(word: int) -> tuple[Kind, int, int, int, bool, bool]:
    """(kind, block, tile, slot, share_rows, gated) of a task word."""
    fields = word & 0xFFFFFF, word >> 24 & 0xFFFF, word >> 40 & 0xFFFF
    return Kind(word >> 56 & 3), *fields, bool(word >> 58 & 1), bool(word >> 59 & 1)


@dataclass(frozen=True)
class Groups:
    """Groups of at most ``group_blocks`` consecutive blocks of one slot, g of them; every array int64 [g].

    Attributes:
        first: first block (position in the pool).
        size: blocks.
        slot: slot index.
    """

    first: NDArray[np.int64]
    size: NDArray[np.int64]
    slot: NDArray[np.int64]


def block_groups(blocks_per_slot: NDArray[Any], group_blocks: int) -> Groups:
    """Groups in pool order: slot by slot, so that home blocks come first and replica blocks last.

    Args:
        blocks_per_slot: integer [slots], blocks that the rank computes in each slot.
        group_blocks: blocks of a full group.
    """
    blocks = np.asarray(blocks_per_slot, dtype=np.int64)
    per_slot = -(-blocks // group_blocks)
    slot = np.repeat(np.arange(blocks.size), per_slot)
    within = np.arange(slot.size) - (np.cumsum(per_slot) - per_slot)[slot]
    first = (np.cumsum(blocks) - blocks)[slot] + within * group_blocks
    return Groups(first, np.minimum(group_blocks, blocks[slot] - within * group_blocks), slot)


def group_words(size: int, tiles: int) -> int:
    """Task words of one product of a group: a pair takes a word a tile, a single block a word for two tiles."""
    pairs, single = divmod(size, CLUSTER)
    return pairs * tiles + single * -(-tiles // CLUSTER)


def group_word(index: int, first: int, size: int, slot: int, gated: bool, kind: Kind, tiles: int) -> int:
    """Word ``index`` of one product of a group, in closed form: the route kernel computes each word by itself.

    Two N tiles are computed for all blocks of the group before the next two, so that at any time few weight columns are
    live: the words of such a *band* are, pair by pair, one for each of its tiles, then one for a block left over.
    """
    pairs, single = divmod(size, CLUSTER)
    band, index = divmod(index, pairs * CLUSTER + single)
    width = min(CLUSTER, tiles - band * CLUSTER)
    pair, tile = divmod(index, width)
    if pair < pairs:
        return pack_task(kind, first + pair * CLUSTER, band * CLUSTER + tile, slot, False, gated)
    return pack_task(kind, first + pairs * CLUSTER, band * CLUSTER, slot, True, gated)


def task_stream(
    blocks_per_slot: NDArray[Any], arriving: Collection[int], shape: LayerShape, tiling: Tiling
) -> NDArray[np.int64]:
    """int64 [num_tasks]: the task words of one rank in claiming order.

    FC2 of group g follows FC1 of group h(g), the first h >= g at whose end ``lag`` more FC1 words than at the end of g
    have been emitted (the last group if there is none). h never decreases, so that the position of every word is a sum
    of two prefix sums.

    Args:
        blocks_per_slot: integer [slots], blocks that the rank computes in each slot.
        arriving: slots whose weights are transferred in this launch.
        shape: the layer.
        tiling: tiles, groups and lag.
    """
    groups = block_groups(blocks_per_slot, tiling.group_blocks)
    tiles = {Kind.FC1: tiling.fc1_tiles(shape), Kind.FC2: tiling.fc2_tiles(shape)}
    fc1_until, fc2_until = (
        np.cumsum([0, *(group_words(int(size), n) for size in groups.size)]) for n in tiles.values()
    )
    end = fc1_until[1:]
    after = np.minimum(np.searchsorted(end, end + tiling.lag), max(0, end.size - 1))  # h(g)
    fc2_before = fc2_until[np.searchsorted(after, np.arange(end.size))]  # words of the groups with h < g
    start = {Kind.FC1: fc1_until[:-1] + fc2_before, Kind.FC2: end[after] + fc2_until[:-1]}
    stream = np.full(int(fc1_until[-1] + fc2_until[-1]), -1, dtype=np.int64)
    for kind, n in tiles.items():
        for at, first, size, slot in zip(start[kind], groups.first, groups.size, groups.slot, strict=True):
            for i in range(group_words(int(size), n)):
                stream[at + i] = group_word(i, int(first), int(size), int(slot), slot in arriving, kind, n)
    return stream


# ---- rows and transfers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardWork:
    """Everything that the forward kernel of one rank reads for one launch; see the module's table.

    Attributes:
        header: int32 [8].
        tasks: int64 [num_tasks].
        row_source: int32 [num_blocks * 128].
        places: int32 [P, max_tokens, k].
        transfers: int32 [num_transfers, 4].
    """

    header: NDArray[np.int32]
    tasks: NDArray[np.int64]
    row_source: NDArray[np.int32]
    places: NDArray[np.int32]
    transfers: NDArray[np.int32]


def forward_work(
    rank: int,
    launch: int,
    shape: LayerShape,
    tiling: Tiling,
    blocks_per_slot: NDArray[Any],
    destination: Sequence[NDArray[Any]],
    pool_row: Sequence[NDArray[Any]],
    transfers: NDArray[Any],
) -> ForwardWork:
    """The tables of one rank and launch.

    Args:
        rank: the rank that computes.
        launch: number of the launch, from 1; waits for other ranks are for this number.
        shape: the layer.
        tiling: tiles, groups and lag.
        blocks_per_slot: integer [slots], blocks that ``rank`` computes in each slot.
        destination: integer [M_r, k] a source rank r, the rank that computes each assignment.
        pool_row: integer [M_r, k] a source rank r, the row in the pool of that rank.
        transfers: integer [n, 4], (source rank, source slot, destination slot, expert), by destination slot.
    """
    num_blocks = int(np.sum(blocks_per_slot))
    row_source = np.full(num_blocks * BLOCK_ROWS, -1, dtype=np.int32)
    places = np.full((shape.num_ranks, shape.max_tokens, shape.top_k), -1, dtype=np.int32)
    for source, (ranks, rows) in enumerate(zip(destination, pool_row, strict=True)):
        here = ranks == rank
        assignment = np.arange(ranks.size, dtype=np.int64).reshape(ranks.shape)
        row_source[rows[here]] = source << SOURCE_SHIFT | assignment[here]
        places[source, : len(ranks)] = np.where(here, rows, -1)
    tasks = task_stream(blocks_per_slot, set(np.asarray(transfers)[:, 2].tolist()), shape, tiling)
    header = np.zeros(HEADER_WORDS, dtype=np.int32)
    header[[WorkHeader.NUM_TASKS, WorkHeader.NUM_BLOCKS, WorkHeader.NUM_TRANSFERS, WorkHeader.LAUNCH]] = (
        tasks.size,
        num_blocks,
        len(transfers),
        launch,
    )
    return ForwardWork(header, tasks, row_source, places, np.asarray(transfers, dtype=np.int32).reshape(-1, 4))


__all__ = [
    "BLOCK_ROWS",
    "CLUSTER",
    "HEADER_WORDS",
    "SOURCE_SHIFT",
    "Counters",
    "ForwardWork",
    "Groups",
    "Kind",
    "LayerShape",
    "Tiling",
    "WorkBounds",
    "WorkHeader",
    "block_groups",
    "forward_work",
    "group_word",
    "group_words",
    "pack_task",
    "task_stream",
    "unpack_task",
    "work_bounds",
]
