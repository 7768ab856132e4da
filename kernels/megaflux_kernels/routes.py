"""Routes of one source rank: its histogram, the stable order of its assignments, and the rank, slot and row of each.

Decides where every routed row is computed, as ``source_routes`` of the core does, by blocks of threads that each own a
*chunk* of consecutive tokens. An assignment's ordinal among the rows of its expert is (rows of earlier sources) +
(earlier chunks) + (earlier passes) + (earlier warps) + (earlier in the warp's tokens): sums, so that the order is the
same in every run. A chunk is routed in passes that fit shared memory; the first is ordered while the plan is made.

Origins of rows are gathered by expert before they are stored: those of an expert lie side by side in the destination's
pool, so that a store of 32 lanes is a few runs and not 32 words all over a peer's memory. Places are stored rank by
rank, all tokens of a warp at once. What the tables mean is said in ``worklist``.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from megaflux_kernels.own_tables import ForwardTables, Segments
from megaflux_kernels.peers import PEER_WORDS, Peer
from megaflux_kernels.planner_map import THREADS, WARPS, PlannerShape
from megaflux_kernels.slots import PlanTables
from megaflux_kernels.sync.device import doubles, words
from megaflux_kernels.worklist import SOURCE_SHIFT

arch = cute.arch

LOADS = 8
"""Ids that a thread loads before it counts them."""


class Batch(NamedTuple):
    """The tokens of this rank: ``ids`` int32 [tokens * k], ``place`` and ``row`` int32 [max_tokens * k] of the map."""

    ids: cute.Tensor
    place: cute.Tensor
    row: cute.Tensor
    num_tokens: Int32


class RouteScratch(NamedTuple):
    """Shared memory of a chunk, int32; "the pass" is the tokens at work.

    ``before`` [warps, E] assignments of an expert by earlier warps of the pass; ``base`` [E] ordinal of the pass's
    first; ``num`` [E] assignments of the pass; ``position`` [E] where they begin among the gathered; ``cursor`` [1]
    gathered so far; ``ranked`` [pass] of every assignment, expert << 16 | earlier ones in the warp; ``rows``,
    ``origins`` [pass] of the gathered, row in the pool and destination rank << 16 | assignment within the pass.
    """

    before: cute.Tensor
    base: cute.Tensor
    num: cute.Tensor
    position: cute.Tensor
    cursor: cute.Tensor
    ranked: cute.Tensor
    rows: cute.Tensor
    origins: cute.Tensor


class RouteBlock:
    """Device code of one chunk; one instance a shape. Needs ``num_words`` words of shared memory."""

    def __init__(self, shape: PlannerShape, forward: ForwardTables | None) -> None:
        self.shape, self.search, self.forward = shape, shape.search, forward
        experts, segments, choices = (
            shape.search.num_experts,
            shape.search.num_segments,
            shape.pass_tokens * shape.top_k,
        )
        gathered = choices if forward else 1
        self.scratch_sizes = (WARPS * experts, experts, experts, experts, 1, choices, gathered, gathered)
        self.segment_sizes = (experts + 1, segments, segments, segments)
        self.num_words = sum(self.scratch_sizes) + sum(self.segment_sizes)

    def views(self, base) -> tuple[RouteScratch, Segments]:
        """The tensors in shared memory at ``base``."""
        at, groups = 0, []
        for kind, sizes in ((RouteScratch, self.scratch_sizes), (Segments, self.segment_sizes)):
            fields = []
            for size in sizes:
                fields.append(cute.make_tensor(base + at, cute.make_layout(size)))
                at += size
            groups.append(kind(*fields))
        return groups[0], groups[1]

    # ---- histogram -------------------------------------------------------------------------------------------------

    @cute.jit
    def span(self, chunk: Int32, num_tokens: Int32):
        """(first token, token after the last) of a chunk; chunks are whole steps of a warp."""
        step, chunks = self.shape.tokens_per_step, self.shape.num_chunks
        each = ((num_tokens + chunks - 1) // chunks + step - 1) // step * step
        return cutlass.min(chunk * each, num_tokens), cutlass.min((chunk + 1) * each, num_tokens)

    @cute.jit
    def count(self, base, batch: Batch, chunk: Int32, chunk_counts: cute.Tensor, rank_counts: cute.Tensor, tid: Int32):
        """Write the chunk's histogram, int32 [E], and add it to the rank's; ends with a barrier."""
        sc, _ = self.views(base)
        for expert in cutlass.range(tid, self.search.num_experts, THREADS):
            sc.num[expert] = Int32(0)
        arch.sync_threads()
        first, end = self.span(chunk, batch.num_tokens)
        end = end * self.shape.top_k
        for at in cutlass.range(first * self.shape.top_k + tid, end, LOADS * THREADS):
            experts = []
            for i in cutlass.range_constexpr(LOADS):
                experts.append(batch.ids[cutlass.min(at + i * THREADS, end - 1)])
            for i in cutlass.range_constexpr(LOADS):
                if at + i * THREADS < end:
                    arch.atomic_add(sc.num.iterator + experts[i], Int32(1), sem="relaxed", scope="cta")
        arch.sync_threads()
        for expert in cutlass.range(tid, self.search.num_experts, THREADS):
            num = sc.num[expert]
            chunk_counts[expert] = num
            if num > 0:
                arch.red(rank_counts.iterator + expert, num, op="add", dtype="s32", sem="relaxed", scope="gpu")
        arch.sync_threads()

    @cute.jit
    def add_chunks(self, base, all_chunks: cute.Tensor, chunk: Int32, tid: Int32):
        """Begin ``base`` with the assignments of earlier chunks, int32 [chunks, E]."""
        sc, _ = self.views(base)
        experts = self.search.num_experts
        for expert in cutlass.range(tid, experts, THREADS):
            before = Int32(0)
            for earlier in cutlass.range(chunk, unroll=16):
                before += all_chunks[earlier * experts + expert]
            sc.base[expert] = before

    # ---- order -----------------------------------------------------------------------------------------------------

    @cute.jit
    def pass_span(self, batch: Batch, chunk: Int32, index: Int32):
        """(first token, token after the last) of a pass of the chunk, empty beyond the chunk's last."""
        first, end = self.span(chunk, batch.num_tokens)
        first = cutlass.min(first + index * self.shape.pass_tokens, end)
        return first, cutlass.min(first + self.shape.pass_tokens, end)

    @cute.jit
    def warp_span(self, first: Int32, end: Int32, warp: Int32):
        """(first token, token after the last) of a warp's share of a pass; every warp takes whole steps."""
        step = self.shape.tokens_per_step
        each = ((end - first + WARPS - 1) // WARPS + step - 1) // step * step
        return first + warp * each, cutlass.min(first + (warp + 1) * each, end)

    @cute.jit
    def choice(self, batch: Batch, token: Int32, end: Int32, lane: Int32):
        """Expert of this lane's assignment in the step at ``token``, below zero and unlike any other if it has none."""
        at, expert = token * self.shape.top_k + lane, -1 - lane
        if (lane < self.shape.tokens_per_step * self.shape.top_k) & (at < end * self.shape.top_k):
            expert = batch.ids[at]
        return expert

    @cute.jit
    def order(self, base, batch: Batch, chunk: Int32, index: Int32, tid: Int32):
        """Rank the assignments of a pass within their experts; begins and ends with a barrier."""
        sc, _ = self.views(base)
        experts, warp, lane, step = self.search.num_experts, tid // 32, tid % 32, self.shape.tokens_per_step
        arch.sync_threads()
        for i in cutlass.range(tid, WARPS * experts, THREADS):
            sc.before[i] = Int32(0)
        if tid == 0:
            sc.cursor[0] = Int32(0)
        arch.sync_threads()
        pass_first, pass_end = self.pass_span(batch, chunk, index)
        first, end = self.warp_span(pass_first, pass_end, warp)
        below, row = Int32(arch.lanemask_lt()), warp * experts
        upcoming = self.choice(batch, first, end, lane)
        for token in cutlass.range(first, end, step):
            expert = upcoming
            upcoming = self.choice(batch, token + step, end, lane)
            same = Int32(arch.match_sync(0xFFFFFFFF, expert))
            earlier, before = arch.popc(same & below), Int32(0)
            if expert >= 0:
                before = sc.before[row + expert]
                sc.ranked[(token - pass_first) * self.shape.top_k + lane] = (expert << 16) | (before + earlier)
            arch.sync_warp()
            if (expert >= 0) & (earlier == 0):
                sc.before[row + expert] = before + arch.popc(same)
            arch.sync_warp()
        arch.sync_threads()
        for expert in cutlass.range(tid, experts, THREADS):
            total = Int32(0)
            for earlier in cutlass.range_constexpr(WARPS):
                num = sc.before[earlier * experts + expert]
                sc.before[earlier * experts + expert] = total
                total += num
            sc.num[expert] = total
            if const_expr(self.forward is not None):
                sc.position[expert] = arch.atomic_add(sc.cursor.iterator, total, sem="relaxed", scope="cta")
        arch.sync_threads()

    # ---- routes ----------------------------------------------------------------------------------------------------

    @cute.jit
    def load_plan(self, base, tables: PlanTables, tid: Int32):
        """Add the sources before to ``base`` and copy the segments; a barrier must follow."""
        sc, segments = self.views(base)
        experts = self.search.num_experts
        for expert in cutlass.range(tid, experts + 1, THREADS):
            segments.first[expert] = tables.segment_first[expert]
        for expert in cutlass.range(tid, experts, THREADS):
            sc.base[expert] = sc.base[expert] + tables.source_base[expert]
        for i in cutlass.range(tid, self.search.num_segments, THREADS):  # words beyond the last segment are not used
            segments.end[i] = tables.segment_end[i]
            segments.place[i] = tables.segment_place[i]
            segments.start[i] = tables.segment_base[i]

    @cute.jit
    def load_peers(self, addresses: cute.Tensor, peers: Int64, tid: Int32):
        """Copy every rank's table addresses to shared memory, int64 [2, P]: origins of rows, places."""
        ranks = self.search.num_ranks
        table = doubles(peers, PEER_WORDS * ranks)
        for rank in cutlass.range(tid, ranks, THREADS):
            addresses[rank] = table[rank * PEER_WORDS + int(Peer.ROW_SOURCE)]
            addresses[ranks + rank] = table[rank * PEER_WORDS + int(Peer.PLACES)]

    @cute.jit
    def write(self, base, addresses: cute.Tensor, batch: Batch, chunk: Int32, source: Int32, tid: Int32):
        """Routes of the chunk, its first pass ordered, into ``batch`` and into the destinations' tables."""
        sc, _ = self.views(base)
        first, end = self.span(chunk, batch.num_tokens)
        num_passes = (end - first + self.shape.pass_tokens - 1) // self.shape.pass_tokens
        for index in cutlass.range(num_passes):
            if index > 0:
                for expert in cutlass.range(tid, self.search.num_experts, THREADS):
                    sc.base[expert] = sc.base[expert] + sc.num[expert]
                self.order(base, batch, chunk, index, tid)
            self.assign(base, addresses, batch, chunk, index, source, tid)
            arch.sync_threads()
            if const_expr(self.forward is not None):
                self.store_origins(base, addresses, batch, chunk, index, source, tid)

    @cute.jit
    def assign(self, base, addresses: cute.Tensor, batch: Batch, chunk: Int32, index: Int32, source: Int32, tid: Int32):
        """Place and row of every assignment of a pass; places into the destinations, origins gathered by expert."""
        sc, segments = self.views(base)
        experts, top_k, rows = self.search.num_experts, self.shape.top_k, self.search.block_rows
        warp, lane = tid // 32, tid % 32
        pass_first, pass_end = self.pass_span(batch, chunk, index)
        first, end = self.warp_span(pass_first, pass_end, warp)
        for token in cutlass.range(first, end, self.shape.tokens_per_step):
            at, local = token * top_k + lane, (token - pass_first) * top_k + lane
            live = (lane < self.shape.tokens_per_step * top_k) & (at < end * top_k)
            place, row = Int32(-1) << 16, Int32(0)
            if live:
                ranked = sc.ranked[local]
                expert = ranked >> 16
                nth = sc.before[warp * experts + expert] + (ranked & 0xFFFF)
                ordinal = sc.base[expert] + nth
                segment = segments.find(expert, ordinal // rows)
                place = segments.place[segment]
                row = segments.start[segment] * rows + ordinal
                batch.place[at] = place
                batch.row[at] = row
                if const_expr(self.forward is not None):
                    position = sc.position[expert] + nth
                    sc.rows[position] = row
                    sc.origins[position] = (place & -65536) | local
            if const_expr(self.forward is not None):
                self.store_places(addresses, at, live, place >> 16, row, source, lane)

    @cute.jit
    def store_places(
        self, addresses: cute.Tensor, at: Int32, live: Boolean, rank: Int32, row: Int32, source: Int32, lane: Int32
    ):
        """Write the places of a warp's tokens, one rank after another: -1 for a token's choices that go elsewhere."""
        top_k = self.shape.top_k
        group, mask = lane // top_k * top_k, (1 << top_k) - 1
        offset = Int64(source * self.shape.max_tokens * top_k + at) * 4
        places = cute.make_tensor(addresses.iterator + self.search.num_ranks, cute.make_layout(self.search.num_ranks))
        todo = arch.vote_ballot_sync(live)
        while todo != 0:
            that = arch.shuffle_sync(rank, 31 - arch.clz(todo))
            same = arch.vote_ballot_sync(rank == that)
            here = Int32(-1)
            if rank == that:
                here = row
            if live & (((same >> group) & mask) != 0):
                target = words(places[that] + offset)
                target[0] = here
            todo = todo & ~same

    @cute.jit
    def store_origins(
        self, base, addresses: cute.Tensor, batch: Batch, chunk: Int32, index: Int32, source: Int32, tid: Int32
    ):
        """Write the gathered origins of a pass into the destinations."""
        sc, _ = self.views(base)
        first, end = self.pass_span(batch, chunk, index)
        at = (source << SOURCE_SHIFT) + first * self.shape.top_k
        for i in cutlass.range(tid, (end - first) * self.shape.top_k, THREADS, unroll=4):
            origin = sc.origins[i]
            target = words(addresses[origin >> 16] + Int64(sc.rows[i]) * 4)
            target[0] = at + (origin & 0xFFFF)


__all__ = ["Batch", "RouteBlock"]
