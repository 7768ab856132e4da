"""The matrix warps: WGMMA over the K tiles of a task, then SwiGLU or plain rounding into staged rows.

Two warpgroups each compute 64 rows of a 128 x N tile. Accumulators stay in registers; the first half of an FC1 tile's
columns is gate, the second the same columns of up, so that both factors of SwiGLU are in one thread. Decides the order
of the sum over K, which is the same for every task, whatever rank computes it; knows no memory outside the CTA.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from megaflux_kernels import ptx
from megaflux_kernels.launch import Place
from megaflux_kernels.ring import advance, take_task
from megaflux_kernels.worklist import BLOCK_ROWS, Kind, LayerShape

arch = cute.arch
K_TILE = 64
WARPGROUP_ROWS = 64


@cute.jit
def release_stage(barrier, lane):
    """A warp is done with a stage: tell both CTAs of the cluster, since either may write into it."""
    if lane < 2:
        arch.mbarrier_arrive(barrier, lane)


@cute.jit
def multiply_stage(operation, accumulator, rows, columns, stage, first: cutlass.Constexpr):
    """One K tile: four WGMMAs, committed as one group; ``first`` overwrites the accumulator."""
    warpgroup.fence()
    for k in range_constexpr(K_TILE // 16):
        atom = cute.make_mma_atom(operation)  # a fresh atom a step: ACCUMULATE stays a constant
        atom.set(warpgroup.Field.ACCUMULATE, not (first and k == 0))
        cute.gemm(atom, accumulator, rows[None, None, k, stage], columns[None, None, k, stage], accumulator)
    warpgroup.commit_group()


@cute.jit
def multiply(operands, barriers, num_k_tiles, stage, phase, num_stages: cutlass.Constexpr, lane):
    """accumulator = rows @ columns.T over ``num_k_tiles`` stages of the load ring, one WGMMA group kept in flight.

    Args:
        operands: (WGMMA operation, accumulator, A fragments, B fragments).
        barriers: (full, empty) of the load ring.
        num_k_tiles: K tiles of the product, at least 1.
        stage, phase: position in the load ring.
        num_stages: stages of the load ring.
        lane: lane of the warp.

    Returns:
        The next position.
    """
    operation, accumulator, rows, columns = operands
    full, empty = barriers
    arch.mbarrier_wait(full + stage, phase)
    multiply_stage(operation, accumulator, rows, columns, stage, True)
    previous = stage
    stage, phase = advance(stage, phase, num_stages)
    for _ in cutlass.range(num_k_tiles - 1, unroll=1):
        arch.mbarrier_wait(full + stage, phase)
        multiply_stage(operation, accumulator, rows, columns, stage, False)
        warpgroup.wait_group(1)
        release_stage(empty + previous, lane)
        previous = stage
        stage, phase = advance(stage, phase, num_stages)
    warpgroup.wait_group(0)
    release_stage(empty + previous, lane)
    return stage, phase


@cute.jit
def stage_rows(accumulator, swiglu: cutlass.Constexpr, width: cutlass.Constexpr, address, barriers, phase, lane):
    """Round a warp's 16 rows of the tile to BF16 and store them to its rows of the staging buffer.

    Args:
        accumulator: float32 fragment: for each group of 8 columns (row, row, row + 8, row + 8).
        swiglu: combine column j (gate) with column ``width`` + j (up).
        width: columns of the result.
        address: shared-memory address of this lane's first 16 bytes.
        barriers: (full, empty) of the warpgroup's staging buffer.
        phase: phase of the buffer.
        lane: lane of the warp.
    """
    full, empty = barriers
    arch.mbarrier_wait(empty, phase ^ 1)
    for q in range_constexpr(width // 16):
        packed = []
        for j in range_constexpr(2):
            group = 2 * q + j
            values = []
            for i in range_constexpr(4):
                if const_expr(swiglu):
                    values.append(ptx.swiglu(accumulator[4 * group + i], accumulator[4 * group + width // 2 + i]))
                else:
                    values.append(accumulator[4 * group + i])
            packed += [ptx.pack_bf16(values[0], values[1]), ptx.pack_bf16(values[2], values[3])]
        ptx.store_matrix(address + q * 32, packed)
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_warp()
    if lane == 0:
        arch.mbarrier_arrive(full)


class MatrixWarps:
    """The two matrix warpgroups of one layer shape.

    Args:
        shape: the layer.
        columns: columns of a tile.
        stages: stages of the load ring.
        pitch: bytes from one staged row to the next.
    """

    def __init__(self, shape: LayerShape, columns: int, stages: int, pitch: int) -> None:
        self.shape, self.columns, self.stages, self.pitch = shape, columns, stages, pitch

    @cute.jit
    def run(self, smem, tiled_mma, loads, staging, staged, ring, warp, place: Place):
        """Multiply every task of this CTA.

        Args:
            smem: shared-memory stages of rows and of columns.
            tiled_mma: WGMMA of both warpgroups.
            loads: (full, empty) barriers of the load ring.
            staging: shared-memory address of the staged rows.
            staged: (full, empty) barriers of the staging buffers.
            ring: task ring.
            warp: warp of the CTA, 4 to 11.
            place: see ``launch.py``.
        """
        group, lane = warp // 4 - 1, place.lane
        mma = tiled_mma.get_slice(group * 128)
        rows = tiled_mma.make_fragment_A(mma.partition_A(smem[0]))
        columns = tiled_mma.make_fragment_B(mma.partition_B(smem[1]))
        accumulator = cute.make_rmem_tensor(mma.partition_shape_C((BLOCK_ROWS, self.columns)), Float32)
        operands = (tiled_mma.op, accumulator, rows, columns)
        buffer = (staged[0] + group, staged[1] + group)
        row = group * WARPGROUP_ROWS + warp % 4 * 16 + lane % 16
        address = staging + row * self.pitch + lane // 16 * 16
        stage, phase, index, turn, buffer_phase = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        task, index, turn = take_task(ring, index, turn, place)
        while task.kind != int(Kind.END):
            num_k = Int32(self.shape.hidden // K_TILE)
            if task.kind == int(Kind.FC2):
                num_k = Int32(self.shape.intermediate // K_TILE)
            stage, phase = multiply(operands, loads, num_k, stage, phase, self.stages, lane)
            if task.kind == int(Kind.FC1):
                stage_rows(accumulator, True, self.columns // 2, address, buffer, buffer_phase, lane)
            else:
                stage_rows(accumulator, False, self.columns, address, buffer, buffer_phase, lane)
            buffer_phase ^= 1
            task, index, turn = take_task(ring, index, turn, place)


__all__ = ["K_TILE", "WARPGROUP_ROWS", "MatrixWarps"]
