"""The forward megakernel: dispatch, FC1, SwiGLU, FC2 and return of one MoE layer in one persistent launch a rank.

BF16 in and out, float32 accumulation, Hopper (sm_90a). Reads the tables of ``worklist.py``, which may change with every
launch, and nothing from the host: one compiled kernel serves every token count and every plan, inside a CUDA graph too.

A CTA has 12 warps:

====  ===========================================================================================================
0     loads (``loads.py``): TMA loads of the K tiles of a task into a ring of three stages
1     stores (``stores.py``): FC1 rows into ``act``, FC2 rows straight into their source ranks' result buffers
2     pulls (``pull.py``): token rows and replica weights from the peers
3     scheduler (``schedule.py``): claims task words for a pair of CTAs and waits for what they need
4-11  two matrix warpgroups (``products.py``), tiles of 128 x 256 over K steps of 64
====  ===========================================================================================================

CTAs work in clusters of two which share loads: two blocks multicast the weights, two N tiles of one block the rows.

Across ranks there are two flags a rank and launch. *Start*: all earlier work of the rank's stream is done, so its rows
and tables may be read and its result buffer written. *Done*: all that it returns has arrived and it reads nothing more.
The launch ends when every rank is done: the combine that follows in the stream waits for nobody.

Every wait is bounded. Waits for other ranks end after ``budget_ns``, waits for local counters after twice that, so
that the first failure, which the error record keeps, is the cause. A rank that has failed pulls nothing, writes no
results and reports neither start nor done, so its peers fail as well. Waits on shared-memory barriers are for warps
whose own waits are bounded, or for copies that the hardware completes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from megaflux_kernels.compile_cache import cached
from megaflux_kernels.launch import Buffers, Place, Ranks, Tables
from megaflux_kernels.layout import ShapeError
from megaflux_kernels.loads import LoadWarp
from megaflux_kernels.products import K_TILE, MatrixWarps
from megaflux_kernels.pull import PullWarp, Staging
from megaflux_kernels.ring import READERS, RING_WORDS, Ring
from megaflux_kernels.schedule import Scheduler
from megaflux_kernels.stores import StoreWarp
from megaflux_kernels.sync.device import words
from megaflux_kernels.worklist import (
    BLOCK_ROWS,
    CLUSTER,
    Counters,
    LayerShape,
    Tiling,
    WorkHeader,
    work_bounds,
)

arch = cute.arch
THREADS = 384  # ptxas refuses m64n256k16 from 416 threads on, whatever setmaxnreg grants
STAGES = 3  # a fourth would leave no room for 256-column staging rows, which are worth more
SERVICE_REGISTERS, MATRIX_REGISTERS = 72, 216
"""Of a thread after setmaxnreg; 128 and 256 threads share the 168 x 384 with which a CTA begins, or wait for ever."""
TRACE = ("start", "peers started", "rows pulled", "pulls over", "last task stored", "end", "FC1 waits", "FC2 waits")


@dataclass(frozen=True)
class ForwardConfig:
    """Launch choices of the forward kernel.

    Args:
        tiling: tiles and task order; tables must be made with the same.
        num_ctas: CTAs of a rank, even: one an SM, or an equal share of the SMs for each virtual rank.
        weight_ctas: CTAs whose pull warps begin with replica weights, when there are any, and pull no rows.
        trace: record global times at the trace address, int64 [num_ctas, 8], see ``TRACE``.

    Raises:
        ShapeError: naming the field, its value and what is allowed.
    """

    tiling: Tiling = field(default_factory=Tiling)
    num_ctas: int = 132
    weight_ctas: int = 16
    trace: bool = False

    def __post_init__(self) -> None:
        if self.num_ctas < CLUSTER or self.num_ctas % CLUSTER:
            raise ShapeError("num_ctas", self.num_ctas, "an even number of at least 2")
        if not 1 <= self.weight_ctas < self.num_ctas:
            raise ShapeError("weight_ctas", self.weight_ctas, f"1 to {self.num_ctas - 1}")
        if self.tiling.tile_columns != 256:
            raise ShapeError("tile_columns", self.tiling.tile_columns, "256")


def shared_config(num_local: int = 1, num_sms: int = 132) -> ForwardConfig:
    """Launch choices of each of the ``num_local`` ranks that share a GPU: one, or several *virtual ranks*.

    Launches of virtual ranks wait for one another and so must be resident together: each gets an equal, even share of
    the SMs, less a few for the small launches of the other ranks.
    """
    num_ctas = (num_sms - 4) // num_local // CLUSTER * CLUSTER if num_local > 1 else num_sms // CLUSTER * CLUSTER
    return ForwardConfig(num_ctas=num_ctas, weight_ctas=max(1, num_ctas // 8))


class Forward:
    """Launch function and device code for one layer shape."""

    def __init__(self, shape: LayerShape, config: ForwardConfig) -> None:
        self.shape, self.config, self.columns = shape, config, config.tiling.tile_columns
        self.max_rows = work_bounds(shape, config.tiling).max_rows
        counters = Counters(self.max_rows // BLOCK_ROWS, shape.num_replica_slots)
        self.load_warp = LoadWarp(shape, config.tiling, STAGES)
        self.scheduler = Scheduler(shape, config.tiling, counters, config.trace)
        self.store_warp = StoreWarp(shape, config.tiling, counters, config.num_ctas, config.trace)
        self.pull_warp = PullWarp(shape, counters)
        self.matrix_warps = MatrixWarps(shape, self.columns, STAGES, self.store_warp.pitch)

    @cute.jit
    def __call__(
        self,
        pool: Int64,
        act: Int64,
        home_w1: Int64,
        home_w2: Int64,
        replica_w1: Int64,
        replica_w2: Int64,
        header: Int64,
        tasks: Int64,
        row_source: Int64,
        places: Int64,
        transfers: Int64,
        counters: Int64,
        peers: Int64,
        flags: Int64,
        error: Int64,
        trace: Int64,
        me: Int32,
        pull_weights: Int32,
        budget_ns: Int64,
        stream,
    ):
        """Launch one rank.

        Args:
            pool, act, header, tasks, row_source, places, transfers, counters, flags: addresses of this rank's buffers,
                see ``forward_map.py``; pool, act and counters are written, counters must be zero.
            home_w1, home_w2: addresses of BF16 [E/P, 2I, H] and [E/P, H, I], the weights in this rank's home slots.
            replica_w1, replica_w2: likewise of the s replica slots, which are written; unused where s is 0.
            peers: address of the table of ``peers.py``.
            error: address of the error record, see ``sync``.
            trace: address of int64 [num_ctas, 8], written if the configuration traces.
            me: this rank.
            pull_weights: 1, or 0 when the transfer kernel has brought the replica weights.
            budget_ns: bound of a wait for another rank, nanoseconds.
            stream: CUDA stream.
        """
        shape = self.shape
        hidden, intermediate = shape.hidden, shape.intermediate

        def tensor(address, extents, strides):
            pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
            return cute.make_tensor(pointer, cute.make_layout(extents, stride=strides))

        def weights(w1, w2, slots):
            w1_rows, w1_strides = (intermediate, 2), (hidden, intermediate * hidden)  # (row, gate or up)
            return (
                tensor(w1, (w1_rows, hidden, slots), (w1_strides, 1, 2 * intermediate * hidden)),
                tensor(w2, (hidden, intermediate, slots), (intermediate, 1, hidden * intermediate)),
            )

        gmem = (
            tensor(pool, (self.max_rows, hidden), (hidden, 1)),
            tensor(act, (self.max_rows, intermediate), (intermediate, 1)),
            *weights(home_w1, home_w2, shape.home_slots),
            *(weights(replica_w1, replica_w2, shape.num_replica_slots) if shape.num_replica_slots else ()),
        )
        tiled_mma = hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, self.columns)
        )
        tile = (BLOCK_ROWS, self.columns, K_TILE)
        row_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, BFloat16, STAGES)
        column_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, BFloat16, STAGES)
        smem = (*[row_layout] * 2, *[column_layout] * 4)
        extents = (*[BLOCK_ROWS] * 2, *[self.load_warp.w1_tile, self.columns] * 2)

        def loads(operation, num_multicast):
            atoms = ()
            for i in range_constexpr(len(gmem)):
                stage = cute.slice_(smem[i], (None, None, 0))
                info = cpasync.make_tiled_tma_atom(
                    operation, gmem[i], stage, (extents[i], K_TILE), num_multicast=num_multicast
                )
                atoms += ((info[0], info[1]),)
            return atoms

        whole = loads(cpasync.CopyBulkTensorTileG2SOp(), 1)
        shared = loads(cpasync.CopyBulkTensorTileG2SMulticastOp(), CLUSTER)  # each CTA loads one half into both

        @cute.struct
        class Storage:
            load_full: cute.struct.MemRange[Int64, STAGES]
            load_empty: cute.struct.MemRange[Int64, STAGES]
            ring_full: cute.struct.MemRange[Int64, RING_WORDS]
            ring_empty: cute.struct.MemRange[Int64, RING_WORDS]
            ring: cute.struct.MemRange[Int64, RING_WORDS]
            staged_full: cute.struct.MemRange[Int64, 2]
            staged_empty: cute.struct.MemRange[Int64, 2]
            pulled: cute.struct.MemRange[Int64, self.pull_warp.stages]
            pulls_over: cute.struct.MemRange[Int64, 1]
            rows: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(row_layout)], 1024]
            columns: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(column_layout)], 1024]
            staged: cute.struct.Align[cute.struct.MemRange[BFloat16, self.store_warp.staging_bytes // 2], 128]
            pulling: cute.struct.Align[self.pull_warp.staging_type, 128]

        self.storage = Storage
        buffers = Buffers(pool, act, replica_w1, replica_w2)
        tables = Tables(header, tasks, row_source, places, transfers, counters)
        arguments = (peers, flags, error, trace, me, pull_weights, budget_ns)
        self.kernel(whole, shared, tiled_mma, row_layout, column_layout, buffers, tables, *arguments).launch(
            grid=[self.config.num_ctas, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        whole: tuple,
        shared: tuple,
        tiled_mma: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        column_layout: cute.ComposedLayout,
        buffers: Buffers,
        tables: Tables,
        peers: Int64,
        flags: Int64,
        error: Int64,
        trace: Int64,
        me: Int32,
        pull_weights: Int32,
        budget_ns: Int64,
    ):
        thread, _, _ = arch.thread_idx()
        cta, _, _ = arch.block_idx()
        warp = arch.make_warp_uniform(arch.warp_idx())
        place = Place(thread % 32, arch.make_warp_uniform(arch.block_idx_in_cluster()), cta)
        storage = SmemAllocator().allocate(self.storage)
        smem = (
            storage.rows.get_tensor(row_layout.outer, swizzle=row_layout.inner),
            storage.columns.get_tensor(column_layout.outer, swizzle=column_layout.inner),
        )
        if thread == 0:
            self.init_barriers(storage)
        arch.mbarrier_init_fence()
        arch.cluster_arrive()
        arch.cluster_wait()

        config = self.config
        ring = Ring(storage.ring.data_ptr(), storage.ring_full.data_ptr(), storage.ring_empty.data_ptr())
        loads = (storage.load_full.data_ptr(), storage.load_empty.data_ptr())
        staged = (storage.staged_full.data_ptr(), storage.staged_empty.data_ptr())
        staging, pulls_over = Int32(storage.staged.data_ptr().toint()), storage.pulls_over.data_ptr()
        launch = arch.load(words(tables.header).iterator + int(WorkHeader.LAUNCH), Int32)
        ranks = Ranks(peers, flags, error, me, launch, budget_ns)
        if warp < 4:
            arch.setmaxregister_decrease(SERVICE_REGISTERS)
            if warp == 0:
                self.load_warp.run(smem, whole, shared, ring, loads, place)
            elif warp == 1:
                self.store_warp.run(staging, staged, pulls_over, ring, place, buffers.act, tables, ranks, trace)
            elif warp == 2:
                pulling = Staging(Int32(storage.pulling.data_ptr().toint()), storage.pulled.data_ptr())
                self.pull_warp.run(
                    *(pulling, place, buffers, tables, ranks, pull_weights),
                    *(config.num_ctas, config.weight_ctas, trace, config.trace),
                )
                if place.lane == 0:
                    arch.mbarrier_arrive(pulls_over)
            else:
                if (place.lane == 0) & (place.member == 0):
                    self.scheduler.run(ring, place, tables, ranks, trace)
        else:
            arch.setmaxregister_increase(MATRIX_REGISTERS)
            self.matrix_warps.run(smem, tiled_mma, loads, staging, staged, ring, warp, place)
        arch.sync_warp()  # no CTA may leave while its pair still signals it or multicasts into it
        arch.cluster_arrive(aligned=False)
        arch.cluster_wait()

    @cute.jit
    def init_barriers(self, storage):
        """Arrivals that complete a phase of each barrier."""
        init = arch.mbarrier_init
        for i in range_constexpr(STAGES):
            init(storage.load_full.data_ptr() + i, 1)
            init(storage.load_empty.data_ptr() + i, 8 * CLUSTER)  # every matrix warp of both CTAs
        for i in range_constexpr(RING_WORDS):
            init(storage.ring_full.data_ptr() + i, 1)
            init(storage.ring_empty.data_ptr() + i, READERS)
        for i in range_constexpr(2):
            init(storage.staged_full.data_ptr() + i, 4)  # the warps of one warpgroup
            init(storage.staged_empty.data_ptr() + i, 1)
        for i in range_constexpr(self.pull_warp.stages):
            init(storage.pulled.data_ptr() + i, 1)
        init(storage.pulls_over.data_ptr(), 1)


def compile_forward(shape: LayerShape, config: ForwardConfig):
    """The compiled kernel; call it with the arguments of ``Forward.__call__``."""
    arguments = (*[Int64(0)] * 16, Int32(0), Int32(0), Int64(0), cutlass.cuda.default_stream())
    return cached(lambda: cute.compile(Forward(shape, config), *arguments), "forward", shape, config)


__all__ = ["TRACE", "Forward", "ForwardConfig", "compile_forward", "shared_config"]
