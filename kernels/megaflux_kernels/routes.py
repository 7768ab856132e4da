"""Routes of one source rank: its histogram, the stable order of its assignments, and the rank, slot and row of each.

Decides where every routed row is computed, as ``source_routes`` of the core does, by blocks of threads that each own a
*chunk* of consecutive tokens. An assignment's place among those of its expert on this rank is (chunks before) + (warps
before) + (assignments before in the warp's tokens): sums, so that the order is the same in every run. Also writes the
forward kernel's tables where ``worklist`` says what they mean: on the destination, row origins and places; on this
rank, everything else.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from megaflux_kernels.peers import PEER_WORDS, Peer
from megaflux_kernels.planner_map import THREADS, WARPS, PlannerShape
from megaflux_kernels.slots import PlanTables
from megaflux_kernels.sync.device import doubles, words
from megaflux_kernels.tasks import Tasks
from megaflux_kernels.worklist import (
    HEADER_WORDS,
    SOURCE_SHIFT,
    Counters,
    Kind,
    LayerShape,
    Tiling,
    WorkHeader,
    work_bounds,
)

arch = cute.arch


class Batch(NamedTuple):
    """The tokens of this rank: ``ids`` int32 [tokens * k], ``place`` and ``row`` int32 [max_tokens * k] of the map."""

    ids: cute.Tensor
    place: cute.Tensor
    row: cute.Tensor
    num_tokens: Int32


class WorkAddresses(NamedTuple):
    """Int64 addresses of the forward kernel's tables on this rank, and of the table of peers."""

    header: Int64
    tasks: Int64
    transfers: Int64
    counters: Int64
    peers: Int64


class ForwardTables(NamedTuple):
    """What the forward kernel is compiled for; the routes of a planner without one write no tables for it."""

    shape: LayerShape
    tiling: Tiling


class RouteBlock:
    """Device code of one chunk; one instance a shape."""

    def __init__(self, shape: PlannerShape, forward: ForwardTables | None) -> None:
        self.shape, self.search, self.forward = shape, shape.search, forward
        self.tasks = Tasks(forward.shape, forward.tiling) if forward else None
        self.num_words = (
            WARPS * self.search.num_experts
            + self.search.num_experts
            + 1
            + 3 * self.search.num_segments
            + (self.tasks.num_words if self.tasks else 0)
        )

    # ---- chunks ----------------------------------------------------------------------------------------------------

    @cute.jit
    def span(self, chunk: Int32, warp: Int32, num_tokens: Int32):
        """(first token, token after the last) of a warp, and tokens of a chunk; every warp takes whole steps."""
        step = self.shape.tokens_per_step
        a_warp = (num_tokens + self.shape.num_chunks * WARPS - 1) // (self.shape.num_chunks * WARPS)
        a_warp = (a_warp + step - 1) // step * step
        first = (chunk * WARPS + warp) * a_warp
        return first, cutlass.min(first + a_warp, num_tokens), a_warp * WARPS

    @cute.jit
    def count(self, counts: cute.Tensor, batch: Batch, chunk: Int32, tid: Int32):
        """Order the chunk's assignments within their experts.

        Writes ``batch.row`` with the number of earlier assignments of the same expert in the warp's tokens, and
        ``counts`` [warps, E] in shared memory with the assignments of each warp. Ends with a barrier.
        """
        warp, lane, top_k = tid // 32, tid % 32, self.shape.top_k
        for i in cutlass.range(tid, WARPS * self.search.num_experts, THREADS):
            counts[i] = Int32(0)
        arch.sync_threads()
        first, end, _ = self.span(chunk, warp, batch.num_tokens)
        below = Int32(arch.lanemask_lt())
        base = warp * self.search.num_experts
        for token in cutlass.range(first, end, self.shape.tokens_per_step):
            at = token * top_k + lane
            live = (lane < self.shape.tokens_per_step * top_k) & (at < end * top_k)
            expert = -1 - lane  # a lane without an assignment matches nobody
            if live:
                expert = batch.ids[at]
            same = Int32(arch.match_sync(0xFFFFFFFF, expert))
            before = Int32(0)
            if live:
                before = counts[base + expert]
                batch.row[at] = before + arch.popc(same & below)
            arch.sync_warp()
            if live & ((same & below) == 0):
                counts[base + expert] = before + arch.popc(same)
            arch.sync_warp()
        arch.sync_threads()

    @cute.jit
    def sum_warps(self, counts: cute.Tensor, chunk_counts: cute.Tensor, rank_counts: cute.Tensor, tid: Int32):
        """Turn ``counts`` into sums over the warps before; publish the chunk's histogram and add it to the rank's."""
        experts = self.search.num_experts
        for expert in cutlass.range(tid, experts, THREADS):
            total = Int32(0)
            for warp in cutlass.range_constexpr(WARPS):
                num = counts[warp * experts + expert]
                counts[warp * experts + expert] = total
                total += num
            chunk_counts[expert] = total
            if total > 0:
                arch.red(rank_counts.iterator + expert, total, op="add", dtype="s32", sem="relaxed", scope="gpu")

    @cute.jit
    def add_chunks(self, counts: cute.Tensor, all_chunks: cute.Tensor, chunk: Int32, tid: Int32):
        """Add the assignments of earlier chunks, int32 [chunks, E], to ``counts``."""
        experts = self.search.num_experts
        for expert in cutlass.range(tid, experts, THREADS):
            before = Int32(0)
            for earlier in cutlass.range(chunk, unroll=16):
                before += all_chunks[earlier * experts + expert]
            for warp in cutlass.range_constexpr(WARPS):
                counts[warp * experts + expert] = counts[warp * experts + expert] + before

    # ---- routes ----------------------------------------------------------------------------------------------------

    @cute.jit
    def load_plan(self, base, tables: PlanTables, tid: Int32):
        """Add the sources before to ``counts`` and copy the segments behind them; ends with a barrier."""
        experts = self.search.num_experts
        counts = cute.make_tensor(base, cute.make_layout(WARPS * experts))
        first, end, place, start = self.segments(base)
        for expert in cutlass.range(tid, experts, THREADS):
            before = tables.source_base[expert]
            first[expert] = tables.segment_first[expert]
            for warp in cutlass.range_constexpr(WARPS):
                counts[warp * experts + expert] = counts[warp * experts + expert] + before
        num = tables.segment_first[experts]
        if tid == 0:
            first[experts] = num
        for i in cutlass.range(tid, num, THREADS):
            end[i] = tables.segment_end[i]
            place[i] = tables.segment_place[i]
            start[i] = tables.segment_base[i]
        arch.sync_threads()

    def segments(self, base) -> tuple:
        """Views of ``segment_first``, ``_end``, ``_place``, ``_base`` behind the counts in shared memory."""
        experts, segments = self.search.num_experts, self.search.num_segments
        at = WARPS * experts
        views = [cute.make_tensor(base + at, cute.make_layout(experts + 1))]
        at += experts + 1
        for _ in range(3):
            views.append(cute.make_tensor(base + at, cute.make_layout(segments)))
            at += segments
        return tuple(views)

    @cute.jit
    def emit(self, base, batch: Batch, chunk: Int32, source: Int32, peers: Int64, tid: Int32):
        """Destination of every assignment of the chunk, into ``batch`` and into the destinations' tables."""
        experts, top_k, rows = self.search.num_experts, self.shape.top_k, self.search.block_rows
        counts = cute.make_tensor(base, cute.make_layout(WARPS * experts))
        first_segment, segment_end, segment_place, segment_base = self.segments(base)
        warp, lane = tid // 32, tid % 32
        first, end, _ = self.span(chunk, warp, batch.num_tokens)
        for token in cutlass.range(first, end, self.shape.tokens_per_step):
            at = token * top_k + lane
            live = (lane < self.shape.tokens_per_step * top_k) & (at < end * top_k)
            place, row = Int32(-1), Int32(0)
            if live:
                expert = batch.ids[at]
                ordinal = counts[warp * experts + expert] + batch.row[at]
                block = ordinal // rows
                segment, last = first_segment[expert], first_segment[expert + 1] - 1
                while (segment < last) & (block >= segment_end[segment]):
                    segment += 1
                place = segment_place[segment]
                row = (segment_base[segment] + block) * rows + ordinal % rows
                batch.place[at] = place
                batch.row[at] = row
            if const_expr(self.forward is not None):
                self.tell(at, live, place >> 16, row, source, peers, lane)

    @cute.jit
    def tell(self, at: Int32, live: Boolean, rank: Int32, row: Int32, source: Int32, peers: Int64, lane: Int32):
        """Write an assignment's origin and, once for each destination of a token, its places, into the destinations."""
        top_k, table = self.shape.top_k, doubles(peers, PEER_WORDS * self.search.num_ranks)
        group = lane // top_k * top_k
        if live:
            origin = words(table[rank * PEER_WORDS + int(Peer.ROW_SOURCE)] + Int64(row) * 4)
            origin[0] = (source << SOURCE_SHIFT) | at
        leader = Boolean(True)  # no earlier choice of the token goes to the same rank
        for i in cutlass.range_constexpr(top_k):
            that = arch.shuffle_sync(rank, group + i)
            if (that == rank) & (group + i < lane):
                leader = Boolean(False)
        leaders = arch.vote_ballot_sync(leader & live)
        for i in cutlass.range_constexpr(top_k):
            that = arch.shuffle_sync(rank, group + i)
            if live & (((leaders >> ((group + i) & 31)) & 1) != 0):
                here = Int32(-1)
                if that == rank:
                    here = row
                at_places = Int64(source * self.shape.max_tokens * top_k + at) * 4
                places = words(table[that * PEER_WORDS + int(Peer.PLACES)] + at_places)
                places[0] = here

    # ---- tables of this rank ---------------------------------------------------------------------------------------

    @cute.jit
    def own_tables(
        self,
        base,
        tables: PlanTables,
        work: WorkAddresses,
        home_of: cute.Tensor,
        chunk: Int32,
        rank: Int32,
        epoch: Int32,
        tid: Int32,
    ):
        """Header, tasks, transfers, padding rows and zeroed counters of this rank, shared out over its chunks."""
        width, home_slots = self.search.slots_per_rank, self.search.experts_per_rank
        warp, lane = tid // 32, tid % 32
        at = self.num_words - self.tasks.num_words
        prefix = self.tasks.prefix_at(base + at)
        slot_blocks = cute.make_tensor(tables.slot_blocks.iterator + rank * width, cute.make_layout(width))
        self.clear_counters(work, chunk, tid)
        if warp == 0:
            self.tasks.sum_slots(prefix, slot_blocks, lane)
        self.pad_rows(base, tables, work, chunk, rank, tid)
        arch.sync_threads()
        arriving = self.write_transfers(tables, work, home_of, rank, lane, (chunk == 0) & (warp == 0))
        num_groups = prefix.groups[width]
        tasks = doubles(work.tasks, work_bounds(self.forward.shape, self.forward.tiling).max_tasks)
        for group in cutlass.range(chunk * WARPS + warp, num_groups, self.shape.num_chunks * WARPS):
            self.tasks.write_group(prefix, tasks, group, Kind.FC1, arriving, home_slots, lane)
            self.tasks.write_group(prefix, tasks, group, Kind.FC2, arriving, home_slots, lane)
        if (chunk == 0) & (tid == 0):
            header = words(work.header, HEADER_WORDS)
            header[int(WorkHeader.NUM_TASKS)] = prefix.fc1[width] + prefix.fc2[width]
            header[int(WorkHeader.NUM_BLOCKS)] = prefix.blocks[width]
            header[int(WorkHeader.NUM_TRANSFERS)] = tables.transfer_first[rank + 1] - tables.transfer_first[rank]
            header[int(WorkHeader.LAUNCH)] = epoch

    @cute.jit
    def clear_counters(self, work: WorkAddresses, chunk: Int32, tid: Int32):
        """All counters of the forward kernel to zero: it runs after this launch, so no per-launch bases are needed."""
        bounds = work_bounds(self.forward.shape, self.forward.tiling)
        size = Counters(bounds.max_blocks, self.forward.shape.num_replica_slots).size
        counters = words(work.counters, size)
        for i in cutlass.range(chunk * THREADS + tid, size, self.shape.num_chunks * THREADS):
            counters[i] = Int32(0)

    @cute.jit
    def pad_rows(self, base, tables: PlanTables, work: WorkAddresses, chunk: Int32, rank: Int32, tid: Int32):
        """Mark the padding of part-filled blocks that this rank computes; one warp an expert."""
        rows, lane = self.search.block_rows, tid % 32
        first_segment, segment_end, segment_place, segment_base = self.segments(base)
        peers = doubles(work.peers, PEER_WORDS * self.search.num_ranks)
        bounds = work_bounds(self.forward.shape, self.forward.tiling)
        row_source = words(peers[rank * PEER_WORDS + int(Peer.ROW_SOURCE)], bounds.max_rows)
        step = self.shape.num_chunks * WARPS
        for expert in cutlass.range(chunk * WARPS + tid // 32, self.search.num_experts, step):
            num = tables.expert_rows[expert]
            if num % rows > 0:
                block, segment, last = num // rows, first_segment[expert], first_segment[expert + 1] - 1
                while (segment < last) & (block >= segment_end[segment]):
                    segment += 1
                if (segment_place[segment] >> 16) == rank:
                    start = (segment_base[segment] + block) * rows
                    for row in cutlass.range(num % rows + lane, rows, 32):
                        row_source[start + row] = Int32(-1)

    @cute.jit
    def write_transfers(
        self, tables: PlanTables, work: WorkAddresses, home_of: cute.Tensor, rank: Int32, lane: Int32, writes: Boolean
    ):
        """(source rank, source slot, destination slot, expert) of this rank's transfers; one warp ``writes`` them.

        Returns:
            Bit i: replica slot i's weights arrive in this launch.
        """
        first, end = tables.transfer_first[rank], tables.transfer_first[rank + 1]
        arriving, slot = Int32(0), Int32(0)
        if first + lane < end:
            expert = tables.transfers[3 * (first + lane)]
            slot = tables.transfers[3 * (first + lane) + 2]
            arriving = Int32(1) << slot
            if writes:
                row = words(work.transfers + 16 * Int64(lane), 4)
                home = home_of[expert]
                row[0] = home // self.search.experts_per_rank
                row[1] = home % self.search.experts_per_rank
                row[2] = self.search.experts_per_rank + slot
                row[3] = expert
        return arch.warp_redux_sync(arriving, "or")


__all__ = ["Batch", "ForwardTables", "RouteBlock", "WorkAddresses"]
