"""The load warp: brings the K tiles of a task into the load ring by TMA.

A task that the scheduler has posted may begin: its inputs are there. The two CTAs of a cluster share one operand: each
loads half of it into both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from megaflux_kernels.launch import Place
from megaflux_kernels.products import K_TILE
from megaflux_kernels.ring import advance, take_task
from megaflux_kernels.worklist import BLOCK_ROWS, CLUSTER, Kind, LayerShape, Tiling

arch = cute.arch


class LoadWarp:
    """Load warp of one layer shape.

    Args:
        shape: the layer.
        tiling: tiles of a task.
        stages: stages of the load ring.
    """

    def __init__(self, shape: LayerShape, tiling: Tiling, stages: int) -> None:
        self.shape, self.stages = shape, stages
        self.columns = tiling.tile_columns
        self.w1_tile = (self.columns // 2, 2)  # the gate rows, then the up rows of the same columns
        self.stage_bytes = 2 * (BLOCK_ROWS + self.columns) * K_TILE

    @cute.jit
    def run(self, smem, whole, shared, ring, barriers, place: Place):
        """Load every task of this CTA.

        Args:
            smem: shared-memory stages of rows and of columns.
            whole, shared: (TMA atom, tensor) of pool rows and act rows, of W1 and W2 in home slots and, where there are
                any, of W1 and W2 in replica slots; alone, and as halves of a multicast.
            ring: task ring.
            barriers: (full, empty) of the load ring.
            place: see ``launch.py``.
        """
        rows, weights = [(smem[0], BLOCK_ROWS)] * 2, [(smem[1], self.w1_tile), (smem[1], self.columns)]
        operands = [*rows, *weights, *weights][: len(whole)]
        alone = [partition(*whole[i], *operands[i], Int32(0), 1) for i in range(len(whole))]
        halves = [partition(*shared[i], *operands[i], place.member, CLUSTER) for i in range(len(shared))]
        pairs = tuple((alone[i], halves[i]) for i in range(len(whole)))
        stage, phase, index, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        task, index, turn = take_task(ring, index, turn, place)
        while task.kind != int(Kind.END):
            arch.fence_proxy("async.global")  # acquired by the scheduler with ordinary loads, read by TMA
            position = (stage, phase)
            if const_expr(self.shape.num_replica_slots == 0):
                position = self.load_task(task, pairs[:2], pairs[2:4], task.slot, barriers, position)
            else:
                replica_slot = task.slot - self.shape.home_slots
                if replica_slot < 0:
                    position = self.load_task(task, pairs[:2], pairs[2:4], task.slot, barriers, position)
                else:
                    position = self.load_task(task, pairs[:2], pairs[4:], replica_slot, barriers, position)
            stage, phase = position
            task, index, turn = take_task(ring, index, turn, place)

    @cute.jit
    def load_task(self, task, rows, weights, slot, barriers, position):
        """Load a task with the weights of ``slot`` in one of the two places where weights lie.

        Args:
            task: of the ring.
            rows: (alone, half) of pool rows and of act rows.
            weights: (alone, half) of W1 and of W2.
            slot: index there.
            barriers: (full, empty) of the load ring.
            position: (stage, phase) of the load ring; the next one is returned.
        """
        fc1_k, fc2_k = self.shape.hidden // K_TILE, self.shape.intermediate // K_TILE
        if task.kind == int(Kind.FC1):
            at = (task.block, (task.tile, 0), slot)
            if task.share_rows == 1:
                position = self.load_tiles(rows[0][1], weights[0][0], at, fc1_k, barriers, position, True)
            else:
                position = self.load_tiles(rows[0][0], weights[0][1], at, fc1_k, barriers, position, False)
        else:
            at = (task.block, task.tile, slot)
            if task.share_rows == 1:
                position = self.load_tiles(rows[1][1], weights[1][0], at, fc2_k, barriers, position, True)
            else:
                position = self.load_tiles(rows[1][0], weights[1][1], at, fc2_k, barriers, position, False)
        return position

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
            cute.copy(rows[0], row_tiles[None, k], row_stage, tma_bar_ptr=full + stage, **row_options)
            cute.copy(columns[0], column_tiles[None, k], column_stage, tma_bar_ptr=full + stage, **column_options)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase


def partition(atom, gmem, smem, extent, member, num_members: int):
    """(atom, shared stages, global tiles) of a TMA operand; with two members, this CTA's half of a multicast."""
    tiles = cute.local_tile(gmem, (extent, K_TILE), (None,) * cute.rank(gmem))
    who = cute.make_layout(num_members)
    parts = cpasync.tma_partition(atom, member, who, cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2))
    return (atom, *parts)


__all__ = ["LoadWarp"]
