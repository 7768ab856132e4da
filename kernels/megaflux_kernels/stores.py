"""The store warp: staged rows leave the CTA, one bulk copy a row.

FC1 rows go to ``act`` and count the tile; FC2 rows go straight into the result buffer of the rank that the token came
from. Decides where rows go and when this rank is done; does not know how they were computed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from megaflux_kernels import ptx
from megaflux_kernels.launch import (
    DONE,
    START,
    Place,
    Ranks,
    Tables,
    await_peers,
    has_failed,
    mark,
    signal_peers,
)
from megaflux_kernels.layout import Wait
from megaflux_kernels.peers import PEER_WORDS, Peer
from megaflux_kernels.products import WARPGROUP_ROWS
from megaflux_kernels.ring import take_task
from megaflux_kernels.sync.device import doubles, words
from megaflux_kernels.worklist import BLOCK_ROWS, CLUSTER, SOURCE_SHIFT, Counters, Kind, LayerShape, Tiling

arch = cute.arch
ROW_PAD = 16
"""Bytes after a staged row, so that stmatrix meets no bank conflict."""
ROWS_PER_LANE = BLOCK_ROWS // 32


class StoreWarp:
    """Store warp of one layer shape.

    Args:
        shape: the layer.
        tiling: tiles of a task.
        counters: offsets of the counters.
        num_ctas: CTAs of the rank.
        trace: record times.
    """

    def __init__(self, shape: LayerShape, tiling: Tiling, counters: Counters, num_ctas: int, trace: bool) -> None:
        self.shape, self.counters, self.num_ctas, self.trace = shape, counters, num_ctas, trace
        self.columns = tiling.tile_columns
        self.pitch = 2 * self.columns + ROW_PAD

    @property
    def staging_bytes(self) -> int:
        """Shared memory of the staged rows of both warpgroups."""
        return 2 * WARPGROUP_ROWS * self.pitch

    @cute.jit
    def run(self, staging, barriers, pulls_over, ring, place: Place, act: Int64, tables: Tables, ranks: Ranks, trace):
        """Store every task of this CTA, then report it done; the rank's last CTA waits for the other ranks.

        Args:
            staging: shared-memory address of the staged rows.
            barriers: (full, empty), one buffer a warpgroup.
            pulls_over: barrier at which the pull warp ends.
            ring: task ring.
            place, act, tables, ranks, trace: see ``launch.py``.
        """
        lane, half = place.lane, self.columns // 2
        hidden, intermediate = self.shape.hidden, self.shape.intermediate
        phase, index, turn = Int32(0), Int32(0), Int32(0)
        # Other ranks write row_source; in a small batch a CTA's first task can be FC2, which reads it.
        await_peers(lane, ranks, START, self.shape.num_ranks, Wait.FORWARD_START)
        task, index, turn = take_task(ring, index, turn, place)
        while task.kind != int(Kind.END):
            row = task.block * BLOCK_ROWS + lane
            if task.kind == int(Kind.FC1):
                first = act + (Int64(row) * intermediate + task.tile * half) * 2
                rows = [first + 64 * i * intermediate for i in range(ROWS_PER_LANE)]
                width = existing_columns(task.tile, half, intermediate)
                phase = self.store_rows(staging, barriers, rows, width, lane, phase)
                arch.cp_async_bulk_wait_group(0)  # written, not only read from shared memory
                arch.fence_proxy("async.global")
                arch.sync_warp()
                if (lane == 0) & (width > 0):
                    counter = words(tables.counters).iterator + (self.counters.act_ready + task.block)
                    arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
            else:
                rows = self.result_rows(tables.row_source, row, ranks, task.tile * (2 * self.columns))
                width = existing_columns(task.tile, self.columns, hidden)
                phase = self.store_rows(staging, barriers, rows, width, lane, phase)
            task, index, turn = take_task(ring, index, turn, place)
        mark(trace, place, 4, self.trace)
        arch.cp_async_bulk_wait_group(0)
        arch.fence_proxy("async.global")
        arch.fence_acq_rel_sys()
        arch.mbarrier_wait(pulls_over, 0)
        arch.sync_warp()
        self.finish(lane, tables.counters, ranks)
        mark(trace, place, 5, self.trace)

    @cute.jit
    def result_rows(self, row_source: Int64, row, ranks: Ranks, offset):
        """Addresses of this lane's rows (row + 32 i) in the result buffers of their source ranks; 0: no row."""
        failed, rows = has_failed(ranks), []
        for i in range_constexpr(ROWS_PER_LANE):
            code = arch.load(words(row_source).iterator + (row + 32 * i), Int32)
            address = Int64(0)
            if (code >= 0) & (not failed):
                source, assignment = code >> SOURCE_SHIFT, code & ((1 << SOURCE_SHIFT) - 1)
                base = arch.load(doubles(ranks.peers).iterator + (source * PEER_WORDS + int(Peer.RESULTS)), Int64)
                address = base + Int64(assignment) * (2 * self.shape.hidden) + offset
            rows.append(address)
        return rows

    @cute.jit
    def store_rows(self, staging, barriers, rows, width, lane, phase):
        """Staged rows of both warpgroups to this lane's addresses, ``width`` columns each; returns the next phase."""
        full, empty = barriers
        for group in range_constexpr(2):
            arch.mbarrier_wait(full + group, phase)
            for i in range_constexpr(2):
                if (rows[2 * group + i] != 0) & (width > 0):
                    staged = staging + ((2 * group + i) * 32 + lane) * self.pitch
                    ptx.bulk_store(rows[2 * group + i], staged, 2 * width)
            arch.cp_async_bulk_commit_group()
        for group in range_constexpr(2):
            arch.cp_async_bulk_wait_group(1 - group, read=True)
            arch.sync_warp()
            if lane == 0:
                arch.mbarrier_arrive(empty + group)
        return phase ^ 1

    @cute.jit
    def finish(self, lane, counters: Int64, ranks: Ranks):
        """Count this CTA as done; the last one tells every rank, unless a wait has failed, and waits for all."""
        num_ranks, arrived = self.shape.num_ranks, Int32(0)
        if lane == 0:
            counter = words(counters).iterator + Counters.CTAS_DONE
            arrived = arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        arrived = arch.shuffle_sync(arrived, 0)
        arch.sync_warp()  # what lane 0 has acquired, the other lanes may now release
        if arrived == self.num_ctas - 1:
            if not has_failed(ranks):
                signal_peers(lane, ranks, DONE, num_ranks)
            arch.sync_warp()
            await_peers(lane, ranks, DONE, num_ranks, Wait.RESULTS)


def existing_columns(tile, width: int, total: int):
    """Columns of a tile that exist, 0 for a tile beyond the end."""
    if total % (CLUSTER * width) == 0:
        return Int32(width)
    return cutlass.max(cutlass.min(Int32(total) - tile * width, Int32(width)), Int32(0))


__all__ = ["StoreWarp"]
