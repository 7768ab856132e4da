"""What the planner adds to a layer's totals once a batch is planned (``totals_map.py``).

Runs in the planning block, after the plan was published: the other blocks route by then, so that the layer does not
wait for it. Equal to ``LayerTotals.add`` of the core, integer for integer, times excepted.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float64, Int32, Int64

from megaflux_kernels.layout import Header, SearchShape
from megaflux_kernels.slots import PlanTables
from megaflux_kernels.sync.device import doubles
from megaflux_kernels.totals_map import Total, TotalsMap

arch = cute.arch


class Times(NamedTuple):
    """Global timer when planning started and when the plan was there, nanoseconds; thread 0's count."""

    started: Int64
    planned: Int64


class AddTotals:
    """Device code for one shape; called by a whole block of ``threads`` threads, a multiple of 32.

    Args:
        shape: ranks, experts and slots.
        totals: the memory map.
        threads: of the block.
    """

    def __init__(self, shape: SearchShape, totals: TotalsMap, threads: int) -> None:
        self.shape, self.map, self.threads = shape, totals, threads

    def word(self, totals: Int64, name: str, index=0):
        """Address of a word of a region."""
        return totals + 8 * (Int64(self.map.words[name][0]) + Int64(index))

    @cute.jit
    def increase(self, totals: Int64, name: cutlass.Constexpr, index, amount: Int64):
        """Add to a word without waiting for it, as loads would: one thread adds some thirty words."""
        arch.red(
            doubles(self.word(totals, name, index)).iterator, amount, op="add", dtype="u64", sem="relaxed", scope="gpu"
        )

    @cute.jit
    def add(self, totals: Int64, tables: PlanTables, fixed_load: cute.Tensor, times: Times, tid: Int32):
        """Add one batch.

        Args:
            totals: address of this layer's and rank's totals.
            tables: the plan, as this block wrote it before a barrier.
            fixed_load: int32 [P] in shared memory, blocks of each rank without replicas.
            times: of this batch.
            tid: thread index.
        """
        for expert in cutlass.range(tid, self.shape.num_experts, self.threads):
            self.increase(totals, "expert_rows", expert, Int64(tables.expert_rows[expert]))
        for rank in cutlass.range(tid, self.shape.num_ranks, self.threads):
            self.increase(totals, "loads", rank, Int64(tables.loads[rank]))
            self.increase(totals, "fixed_loads", rank, Int64(fixed_load[rank]))
        if tid < 32:
            self.add_sums(totals, tables, times, tid)

    @cute.jit
    def add_sums(self, totals: Int64, tables: PlanTables, times: Times, lane: Int32):
        """Sums and histograms, by one warp."""
        rows, squares, moved = Int64(0), Int64(0), Int32(0)
        for expert in cutlass.range(lane, self.shape.num_experts, 32):
            num = Int64(tables.expert_rows[expert])
            rows += num
            squares += num * num
        own, slots = self.shape.experts_per_rank, max(1, self.shape.num_replica_slots)
        for replica in cutlass.range(lane, self.shape.num_replicas, 32):
            moved += tables.slot_blocks[replica // slots * self.shape.slots_per_rank + own + replica % slots]
        rows, squares = arch.warp_reduction_sum(rows), arch.warp_reduction_sum(squares)
        moved = arch.warp_redux_sync(moved, "add")
        if lane == 0:
            self.add_plan(totals, tables, rows, moved)
            self.note(totals, Total.KAPPA, "kappa", self.kappa(rows, squares))
            self.add_times(totals, times)

    @cute.jit
    def add_plan(self, totals: Int64, tables: PlanTables, rows: Int64, moved: Int32):
        """What the plan's header says, by one thread."""
        header, ranks = tables.header, self.shape.num_ranks
        blocks, replicas = header[int(Header.NUM_BLOCKS)], header[int(Header.NUM_REPLICAS)]
        busiest, fixed = header[int(Header.MAX_LOAD)], header[int(Header.FIXED_MAX_LOAD)]
        refused, transfers = header[int(Header.GATED)], tables.transfer_first[ranks]
        self.increase(totals, "sums", int(Total.BATCHES), Int64(1))
        self.increase(totals, "sums", int(Total.ROWS), rows)
        self.increase(totals, "sums", int(Total.BLOCKS), Int64(blocks))
        self.increase(totals, "sums", int(Total.BUSIEST), Int64(busiest))
        self.increase(totals, "sums", int(Total.FIXED_BUSIEST), Int64(fixed))
        self.increase(totals, "sums", int(Total.BALANCED), Int64((blocks + ranks - 1) // ranks))
        self.increase(totals, "sums", int(Total.MOVED), Int64(moved))
        self.increase(totals, "sums", int(Total.REPLICAS), Int64(replicas))
        self.increase(totals, "sums", int(Total.TRANSFERS), Int64(transfers))
        self.increase(totals, "sums", int(Total.REPLICATED), Int64(cutlass.min(replicas, 1)))
        self.increase(totals, "sums", int(Total.REFUSED), Int64(refused))
        self.note(totals, Total.IMBALANCE, "imbalance", self.permille(busiest, blocks))
        self.note(totals, Total.FIXED_IMBALANCE, "fixed_imbalance", self.permille(fixed, blocks))

    @cute.jit
    def add_times(self, totals: Int64, times: Times):
        """This batch's planning and the whole of the batch before, by one thread."""
        self.note(totals, Total.PLANNER_NS, "planner_time", times.planned - times.started)
        started = doubles(self.word(totals, "sums", int(Total.STARTED)))
        finished = doubles(self.word(totals, "sums", int(Total.FINISHED)))[0]
        before = started[0]
        if finished > before:  # else this rank had no rows in the batch before, and nothing was combined
            self.note(totals, Total.LAYER_NS, "layer_time", finished - before)
        started[0] = times.started

    @cute.jit
    def permille(self, load: Int32, blocks: Int32):
        """1000 * load / (blocks / P), rounded down; 1000 where there is nothing."""
        value = Int64(1000)
        if blocks > 0:
            value = Int64(load) * (1000 * self.shape.num_ranks) // Int64(blocks)
        return value

    @cute.jit
    def kappa(self, rows: Int64, squares: Int64):
        """1000 * E * squares / rows^2 in float64, rounded down; 1000 where there is nothing."""
        value = Int64(1000)
        if rows > 0:
            share = Float64(1000 * self.shape.num_experts) * Float64(squares)
            value = Int64(share / (Float64(rows) * Float64(rows)))
        return value

    @cute.jit
    def note(self, totals: Int64, total: cutlass.Constexpr, name: cutlass.Constexpr, value: Int64):
        """Add a value to its sum and to its bucket."""
        bounds = self.map.time_bounds if name.endswith("time") else self.map.ratio_bounds
        bucket = Int32(0)
        for bound in bounds:
            if value > bound:
                bucket += 1
        self.increase(totals, "sums", int(total), value)
        self.increase(totals, name, bucket, Int64(1))


__all__ = ["AddTotals", "Times"]
