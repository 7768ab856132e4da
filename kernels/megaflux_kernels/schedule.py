"""The scheduler warp: one lane of every pair of CTAs claims task words and posts them when their inputs are there.

Decides who claims and when; does not know what a task computes. It runs a task ahead of the load warps, so that these
need not look at counters, which takes half a microsecond a task even where nothing is late.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from megaflux_kernels.launch import Ranks, Tables, wait_budget
from megaflux_kernels.loads import LoadWarp
from megaflux_kernels.ring import RING_WORDS, Ring, advance, post_task
from megaflux_kernels.sync.device import doubles, words
from megaflux_kernels.worklist import Counters, Kind, Tiling, WorkHeader

arch = cute.arch


class Scheduler:
    """Scheduler of one layer shape.

    Args:
        load_warp: knows what a word waits for.
        tiling: launch choices.
    """

    def __init__(self, load_warp: LoadWarp, tiling: Tiling) -> None:
        self.load_warp, self.ahead = load_warp, tiling.ahead

    @cute.jit
    def run(self, ring: Ring, tables: Tables, ranks: Ranks):
        """Claim words in stream order until none is left, then post the end. Called by one lane of the first CTA.

        A word is claimed only when a slot is free, late enough for the last tasks to go where there is room.
        """
        claims = words(tables.counters).iterator + Counters.TASK_QUEUE
        num_tasks = arch.load(words(tables.header).iterator + int(WorkHeader.NUM_TASKS), Int32)
        index, phase, budget = Int32(0), Int32(0), 2 * wait_budget(ranks)
        claimed = arch.atomic_add(claims, Int32(1), sem="relaxed", scope="gpu")
        while claimed < num_tasks:
            word = arch.load(doubles(tables.tasks).iterator + claimed, Int64)
            if const_expr(self.ahead):
                budget = self.load_warp.await_word(word, tables.counters, ranks, budget)
            arch.mbarrier_wait(ring.empty + index, phase ^ 1)
            post_task(ring, index, word)
            index, phase = advance(index, phase, RING_WORDS)
            arch.mbarrier_wait(ring.empty + index, phase ^ 1)
            claimed = arch.atomic_add(claims, Int32(1), sem="relaxed", scope="gpu")
        arch.mbarrier_wait(ring.empty + index, phase ^ 1)
        post_task(ring, index, Int64(int(Kind.END) << 56))


__all__ = ["Scheduler"]
