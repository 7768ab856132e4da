"""The task ring: words in shared memory by which the scheduler tells the warps of a pair of CTAs what comes next.

A ring of two words lets the load warp run one task ahead of the matrix warps. Decides how words are posted, taken and
freed; does not know who claims them (``schedule.py``) or what a task computes.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from megaflux_kernels.launch import Place
from megaflux_kernels.worklist import CLUSTER

arch = cute.arch
RING_WORDS = 2
READERS = 10 * CLUSTER
"""Warps that free a slot: of each CTA the load warp, the store warp and eight matrix warps."""


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
    share_rows: Int32
    gated: Int32


@cute.jit
def take_task(ring: Ring, index, phase, place: Place):
    """(next task of this warp, next index, next phase) from the warp's position in the ring."""
    arch.mbarrier_wait(ring.full + index, phase)
    word = arch.load(ring.words + index, Int64)
    arch.sync_warp()
    if place.lane == 0:
        arch.mbarrier_arrive(ring.empty + index, 0)  # the first CTA's scheduler claims for both
    index, phase = advance(index, phase, RING_WORDS)
    low, high = arch.make_warp_uniform(Int32(word & 0xFFFFFFFF)), arch.make_warp_uniform(Int32(word >> 32))
    return unpack_task(low, high, place.member), index, phase


@cute.jit
def unpack_task(low, high, member):
    """The task of one CTA of the cluster in the halves of a word."""
    share_rows = (high >> 26) & 1
    return Task(
        block=(low & 0xFFFFFF) + member * (1 - share_rows),
        tile=(((low >> 24) & 0xFF) | ((high & 0xFF) << 8)) + member * share_rows,
        slot=(high >> 8) & 0xFFFF,
        kind=(high >> 24) & 3,
        share_rows=share_rows,
        gated=(high >> 27) & 1,
    )


@cute.jit
def post_task(ring: Ring, index, word):
    """Put a word into slot ``index`` of both CTAs' rings."""
    for cta in range_constexpr(CLUSTER):
        arch.mbarrier_arrive_and_expect_tx(ring.full + index, 8, cta)
        halves = (Int32(word & 0xFFFFFFFF), Int32(word >> 32))
        arch.store_async_dsmem(ring.words + index, halves, ring.full + index, cta)


__all__ = ["READERS", "RING_WORDS", "Ring", "Task", "advance", "post_task", "take_task"]
