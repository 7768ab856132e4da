"""The scheduler warp: one lane of every pair of CTAs claims task words, waits for their inputs and posts them.

Decides when a task may begin: rows or activations of its block have been counted and, for a gated task, the weights of
its slot. It runs a task ahead of the load warps, so that these do not wait for a counter's acquire, which takes half a
microsecond a task even where nothing is late. Does not know what a task computes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from megaflux_kernels.launch import TRACE_WORDS, Place, Ranks, Tables, wait_budget, wait_counter
from megaflux_kernels.layout import Wait
from megaflux_kernels.ring import RING_WORDS, Ring, advance, post_task, unpack_task
from megaflux_kernels.sync.device import doubles, words
from megaflux_kernels.worklist import CLUSTER, Counters, Kind, LayerShape, Tiling, WorkHeader

arch = cute.arch


class Scheduler:
    """Scheduler of one layer shape.

    Args:
        shape: the layer.
        tiling: tiles of a task.
        counters: offsets of the counters.
        trace: add up the time spent waiting.
    """

    def __init__(self, shape: LayerShape, tiling: Tiling, counters: Counters, trace: bool) -> None:
        self.shape, self.counters, self.trace = shape, counters, trace
        self.fc1_tiles = tiling.fc1_tiles(shape)

    @cute.jit
    def run(self, ring: Ring, place: Place, tables: Tables, ranks: Ranks, trace: Int64):
        """Claim words in stream order until none is left, then post the end. Called by one lane of the first CTA.

        A word is claimed only when a slot is free, late enough for the last tasks to go where there is room.
        """
        claims = words(tables.counters).iterator + Counters.TASK_QUEUE
        num_tasks = arch.load(words(tables.header).iterator + int(WorkHeader.NUM_TASKS), Int32)
        index, phase = Int32(0), Int32(0)
        budget = 2 * wait_budget(ranks)  # the wait for another rank, if that is the cause, fails first
        fc1_wait, fc2_wait, since = Int64(0), Int64(0), Int64(0)
        claimed = arch.atomic_add(claims, Int32(1), sem="relaxed", scope="gpu")
        while claimed < num_tasks:
            word = arch.load(doubles(tables.tasks).iterator + claimed, Int64)
            low, high = Int32(word & 0xFFFFFFFF), Int32(word >> 32)
            if const_expr(self.trace):
                since = arch.globaltimer()
            for member in cutlass.range(CLUSTER, unroll=1):
                budget = self.wait_for_inputs(tables.counters, unpack_task(low, high, member), ranks, budget)
            if const_expr(self.trace):
                since = arch.globaltimer() - since
                if unpack_task(low, high, 0).kind == int(Kind.FC1):
                    fc1_wait += since
                else:
                    fc2_wait += since
            arch.mbarrier_wait(ring.empty + index, phase ^ 1)
            post_task(ring, index, word)
            index, phase = advance(index, phase, RING_WORDS)
            arch.mbarrier_wait(ring.empty + index, phase ^ 1)
            claimed = arch.atomic_add(claims, Int32(1), sem="relaxed", scope="gpu")
        arch.mbarrier_wait(ring.empty + index, phase ^ 1)
        post_task(ring, index, Int64(int(Kind.END) << 56))
        if const_expr(self.trace):
            for member in cutlass.range(CLUSTER, unroll=1):
                row = doubles(trace).iterator + (place.cta + member) * TRACE_WORDS
                arch.store(row + 6, fc1_wait)
                arch.store(row + 7, fc2_wait)

    @cute.jit
    def wait_for_inputs(self, counters: Int64, task, ranks: Ranks, budget):
        """Wait for the rows or activations of the block and, if gated, the slot's weights; returns the budget."""
        shape, layout, block = self.shape, self.counters, task.block
        replica = task.slot - shape.home_slots
        weights = counters + 4 * (layout.weights_ready + 2 * replica)
        if task.kind == int(Kind.FC1):
            rows = counters + 4 * (layout.rows_ready + block)
            budget = wait_counter(rows, shape.rows_need, Wait.ROWS, block, ranks, budget)
            if task.gated == 1:
                budget = wait_counter(weights, shape.w1_pieces, Wait.REPLICA_W1, replica, ranks, budget)
        else:
            act = counters + 4 * (layout.act_ready + block)
            budget = wait_counter(act, self.fc1_tiles, Wait.ACTIVATIONS, block, ranks, budget)
            if task.gated == 1:
                budget = wait_counter(weights + 4, shape.w2_pieces, Wait.REPLICA_W2, replica, ranks, budget)
        return budget


__all__ = ["Scheduler"]
