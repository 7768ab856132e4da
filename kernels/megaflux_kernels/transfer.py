"""Replica weights in a launch of their own: the *staged* variant, the paper's ablation of pipelined replication.

The same pull warps, queue and counters as in the forward kernel, which then finds the weights counted and pulls none.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr
from cutlass.memory import SmemAllocator

from megaflux_kernels.compile_cache import cached
from megaflux_kernels.launch import Buffers, Ranks, Tables
from megaflux_kernels.pull import PullWarp, Staging
from megaflux_kernels.sync.device import words
from megaflux_kernels.worklist import Counters, LayerShape, Tiling, WorkHeader, work_bounds

arch = cute.arch


class Transfer:
    """Launch function and device code for one layer shape; ``num_ctas`` of one warp each."""

    def __init__(self, shape: LayerShape, tiling: Tiling, num_ctas: int) -> None:
        counters = Counters(work_bounds(shape, tiling).max_blocks, shape.num_replica_slots)
        self.pull, self.num_ctas = PullWarp(shape, counters), num_ctas

    @cute.jit
    def __call__(
        self,
        replica_w1: Int64,
        replica_w2: Int64,
        header: Int64,
        transfers: Int64,
        counters: Int64,
        peers: Int64,
        error: Int64,
        budget_ns: Int64,
        stream,
    ):
        @cute.struct
        class Storage:
            pulled: cute.struct.MemRange[Int64, self.pull.stages]
            pulling: cute.struct.Align[self.pull.staging_type, 128]

        self.storage = Storage
        self.kernel(replica_w1, replica_w2, header, transfers, counters, peers, error, budget_ns).launch(
            grid=[self.num_ctas, 1, 1], block=[32, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        replica_w1: Int64,
        replica_w2: Int64,
        header: Int64,
        transfers: Int64,
        counters: Int64,
        peers: Int64,
        error: Int64,
        budget_ns: Int64,
    ):
        lane, _, _ = arch.thread_idx()
        storage = SmemAllocator().allocate(self.storage)
        if lane == 0:
            for i in range_constexpr(self.pull.stages):
                arch.mbarrier_init(storage.pulled.data_ptr() + i, 1)
        arch.mbarrier_init_fence()
        arch.sync_warp()
        launch = arch.load(words(header).iterator + int(WorkHeader.LAUNCH), Int32)
        num_transfers = arch.load(words(header).iterator + int(WorkHeader.NUM_TRANSFERS), Int32)
        staging = Staging(Int32(storage.pulling.data_ptr().toint()), storage.pulled.data_ptr())
        unused = Int64(0)
        buffers = Buffers(unused, unused, replica_w1, replica_w2)
        tables = Tables(header, unused, unused, unused, transfers, counters)
        ranks = Ranks(peers, unused, error, Int32(0), launch, budget_ns)
        self.pull.weights(staging, lane, Int32(0), num_transfers, buffers, tables, ranks)


def compile_transfer(shape: LayerShape, tiling: Tiling, num_ctas: int = 132):
    """The compiled kernel; call it with the addresses of ``Transfer.__call__``."""
    arguments = (*[Int64(0)] * 8, cutlass.cuda.default_stream())
    return cached(
        lambda: cute.compile(Transfer(shape, tiling, num_ctas), *arguments), "transfer", shape, tiling, num_ctas
    )


__all__ = ["Transfer", "compile_transfer"]
