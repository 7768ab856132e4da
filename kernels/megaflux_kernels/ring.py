"""The task ring: one lane of every cluster claims task words and posts them to the warps of all its CTAs.

A ring of two words in shared memory lets the load warp run one task ahead of the matrix warps. Decides who claims and
when; does not know what a task computes.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from megaflux_kernels import ptx
from megaflux_kernels.launch import Buffers, Place, Ranks, Tables, wait_budget
from megaflux_kernels.sync.device import doubles, words
from megaflux_kernels.worklist import Counters, Kind, LayerShape, Tiling, WorkHeader

arch = cute.arch
RING_WORDS = 2
READERS = 10
"""Warps of each CTA that free a slot: the load warp, the store warp and eight matrix warps."""


class Ring(NamedTuple):
    """Shared-memory pointers: the words, and the barriers that fill and free them."""

    words: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def advance(index, phase, size):
    """Next (index, phase) of a ring of ``size`` slots."""
    index += 1
    if index == size:
        index = Int32(0)
        phase ^= 1
    return index, phase


class Task(NamedTuple):
    """A task of this CTA, uniform over the warp; see ``worklist.pack_task``."""

    block: Int32
    tile: Int32
    slot: Int32
    kind: Int32
    log_width: Int32
    gated: Int32


@cute.jit
def take_task(ring: Ring, index, phase, place: Place):
    """(next task of this warp, next index, next phase) from the warp's position in the ring."""
    arch.mbarrier_wait(ring.full + index, phase)
    word = arch.load(ring.words + index, Int64)
    arch.sync_warp()
    if place.lane == 0:
        arch.mbarrier_arrive(ring.empty + index, 0)  # the first CTA's scheduler claims for all
    index, phase = advance(index, phase, RING_WORDS)
    low = arch.make_warp_uniform(Int32(word & 0xFFFFFFFF))
    high = arch.make_warp_uniform(Int32(word >> 32))
    log_width = (high >> 26) & 3
    task = Task(
        block=(low & 0xFFFFFF) + (place.member & ((1 << log_width) - 1)),
        tile=(((low >> 24) & 0xFF) | ((high & 0xFF) << 8)) + (place.member >> log_width),
        slot=(high >> 8) & 0xFFFF,
        kind=(high >> 24) & 3,
        log_width=log_width,
        gated=(high >> 28) & 1,
    )
    return task, index, phase


@cute.jit
def post_task(ring: Ring, index, word, cluster: cutlass.Constexpr):
    """Put a word into slot ``index`` of the rings of all CTAs of the cluster."""
    for cta in range_constexpr(cluster):
        arch.mbarrier_arrive_and_expect_tx(ring.full + index, 8, cta)
        halves = (Int32(word & 0xFFFFFFFF), Int32(word >> 32))
        arch.store_async_dsmem(ring.words + index, halves, ring.full + index, cta)


class Scheduler:
    """The lane that claims.

    Args:
        shape: the layer.
        tiling: tiles and clusters.
        load_warp: knows what a word waits for.
    """

    def __init__(self, shape: LayerShape, tiling: Tiling, load_warp) -> None:
        self.shape, self.tiling, self.load_warp = shape, tiling, load_warp

    @cute.jit
    def run(self, ring: Ring, tables: Tables, buffers: Buffers, ranks: Ranks):
        """Claim words in stream order until none is left, then post the end. Called by one lane of the first CTA.

        A word is claimed only when a slot is free, late enough for the last tasks to go where there is room.
        """
        claims = words(tables.counters).iterator + Counters.TASK_QUEUE
        num_tasks = arch.load(words(tables.header).iterator + int(WorkHeader.NUM_TASKS), Int32)
        index, phase, budget = Int32(0), Int32(0), 2 * wait_budget(ranks)
        claimed = arch.atomic_add(claims, Int32(1), sem="relaxed", scope="gpu")
        while claimed < num_tasks:
            word = arch.load(doubles(tables.tasks).iterator + claimed, Int64)
            prefetch_weights(word, buffers, self.shape, self.tiling)
            if const_expr(self.tiling.ahead):
                budget = self.load_warp.await_word(word, tables.counters, ranks, budget)
            arch.mbarrier_wait(ring.empty + index, phase ^ 1)
            post_task(ring, index, word, self.tiling.cluster)
            index, phase = advance(index, phase, RING_WORDS)
            arch.mbarrier_wait(ring.empty + index, phase ^ 1)
            claimed = arch.atomic_add(claims, Int32(1), sem="relaxed", scope="gpu")
        arch.mbarrier_wait(ring.empty + index, phase ^ 1)
        post_task(ring, index, Int64(int(Kind.END) << 56), self.tiling.cluster)


@cute.jit
def prefetch_weights(word, buffers: Buffers, shape: cutlass.Constexpr, tiling: cutlass.Constexpr):
    """Bring the weights of a word that leads into L2, unless they are still arriving."""
    if const_expr(tiling.prefetch):
        columns, row = tiling.tile_columns, 2 * shape.hidden
        low, high = Int32(word & 0xFFFFFFFF), Int32(word >> 32)
        if (high >> 28) & 3 == 2:
            slot, tile = Int64((high >> 8) & 0xFFFF), ((low >> 24) & 0xFF) | ((high & 0xFF) << 8)
            tiles = tiling.cluster >> ((high >> 26) & 3)
            if (high >> 24) & 3 == int(Kind.FC1):
                first, end = tile * (columns // 2), (tile + tiles) * (columns // 2)
                gate = buffers.w1 + slot * (2 * shape.intermediate * row)
                prefetch_rows(gate, first, cutlass.min(end, Int32(shape.intermediate)), row)
                up = gate + shape.intermediate * row
                prefetch_rows(up, first, cutlass.min(end, Int32(shape.intermediate)), row)
            else:
                first, end = tile * columns, cutlass.min((tile + tiles) * columns, Int32(shape.hidden))
                base = buffers.w2 + slot * (shape.intermediate * row)
                prefetch_rows(base, first, end, 2 * shape.intermediate)


@cute.jit
def prefetch_rows(base: Int64, first, end, row_bytes: cutlass.Constexpr):
    """Rows ``first`` to ``end``, a multiple of 8 of them, into L2."""
    for row in cutlass.range(first, end, 8, unroll=1):
        ptx.prefetch(base + Int64(row) * row_bytes, 8 * row_bytes)


__all__ = ["READERS", "RING_WORDS", "Ring", "Scheduler", "Task", "advance", "post_task", "take_task"]
