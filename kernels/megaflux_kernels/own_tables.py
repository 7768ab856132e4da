"""A rank's own part of the forward kernel's tables: header, tasks, transfers, padding rows and zeroed counters.

Decides how a rank's chunks share the writing; ``worklist`` says what the tables mean, ``tasks`` what a task word is.
Knows nothing of tokens: origins and places of rows are in ``routes``.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from megaflux_kernels.peers import PEER_WORDS, Peer
from megaflux_kernels.planner_map import THREADS, WARPS, PlannerShape
from megaflux_kernels.slots import PlanTables
from megaflux_kernels.sync.device import doubles, words
from megaflux_kernels.tasks import TaskPrefix, Tasks
from megaflux_kernels.worklist import (
    HEADER_WORDS,
    Counters,
    Kind,
    LayerShape,
    Tiling,
    WorkHeader,
    work_bounds,
)

arch = cute.arch


class ForwardTables(NamedTuple):
    """What the forward kernel is compiled for; the routes of a planner without one write no tables for it."""

    shape: LayerShape
    tiling: Tiling


class WorkAddresses(NamedTuple):
    """Int64 addresses of the forward kernel's tables on this rank, and of the table of peers."""

    header: Int64
    tasks: Int64
    transfers: Int64
    counters: Int64
    peers: Int64


class Segments(NamedTuple):
    """The plan's segments, int32 in shared memory: ``first`` [E + 1]; ``end``, ``place``, ``start`` [segments].

    Segment i of an expert's ``first[e]`` to ``first[e + 1]`` holds its blocks below ``end[i]`` that no earlier one has,
    on ``place[i]`` = rank << 16 | slot; block b of the expert is block ``start[i] + b`` of the rank's pool.
    """

    first: cute.Tensor
    end: cute.Tensor
    place: cute.Tensor
    start: cute.Tensor

    def find(self, expert: Int32, block: Int32):
        """The segment that holds a block of an expert."""
        return find_segment(self.first, self.end, expert, block)


@cute.jit
def find_segment(first: cute.Tensor, end: cute.Tensor, expert: Int32, block: Int32):
    """``Segments.find``."""
    segment, last = first[expert], first[expert + 1] - 1
    while (segment < last) & (block >= end[segment]):
        segment += 1
    return segment


class OwnTables:
    """Device code of one chunk's share; one instance a shape. Needs ``num_words`` words of shared memory."""

    def __init__(self, shape: PlannerShape, forward: ForwardTables) -> None:
        self.shape, self.search, self.forward = shape, shape.search, forward
        self.tasks = Tasks(forward.shape, forward.tiling)
        self.bounds = work_bounds(forward.shape, forward.tiling)
        self.num_words = self.tasks.num_words + 1

    def share(self, chunk: Int32, tid: Int32, warp: int):
        """(first item, step) of this warp's share of a list: one item a chunk for ``warp``, then one for that before.

        Lists begin at different warps from the last down: a small batch keeps the first ones busy with its routes.
        """
        turn = (warp + WARPS - tid // 32) % WARPS
        return turn * self.shape.num_chunks + chunk, self.shape.num_chunks * WARPS

    @cute.jit
    def prepare(
        self, base, tables: PlanTables, work: WorkAddresses, home_of: cute.Tensor, chunk: Int32, rank: Int32, tid: Int32
    ):
        """Transfers, and what ``write`` reads after a barrier: sums over the slots, which replicas arrive.

        Args:
            base: shared-memory pointer to int32 [num_words].
            tables: the plan.
            work: where to write.
            home_of: int32 [E], home slot of every expert.
            chunk: this block's chunk; chunk 0 writes the transfers.
            rank: this rank.
            tid: thread index.
        """
        width, warp, lane, ready = self.search.slots_per_rank, tid // 32, tid % 32, self.arriving(base)
        if warp == WARPS - 1:
            slot_blocks = cute.make_tensor(tables.slot_blocks.iterator + rank * width, cute.make_layout(width))
            self.tasks.sum_slots(self.tasks.prefix_at(base), slot_blocks, lane)
        if warp == WARPS - 2:
            arriving = self.write_transfers(tables, work, home_of, rank, lane, chunk == 0)
            if lane == 0:
                ready[0] = arriving

    def arriving(self, base):
        """int32 [1] in shared memory, bit i: replica slot i's weights arrive in this launch."""
        return cute.make_tensor(base + self.tasks.num_words, cute.make_layout(1))

    @cute.jit
    def write(
        self,
        base,
        segments: Segments,
        tables: PlanTables,
        work: WorkAddresses,
        chunk: Int32,
        rank: Int32,
        epoch: Int32,
        tid: Int32,
    ):
        """Tasks, padding rows and header of this rank, shared out over its chunks; has no barrier.

        Args:
            base: as ``prepare`` left it.
            segments: the plan's segments.
            tables: the plan.
            work: where to write.
            chunk: this block's chunk.
            rank: this rank.
            epoch: launch number.
            tid: thread index.
        """
        width = self.search.slots_per_rank
        prefix, arriving = self.tasks.prefix_at(base), self.arriving(base)[0]
        tasks = doubles(work.tasks, self.bounds.max_tasks)
        self.write_groups(prefix, tasks, Kind.FC1, arriving, chunk, tid)
        self.write_groups(prefix, tasks, Kind.FC2, arriving, chunk, tid)
        self.pad_rows(segments, tables, work, chunk, rank, tid)
        if (chunk == 0) & (tid == THREADS - 1):
            header = words(work.header, HEADER_WORDS)
            header[int(WorkHeader.NUM_TASKS)] = prefix.fc1[width] + prefix.fc2[width]
            header[int(WorkHeader.NUM_BLOCKS)] = prefix.blocks[width]
            header[int(WorkHeader.NUM_TRANSFERS)] = tables.transfer_first[rank + 1] - tables.transfer_first[rank]
            header[int(WorkHeader.LAUNCH)] = epoch

    @cute.jit
    def write_groups(
        self,
        prefix: TaskPrefix,
        tasks: cute.Tensor,
        kind: cutlass.Constexpr,
        arriving: Int32,
        chunk: Int32,
        tid: Int32,
    ):
        """Words of one product, one warp a group."""
        first, step = self.share(chunk, tid, WARPS - 1 - int(kind))
        for group in cutlass.range(first, prefix.groups[self.search.slots_per_rank], step):
            self.tasks.write_group(prefix, tasks, group, kind, arriving, self.search.experts_per_rank, tid % 32)

    @cute.jit
    def clear_counters(self, work: WorkAddresses, chunk: Int32, tid: Int32):
        """All counters of the forward kernel to zero: it runs after this launch, so no per-launch bases are needed."""
        size = Counters(self.bounds.max_blocks, self.forward.shape.num_replica_slots).size
        counters = words(work.counters, size)
        for i in cutlass.range(chunk * THREADS + tid, size, self.shape.num_chunks * THREADS):
            counters[i] = Int32(0)

    @cute.jit
    def pad_rows(
        self, segments: Segments, tables: PlanTables, work: WorkAddresses, chunk: Int32, rank: Int32, tid: Int32
    ):
        """Mark the padding of part-filled blocks that this rank computes; one warp an expert."""
        rows, lane = self.search.block_rows, tid % 32
        peers = doubles(work.peers, PEER_WORDS * self.search.num_ranks)
        row_source = words(peers[rank * PEER_WORDS + int(Peer.ROW_SOURCE)], self.bounds.max_rows)
        first, step = self.share(chunk, tid, WARPS - 3)
        for expert in cutlass.range(first, self.search.num_experts, step):
            num = tables.expert_rows[expert]
            if num % rows > 0:
                block = num // rows
                segment = segments.find(expert, block)
                if (segments.place[segment] >> 16) == rank:
                    start = (segments.start[segment] + block) * rows
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


__all__ = ["ForwardTables", "OwnTables", "Segments", "WorkAddresses"]
