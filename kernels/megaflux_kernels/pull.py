"""The pull warp: brings token rows and replica weights to this rank, one warp of every CTA.

A *piece* (part of a row or of a weight tensor, at most 4 KB) comes from a peer by one bulk copy into a shared-memory
stage, is written from there to every place that needs it, and is then counted. Lanes are (stage, place): one pass waits
for all stages, issues every write, refills the stages as soon as they are read, and counts with one fence.

Decides which pieces move, in which order and by which CTA; does not know who waits for the counts.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, range_constexpr

from megaflux_kernels import ptx
from megaflux_kernels.launch import (
    START,
    Buffers,
    Place,
    Ranks,
    Tables,
    await_peers,
    has_failed,
    mark,
    signal_peers,
)
from megaflux_kernels.layout import Wait
from megaflux_kernels.peers import PEER_WORDS, Peer
from megaflux_kernels.sync.device import doubles, record_failure, words
from megaflux_kernels.worklist import BLOCK_ROWS, SOURCE_SHIFT, Counters, LayerShape, WorkHeader

arch = cute.arch
MAX_STAGES = 4
NO_ROW = -2
"""Stands for the origin of a row beyond the pool; -1 is that of a padding row."""
CLAIM_PASSES = 4
"""Passes between two visits to the weight queue."""


class Piece(NamedTuple):
    """What a lane does for a piece: addresses of its source, this lane's destination and the counter of its arrival.

    A source of 0 means an empty stage, a destination of 0 a lane without a place. ``rank`` and ``slot`` name the piece
    in the error record: source rank, and pool row or weight slot.
    """

    source: Int64
    destination: Int64
    counter: Int64
    rank: Int32
    slot: Int32


class Staging(NamedTuple):
    """The warp's shared memory: address of the first stage, pointer to its barrier."""

    address: Int32
    barriers: cute.Pointer


class PullWarp:
    """Pull warp of one layer shape.

    Args:
        shape: the layer.
        counters: offsets of the counters.
    """

    def __init__(self, shape: LayerShape, counters: Counters) -> None:
        self.shape, self.counters = shape, counters
        self.places = 1 << (shape.top_k - 1).bit_length()  # lanes of a stage
        self.stages = min(MAX_STAGES, 32 // self.places)
        self.piece_bytes = shape.piece_bytes

    @property
    def staging_type(self) -> object:
        """Shared-memory type of the stages."""
        return cute.struct.MemRange[BFloat16, self.stages * self.piece_bytes // 2]

    @cute.jit
    def run(
        self,
        staging: Staging,
        place: Place,
        buffers: Buffers,
        tables: Tables,
        ranks: Ranks,
        pull_weights,
        num_ctas: cutlass.Constexpr,
        weight_ctas: cutlass.Constexpr,
        trace: Int64,
        tracing: cutlass.Constexpr,
    ):
        """Everything that this CTA pulls in a launch; the first CTA also tells the peers that this rank has started.

        While there are weights to pull, the first ``weight_ctas`` CTAs pull these from the beginning, which needs no
        start flag, and the others join when their rows are in.
        """
        num_ranks, lane = self.shape.num_ranks, place.lane
        mark(trace, place, 0, tracing)
        if place.cta == 0:
            if not has_failed(ranks):  # a rank that could not plan has not written what peers read of it
                signal_peers(lane, ranks, START, num_ranks)
        arch.sync_warp()
        transfers = pull_weights * arch.load(words(tables.header).iterator + int(WorkHeader.NUM_TRANSFERS), Int32)
        first, stride = Int32(place.cta), Int32(num_ctas)
        phase = Int32(0)
        if transfers > 0:
            first -= weight_ctas
            stride -= weight_ctas
        if first < 0:
            phase = self.weights(staging, lane, phase, transfers, buffers, tables, ranks)
        started = await_peers(lane, ranks, START, num_ranks, Wait.FORWARD_START)
        arch.fence_proxy("async.global")
        mark(trace, place, 1, tracing)
        if (first >= 0) & (started == 1):
            phase = self.rows(staging, lane, phase, first, stride, buffers.pool, tables, ranks)
            mark(trace, place, 2, tracing)
            phase = self.weights(staging, lane, phase, transfers, buffers, tables, ranks)
        mark(trace, place, 3, tracing)
        arch.sync_warp()

    # ---- one pass -------------------------------------------------------------------------------------------------

    @cute.jit
    def pass_on(self, staging: Staging, lane, phase, budget, piece: Piece, after: Piece, ranks: Ranks):
        """Write the stages' pieces to their places and bring the next ones; returns (phase, budget) of the lane."""
        stage = lane // self.places
        buffer, barrier = staging.address + stage * self.piece_bytes, staging.barriers + stage
        if piece.source != 0:
            budget = self.wait_piece(barrier, phase, budget, piece, ranks)
            phase ^= 1
        if piece.destination != 0:
            ptx.bulk_store(piece.destination, buffer, self.piece_bytes)
        arch.cp_async_bulk_commit_group()
        arch.cp_async_bulk_wait_group(0, read=True)
        arch.sync_warp()
        if (after.source != 0) & (lane % self.places == 0):
            arch.mbarrier_arrive_and_expect_tx(barrier, self.piece_bytes)
            ptx.bulk_load(buffer, after.source, self.piece_bytes, Int32(barrier.toint()))
        arch.cp_async_bulk_wait_group(0)  # written, not only read from shared memory
        if piece.destination != 0:
            arch.fence_proxy("async.global")
            counter = words(piece.counter).iterator
            arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
        return phase, budget

    @cute.jit
    def wait_piece(self, barrier, phase, budget, piece: Piece, ranks: Ranks):
        """Bounded wait for a stage to be filled; returns the budget, 0 after a failure.

        Copies that are on their way are waited for although another wait of this rank has failed meanwhile: they write
        into this CTA's shared memory, so it must not end before they have.
        """
        arrived = arch.mbarrier_try_wait(barrier, phase)
        if not arrived:
            start, waiting = arch.globaltimer(), not arrived
            while waiting:
                arrived = arch.mbarrier_try_wait(barrier, phase)
                waiting = (not arrived) & (arch.globaltimer() - start < budget)
            if not arrived:
                record_failure(ranks.error, Wait.PULL, piece.rank, piece.slot, ranks.launch)
                budget = Int64(0)
        return budget

    # ---- rows -----------------------------------------------------------------------------------------------------

    @cute.jit
    def rows(self, staging: Staging, lane, phase, first, stride, pool: Int64, tables: Tables, ranks: Ranks):
        """Pull every ``stride``-th pool row from row ``first`` on, in order; returns the phase.

        A rank that has failed pulls none.

        All CTAs together walk the pool from its beginning, so that the first blocks are complete first. Each lane looks
        at one pool row. The rows that are their token's first here are pulled, each to all its places; padding rows are
        only counted.
        """
        pieces = self.shape.pieces_per_row
        num_rows = arch.load(words(tables.header).iterator + int(WorkHeader.NUM_BLOCKS), Int32) * BLOCK_ROWS
        if arch.vote_any_sync(has_failed(ranks)):
            num_rows = Int32(0)
        budget, piece = ranks.budget_ns, no_piece()
        base = first
        code = self.origin(tables.row_source, base + lane * stride, num_rows)
        while base < num_rows:
            row = base + lane * stride
            next_code = self.origin(tables.row_source, row + 32 * stride, num_rows)
            first_rows = arch.vote_ballot_sync(self.is_first_place(code, row, tables.places))
            if code == -1:
                counter = words(tables.counters).iterator + (self.counters.rows_ready + row // BLOCK_ROWS)
                arch.red(counter, Int32(pieces), op="add", dtype="s32", sem="relaxed", scope="gpu")
            num_pieces = arch.popc(first_rows) * pieces
            for start in cutlass.range(0, num_pieces, self.stages, unroll=1):
                index = start + lane // self.places
                holder = ptx.nth_set_bit(first_rows, index // pieces)
                token_code = arch.shuffle_sync(code, holder & 31)
                after = no_piece()
                if (index < num_pieces) & (lane // self.places < self.stages):
                    after = self.row_piece(token_code, index % pieces, lane % self.places, pool, tables, ranks)
                phase, budget = self.pass_on(staging, lane, phase, budget, piece, after, ranks)
                piece = after
            code = next_code
            base += 32 * stride
        phase, budget = self.pass_on(staging, lane, phase, budget, piece, no_piece(), ranks)
        return phase

    @cute.jit
    def origin(self, row_source: Int64, row, num_rows):
        """Entry of ``row_source``, or ``NO_ROW`` beyond the pool."""
        code = Int32(NO_ROW)
        if row < num_rows:
            code = arch.load(words(row_source).iterator + row, Int32)
        return code

    @cute.jit
    def is_first_place(self, code, row, places: Int64):
        """Whether a pool row holds a token and no earlier row here holds the same one."""
        is_first = code >= 0
        if is_first:
            own = self.token_places(code, places)
            for j in range_constexpr(self.shape.top_k):
                other = arch.load(own + j, Int32)
                is_first = is_first & ((other < 0) | (other >= row))
        return is_first

    @cute.jit
    def token_places(self, code, places: Int64):
        """Pointer to the k places of the token that an entry of ``row_source`` names."""
        source, token = code >> SOURCE_SHIFT, (code & ((1 << SOURCE_SHIFT) - 1)) // self.shape.top_k
        return words(places).iterator + (source * self.shape.max_tokens + token) * self.shape.top_k

    @cute.jit
    def row_piece(self, code, nth, choice, pool: Int64, tables: Tables, ranks: Ranks):
        """Piece ``nth`` of a token row, for the lane of one of its choices."""
        source, token = code >> SOURCE_SHIFT, (code & ((1 << SOURCE_SHIFT) - 1)) // self.shape.top_k
        row_bytes, offset = 2 * self.shape.hidden, Int64(nth * self.piece_bytes)
        row = Int32(-1)
        if choice < self.shape.top_k:
            row = arch.load(self.token_places(code, tables.places) + choice, Int32)
        base = arch.load(doubles(ranks.peers).iterator + (source * PEER_WORDS + int(Peer.X)), Int64)
        destination, counter = Int64(0), Int64(0)
        if row >= 0:
            destination = pool + Int64(row) * row_bytes + offset
            counter = tables.counters + 4 * Int64(self.counters.rows_ready + row // BLOCK_ROWS)
        return Piece(base + Int64(token) * row_bytes + offset, destination, counter, source, row)

    # ---- weights --------------------------------------------------------------------------------------------------

    @cute.jit
    def weights(self, staging: Staging, lane, phase, transfers, buffers: Buffers, tables: Tables, ranks: Ranks):
        """Pull replica weights, a few pieces at a time from the rank's queue, until it is empty; returns the phase.

        A rank that has failed pulls none.
        """
        total = transfers * (self.shape.w1_pieces + self.shape.w2_pieces)
        if arch.vote_any_sync(has_failed(ranks)):
            total = Int32(0)
        share = CLAIM_PASSES * self.stages
        budget, piece = ranks.budget_ns, no_piece()
        claimed = self.claim(tables.counters, lane, share, total)
        while claimed < total:
            for start in cutlass.range(0, share, self.stages, unroll=1):
                index, after = claimed + start + lane // self.places, no_piece()
                if (index < total) & (lane // self.places < self.stages):
                    after = self.weight_piece(index, lane % self.places == 0, transfers, buffers, tables, ranks)
                phase, budget = self.pass_on(staging, lane, phase, budget, piece, after, ranks)
                piece = after
            claimed = self.claim(tables.counters, lane, share, total)
        phase, budget = self.pass_on(staging, lane, phase, budget, piece, no_piece(), ranks)
        return phase

    @cute.jit
    def claim(self, counters: Int64, lane, share: cutlass.Constexpr, total):
        """First of the next ``share`` pieces of the weight queue, for the whole warp."""
        first = total
        if (lane == 0) & (total > 0):
            queue = words(counters).iterator + Counters.WEIGHT_QUEUE
            first = arch.atomic_add(queue, Int32(share), sem="relaxed", scope="gpu")
        return arch.shuffle_sync(first, 0)

    @cute.jit
    def weight_piece(self, index, writes, transfers, buffers: Buffers, tables: Tables, ranks: Ranks):
        """Piece ``index`` of the rank's transfers: W1 of every transfer first, then W2 of every one."""
        shape = self.shape
        all_w1 = transfers * shape.w1_pieces
        pieces, replicas, column, second = Int32(shape.w1_pieces), buffers.replica_w1, Int32(int(Peer.W1)), Int32(0)
        if index >= all_w1:
            index -= all_w1
            pieces, replicas, column, second = Int32(shape.w2_pieces), buffers.replica_w2, Int32(int(Peer.W2)), Int32(1)
        transfer = words(tables.transfers).iterator + index // pieces * 4
        source, source_slot = arch.load(transfer, Int32), arch.load(transfer + 1, Int32)
        slot = arch.load(transfer + 2, Int32)
        replica_slot = slot - shape.home_slots
        offset, slot_bytes = Int64(index % pieces) * self.piece_bytes, Int64(pieces) * self.piece_bytes
        base = arch.load(doubles(ranks.peers).iterator + (source * PEER_WORDS + column), Int64)
        counter = self.counters.weights_ready + 2 * replica_slot + second
        destination = Int64(0)
        if writes:
            destination = replicas + replica_slot * slot_bytes + offset
        return Piece(
            base + source_slot * slot_bytes + offset, destination, tables.counters + 4 * Int64(counter), source, slot
        )


def no_piece() -> Piece:
    """An empty stage."""
    return Piece(Int64(0), Int64(0), Int64(0), Int32(0), Int32(0))


__all__ = ["Piece", "PullWarp", "Staging"]
