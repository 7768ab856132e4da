"""The load warp: waits for what a task needs, then brings its K tiles into the load ring by TMA.

Decides when a task may begin: rows or activations of its block have been counted and, for a gated task, the weights of
its slot. The two CTAs of a cluster share one operand: each loads half of it into both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from megaflux_kernels import ptx
from megaflux_kernels.launch import TRACE_WORDS, Place, Ranks, Tables, wait_budget, wait_counter
from megaflux_kernels.layout import Wait
from megaflux_kernels.products import K_TILE
from megaflux_kernels.ring import advance, take_task, unpack_task
from megaflux_kernels.sync.device import doubles, words
from megaflux_kernels.worklist import BLOCK_ROWS, CLUSTER, SOURCE_SHIFT, Counters, Kind, LayerShape, Tiling

arch = cute.arch


class LoadWarp:
    """Load warp of one layer shape.

    Args:
        shape: the layer.
        tiling: tiles of a task.
        counters: offsets of the counters.
        stages: stages of the load ring.
        trace: add up the time spent waiting.
    """

    def __init__(self, shape: LayerShape, tiling: Tiling, counters: Counters, stages: int, trace: bool) -> None:
        self.shape, self.counters, self.stages, self.trace = shape, counters, stages, trace
        self.columns = tiling.tile_columns
        self.w1_tile = (self.columns // 2, 2)  # the gate rows, then the up rows of the same columns
        self.fc1_tiles = tiling.fc1_tiles(shape)
        self.stage_bytes = 2 * (BLOCK_ROWS + self.columns) * K_TILE
        self.gather, self.ahead = tiling.gather, tiling.ahead
        self.arrivals = 1 + 32 if tiling.gather else 1

    @cute.jit
    def run(
        self, smem, pool: Int64, whole, shared, ring, barriers, place: Place, tables: Tables, ranks: Ranks, trace: Int64
    ):
        """Load every task of this CTA.

        Args:
            smem: shared-memory stages of rows and of columns.
            whole, shared: (TMA atom, tensor) of pool rows, W1, act rows, W2, alone and as halves of a multicast.
            ring: task ring.
            barriers: (full, empty) of the load ring.
            place, counters, ranks, trace: see ``launch.py``.
        """
        operands = ((smem[0], BLOCK_ROWS), (smem[1], self.w1_tile), (smem[0], BLOCK_ROWS), (smem[1], self.columns))
        alone = [partition(*whole[i], *operands[i], Int32(0), 1) for i in range(4)]
        halves = [partition(*shared[i], *operands[i], place.member, CLUSTER) for i in range(4)]
        fc1_k, fc2_k = self.shape.hidden // K_TILE, self.shape.intermediate // K_TILE
        stage, phase, index, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        budget = 2 * wait_budget(ranks)  # the wait for another rank, if that is the cause, fails first
        fc1_wait, fc2_wait, since = Int64(0), Int64(0), Int64(0)
        task, index, turn = take_task(ring, index, turn, place)
        while task.kind != int(Kind.END):
            if const_expr(self.trace):
                since = arch.globaltimer()
            if const_expr(not self.ahead):
                if place.lane == 0:
                    budget = self.wait_for_inputs(tables.counters, task, ranks, budget)
                arch.sync_warp()
            arch.fence_proxy("async.global")  # acquired by ordinary loads, read by TMA
            if const_expr(self.trace):
                since = arch.globaltimer() - since
                if task.kind == int(Kind.FC1):
                    fc1_wait += since
                else:
                    fc2_wait += since
            position = (stage, phase)
            if task.kind == int(Kind.FC1):
                at = (task.block, (task.tile, 0), task.slot)
                if const_expr(self.gather):
                    position = self.gather_task(
                        smem[0], pool, alone[1], halves[1], tables.row_source, task, barriers, position, place.lane
                    )
                elif task.share_rows == 1:
                    position = self.load_tiles(halves[0], alone[1], at, fc1_k, barriers, position, True)
                else:
                    position = self.load_tiles(alone[0], halves[1], at, fc1_k, barriers, position, False)
            else:
                at = (task.block, task.tile, task.slot)
                if task.share_rows == 1:
                    position = self.load_tiles(halves[2], alone[3], at, fc2_k, barriers, position, True)
                else:
                    position = self.load_tiles(alone[2], halves[3], at, fc2_k, barriers, position, False)
            stage, phase = position
            task, index, turn = take_task(ring, index, turn, place)
        if const_expr(self.trace):
            if place.lane == 0:
                arch.store(doubles(trace).iterator + (place.cta * TRACE_WORDS + 6), fc1_wait)
                arch.store(doubles(trace).iterator + (place.cta * TRACE_WORDS + 7), fc2_wait)

    @cute.jit
    def await_word(self, word, counters: Int64, ranks: Ranks, budget):
        """One lane waits for the inputs of both CTAs of a word; returns the budget."""
        low, high = Int32(word & 0xFFFFFFFF), Int32(word >> 32)
        for member in cutlass.range(CLUSTER, unroll=1):
            budget = self.wait_for_inputs(counters, unpack_task(low, high, member), ranks, budget)
        return budget

    @cute.jit
    def wait_for_inputs(self, counters: Int64, task, ranks: Ranks, budget):
        """One lane waits for the rows or activations of the block and, if gated, the slot's weights."""
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

    @cute.jit
    def gather_task(self, rows, pool: Int64, alone, halves, row_source: Int64, task, barriers, position, lane):
        """All K tiles of an FC1 task: rows one by one, 16 bytes a lane, weights by TMA."""
        units = row_units(self.shape, row_source, task.block, lane)
        at = ((task.tile, 0), task.slot)
        if task.share_rows == 1:
            position = self.gather_tiles(rows, pool, alone, {}, units, at, barriers, position, lane)
        else:
            both = {"mcast_mask": Int16((1 << CLUSTER) - 1)}
            position = self.gather_tiles(rows, pool, halves, both, units, at, barriers, position, lane)
        return position

    @cute.jit
    def gather_tiles(self, rows, pool: Int64, columns, options, units, at, barriers, position, lane):
        """``gather_task`` with weights alone or shared.

        Rows are swizzled as TMA would: chunk c of row r lies at c ^ r % 8.
        """
        full, empty = barriers
        stage, phase = position
        tile, slot = at
        column_tiles = columns[2][None, tile, None, slot]
        base = Int32(rows.iterator.toint()) + lane // 8 * 128
        even, odd = base + ((lane % 8) ^ (lane // 8)) * 16, base + ((lane % 8) ^ (lane // 8 + 4)) * 16
        for k in cutlass.range(self.shape.hidden // K_TILE, unroll=1):
            arch.mbarrier_wait(empty + stage, phase ^ 1)
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * self.columns * K_TILE)
            cute.copy(columns[0], column_tiles[None, k], columns[1][None, stage], tma_bar_ptr=full + stage, **options)
            source, shift = pool + (k * 2 * K_TILE + lane % 8 * 16), stage * (2 * BLOCK_ROWS * K_TILE)
            for i in range_constexpr(BLOCK_ROWS // 4):
                to = (odd if i % 2 else even) + shift + i * 512
                ptx.copy_async(to, source + Int64(units[i]) * 16)
            arch.cp_async_mbarrier_arrive_noinc(full + stage)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def load_tiles(
        self, rows, columns, at, num_k: cutlass.Constexpr, barriers, position, share_rows: cutlass.Constexpr
    ):
        """TMA loads of all K tiles of a task; one operand is shared by the cluster. Returns the next position."""
        full, empty = barriers
        block, tile, slot = at
        stage, phase = position
        row_tiles, column_tiles = rows[2][None, block, None], columns[2][None, tile, None, slot]
        both = {"mcast_mask": Int16((1 << CLUSTER) - 1)}
        row_options, column_options = (both, {}) if const_expr(share_rows) else ({}, both)
        for k in cutlass.range(num_k, unroll=1):
            arch.mbarrier_wait(empty + stage, phase ^ 1)
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
            row_stage, column_stage = rows[1][None, stage], columns[1][None, stage]
            if const_expr(self.gather):
                with arch.elect_one():
                    ptx.arrive_many(Int32((full + stage).toint()), 32)
            cute.copy(rows[0], row_tiles[None, k], row_stage, tma_bar_ptr=full + stage, **row_options)
            cute.copy(columns[0], column_tiles[None, k], column_stage, tma_bar_ptr=full + stage, **column_options)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase


@cute.jit
def row_units(shape: cutlass.Constexpr, row_source: Int64, block, lane):
    """Where this lane's rows of a block lie, lane // 8 + 4 i for i from 0 to 31: 16-byte units into ``x``.

    The lane's own chunk of eight in a row is added. Padding rows lie behind the last token.
    """
    row_chunks, num_tokens = shape.hidden // 8, shape.num_ranks * shape.max_tokens
    units = []
    for j in range_constexpr(BLOCK_ROWS // 32):
        code = arch.load(words(row_source).iterator + (block * BLOCK_ROWS + 32 * j + lane), Int32)
        row = Int32(num_tokens)
        if code >= 0:
            token = (code & ((1 << SOURCE_SHIFT) - 1)) // shape.top_k
            row = (code >> SOURCE_SHIFT) * shape.max_tokens + token
        units.append(row * row_chunks)
    return [arch.shuffle_sync(units[i // 8], lane // 8 + i % 8 * 4) for i in range(BLOCK_ROWS // 4)]


def partition(atom, gmem, smem, extent, member, num_members: int):
    """(atom, shared stages, global tiles) of a TMA operand; with two members, this CTA's half of a multicast."""
    tiles = cute.local_tile(gmem, (extent, K_TILE), (None,) * cute.rank(gmem))
    who = cute.make_layout(num_members)
    parts = cpasync.tma_partition(atom, member, who, cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2))
    return (atom, *parts)


__all__ = ["LoadWarp"]
