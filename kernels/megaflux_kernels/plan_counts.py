"""Plans from given histograms, one thread block a plan: the planner where counts are at hand already.

One kernel, ``PlanCounts``. It plans a batch in one launch; the equality run compares it with the reference planner.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from megaflux_kernels.compile_cache import cached
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.plan_block import PlanBlock, PlanOptions, PlanRequest

arch = cute.arch

THREADS = 256


class PlanCounts:
    """``counts`` [n, P, E] -> plans [n], one block each.

    Arguments of the launch, all addresses int32 memory of this device:

    counts: Int64 address of int32 [n, P, E], rows by source rank and expert.
    homes: Int64 address of int32 [2, E], expert of every home slot, then home slot of every expert.
    resident: Int64 address of int32 [n, P, s], copies held before; overwritten with those held afterwards.
    plans: Int64 address of int32 [n, plan words], see ``layout.PlanLayout``.
    num: Int32, n.
    transfer_cost, penalty, block_ns, replica_ns, plan_ns, hidden_permille: ``PlanOptions``.
    stream: CUDA stream.
    """

    def __init__(self, shape: SearchShape) -> None:
        self.shape, self.block = shape, PlanBlock(shape, THREADS)

    @cute.jit
    def __call__(
        self,
        counts: Int64,
        homes: Int64,
        resident: Int64,
        plans: Int64,
        num: Int32,
        transfer_cost: Int32,
        penalty: Int32,
        block_ns: Int64,
        replica_ns: Int64,
        plan_ns: Int64,
        hidden_permille: Int32,
        stream,
    ):
        @cute.struct
        class Storage:
            keys: cute.struct.MemRange[Int64, self.block.num_keys]
            words: cute.struct.MemRange[Int32, self.block.num_words]

        self.storage = Storage
        options = (transfer_cost, penalty, block_ns, replica_ns, plan_ns, hidden_permille)
        self.kernel(counts, homes, resident, plans, *options).launch(
            grid=[num, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        counts: Int64,
        homes: Int64,
        resident: Int64,
        plans: Int64,
        transfer_cost: Int32,
        penalty: Int32,
        block_ns: Int64,
        replica_ns: Int64,
        plan_ns: Int64,
        hidden_permille: Int32,
    ):
        tid, _, _ = arch.thread_idx()
        case, _, _ = arch.block_idx()
        memory = SmemAllocator().allocate(self.storage)
        keys = memory.keys.get_tensor(cute.make_layout(self.block.num_keys))
        shape = self.shape
        request = PlanRequest(
            counts + Int64(case) * (4 * shape.num_ranks * shape.num_experts),
            homes,
            resident + Int64(case) * (4 * shape.num_replicas),
            plans + Int64(case) * (4 * shape.plan.num_words),
            case % shape.num_ranks,
            case + 1,
        )
        options = PlanOptions(transfer_cost, penalty, block_ns, replica_ns, plan_ns, hidden_permille)
        self.block.solve(memory.words.data_ptr(), keys, request, options, tid)


def compile_plan_counts(shape: SearchShape):
    """The compiled launch for one shape; call it with the arguments of ``PlanCounts.__call__``."""
    arguments = (*[Int64(0)] * 4, *[Int32(0)] * 3, *[Int64(0)] * 3, Int32(0), cutlass.cuda.default_stream())
    return cached(lambda: cute.compile(PlanCounts(shape), *arguments), "plan_counts", shape)


__all__ = ["PlanCounts", "compile_plan_counts"]
