"""The planner's launch: top-k ids of this rank in, plan and routes out, one launch a layer and batch.

Grid (1 + chunks, local ranks). Block 0 of a rank plans, the others own a chunk of its tokens each. In order:

1. Every chunk counts its assignments, publishes its histogram and adds it to the rank's.
2. The planning block waits for all chunks, writes the rank's counts into every rank's memory (parity of the launch),
   raises its flag there, and waits for the flags of all ranks.
3. It plans (``plan_block``), as every other rank does with the same counts, and publishes the plan.
4. Meanwhile the chunks order their assignments and add up the histograms before theirs; then they wait for the plan
   and write routes and tables. The planning block, which is free by then, adds the batch to the layer's totals.

All blocks must be resident at once, since they wait for one another: the launch is cooperative and is refused
otherwise. Sizes are read on the device, nothing is synchronised with the host, and the launch can be captured into a
CUDA graph: the launch number lives in device memory. No flag is ever reset. A wait that fails fills the error record
and leaves routes unwritten. From the next launch on the rank sends no counts either and waits for no peer: one that is
slower may still read what it sent before, and what is queued drains at once.

Two parities of counts suffice: a rank sends counts of launch n + 2 only after all ranks have sent those of n + 1, which
they do after their launch n ended.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from megaflux_kernels.compile_cache import cached
from megaflux_kernels.layout import STALE_COUNT, Wait
from megaflux_kernels.own_tables import ForwardTables, OwnTables, WorkAddresses
from megaflux_kernels.plan_block import PlanBlock, PlanOptions, PlanRequest
from megaflux_kernels.planner_map import NANOSECONDS, THREADS, Mark, PlannerMap, PlannerShape, State, Work
from megaflux_kernels.routes import Batch, RouteBlock
from megaflux_kernels.slots import plan_tables
from megaflux_kernels.sync.device import count_up, doubles, holds_failure, publish, record_failure, wait_for, words
from megaflux_kernels.totals import AddTotals, Times
from megaflux_kernels.totals_map import TotalsMap

arch = cute.arch

PLAN_WAIT_BUDGETS = 3
"""A chunk waits for the plan this many times as long as the planning block waits for each of its two inputs."""


class Planner:
    """Launch function and device code for one shape.

    Args:
        shape: what to plan and route.
        forward: the forward kernel whose tables are written, or None for plan and routes alone.
        trace: record the ends of the stages in ``PlannerMap.trace``.
        totals: memory map of the totals that batches are added to, or None to add nothing.
    """

    def __init__(
        self, shape: PlannerShape, forward: ForwardTables | None, trace: bool, totals: TotalsMap | None = None
    ) -> None:
        self.shape, self.search, self.trace, self.forward = shape, shape.search, trace, forward
        self.map = PlannerMap(shape)
        self.block, self.routes = PlanBlock(shape.search, THREADS), RouteBlock(shape, forward)
        self.own = OwnTables(shape, forward) if forward else None
        self.totals = AddTotals(shape.search, totals, THREADS) if totals else None
        self.totals_bytes = 8 * totals.num_words if totals else 0
        self.num_words = max(self.block.num_words, self.routes.num_words + (self.own.num_words if self.own else 0))

    @cute.jit
    def __call__(
        self,
        ids: Int64,
        ids_stride: Int64,
        num_tokens: Int64,
        resident: Int64,
        totals: Int64,
        region: Int64,
        region_stride: Int64,
        first_rank: Int32,
        local_ranks: Int32,
        transfer_cost: Int32,
        penalty: Int32,
        block_ns: Int64,
        replica_ns: Int64,
        plan_ns: Int64,
        hidden_permille: Int32,
        budget_ns: Int64,
        stream,
    ):
        """Launch.

        Args:
            ids: address of int32 [M, k], logical expert ids of the first local rank; others follow every ``ids_stride``
                bytes.
            num_tokens: address of int32 [local ranks], tokens M of each, 0 to ``max_tokens``.
            resident: address of int32 [local ranks, P, s], copies held before this launch, -1 for none, or ``STALE``;
                overwritten with those held afterwards.
            totals: address of int64 [local ranks, ``TotalsMap.num_words``], this layer's; 0 adds nothing.
            region: address of the first local rank's ``PlannerMap``; others follow every ``region_stride`` bytes.
            first_rank: rank of the first local rank.
            local_ranks: ranks that this launch plans for: those of this device.
            transfer_cost, penalty, block_ns, replica_ns, plan_ns, hidden_permille: ``PlanOptions``.
            budget_ns: bound of each wait, nanoseconds.
            stream: CUDA stream.
        """

        @cute.struct
        class Storage:
            keys: cute.struct.MemRange[Int64, self.block.num_keys]
            peers: cute.struct.MemRange[Int64, 2 * self.search.num_ranks]
            words: cute.struct.MemRange[Int32, self.num_words]
            ok: cute.struct.MemRange[Int32, 1]

        self.storage = Storage
        options = (transfer_cost, penalty, block_ns, replica_ns, plan_ns, hidden_permille)
        self.kernel(
            ids, ids_stride, num_tokens, resident, totals, region, region_stride, first_rank, *options, budget_ns
        ).launch(
            grid=[1 + self.shape.num_chunks, local_ranks, 1],
            block=[THREADS, 1, 1],
            cooperative=True,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        ids: Int64,
        ids_stride: Int64,
        num_tokens: Int64,
        resident: Int64,
        totals: Int64,
        region: Int64,
        region_stride: Int64,
        first_rank: Int32,
        transfer_cost: Int32,
        penalty: Int32,
        block_ns: Int64,
        replica_ns: Int64,
        plan_ns: Int64,
        hidden_permille: Int32,
        budget_ns: Int64,
    ):
        tid, _, _ = arch.thread_idx()
        role, local, _ = arch.block_idx()
        memory = SmemAllocator().allocate(self.storage)
        base, ok = memory.words.data_ptr(), memory.ok.get_tensor(cute.make_layout(1))
        region = region + Int64(local) * region_stride
        rank = first_rank + local
        state = self.tensor(region, "state")
        epoch = arch.load(state.iterator + int(State.EPOCH), Int32) + 1
        peers = memory.peers.get_tensor(cute.make_layout(2 * self.search.num_ranks))
        if role == 0:
            keys = memory.keys.get_tensor(cute.make_layout(self.block.num_keys))
            bases = self.tensor(region, "peers")
            for peer in cutlass.range(tid, self.search.num_ranks, THREADS):
                peers[peer] = bases[peer]
            copies = resident + Int64(local) * (4 * self.search.num_replicas)
            options = PlanOptions(transfer_cost, penalty, block_ns, replica_ns, plan_ns, hidden_permille)
            if totals != 0:
                totals = totals + Int64(local) * self.totals_bytes
            self.plan(base, ok, keys, peers, copies, totals, region, rank, epoch, options, budget_ns, tid)
        else:
            tokens = arch.load(words(num_tokens).iterator + local, Int32)
            batch = Batch(
                words(ids + Int64(local) * ids_stride, self.shape.max_tokens * self.shape.top_k),
                self.tensor(region, "route_place"),
                self.tensor(region, "route_row"),
                tokens,
            )
            self.route(base, ok, peers, batch, region, role - 1, rank, epoch, budget_ns, tid)

    def at(self, region, name: str):
        """Address of a region of the map."""
        return region + self.map.offsets[name]

    def tensor(self, region, name: str):
        """A region of the map as a flat tensor."""
        size = 1
        for extent in self.map.regions[name].extents:
            size *= extent
        make = doubles if self.map.regions[name].dtype == "int64" else words
        return make(self.at(region, name), size)

    @cute.jit
    def mark(self, region: Int64, mark: cutlass.Constexpr, tid: Int32):
        """Record the SM clock, when tracing, and at some marks the global timer."""
        if const_expr(self.trace):
            if tid == 0:
                trace = self.tensor(region, "trace")
                trace[int(mark)] = arch.clock64()
                if const_expr(mark in NANOSECONDS):
                    trace[int(NANOSECONDS[mark])] = arch.globaltimer()

    @cute.jit
    def mark_chunk(self, region: Int64, mark: cutlass.Constexpr, chunk: Int32, tid: Int32):
        """``mark`` for chunk 0."""
        if const_expr(self.trace):
            if chunk == 0:
                self.mark(region, mark, tid)

    # ---- the planning block ----------------------------------------------------------------------------------------

    @cute.jit
    def plan(
        self,
        base,
        ok: cute.Tensor,
        keys: cute.Tensor,
        peers: cute.Tensor,
        resident: Int64,
        totals: Int64,
        region: Int64,
        rank: Int32,
        epoch: Int32,
        options: PlanOptions,
        budget_ns: Int64,
        tid: Int32,
    ):
        """Steps 2 and 3, and the totals."""
        self.mark(region, Mark.START, tid)
        started = Int64(0)
        if const_expr(self.totals is not None):
            started = arch.globaltimer()
        counts = self.at(region, "counts") + Int64(epoch & 1) * (4 * self.search.num_ranks * self.search.num_experts)
        request = PlanRequest(counts, self.at(region, "homes"), resident, self.at(region, "plan"), rank, epoch)
        self.block.prepare(base, request, tid)
        self.exchange(base, ok, region, peers, counts - region, rank, epoch, budget_ns, tid)
        self.mark(region, Mark.EXCHANGE, tid)
        self.block.read(base, request, tid)
        self.mark(region, Mark.BLOCKS, tid)
        self.block.run_searches(base, options, tid)
        self.mark(region, Mark.SEARCH, tid)
        self.block.choose(base, keys, options, tid)
        self.mark(region, Mark.REFINE, tid)
        self.block.write(base, request, tid)
        arch.sync_threads()
        if tid == 0:
            state = self.tensor(region, "state")
            state[int(State.EPOCH)] = epoch
            publish(self.at(region, "state") + 4 * int(State.PLAN), epoch, "gpu")
        self.mark(region, Mark.PLAN, tid)
        if const_expr(self.totals is not None):
            if totals != 0:
                tables, (scratch, _) = plan_tables(self.search, request.plan), self.block.views(base)
                self.totals.add(totals, tables, scratch.fixed_load, Times(started, arch.globaltimer()), tid)

    @cute.jit
    def exchange(
        self,
        base,
        ok: cute.Tensor,
        region: Int64,
        peers: cute.Tensor,
        counts: Int64,
        rank: Int32,
        epoch: Int32,
        budget_ns: Int64,
        tid: Int32,
    ):
        """Gather the rank's histogram, send it to all ranks and wait for theirs; ``counts`` is an offset of the map.

        A rank whose copies are stale says so with its counts, and then all ranks forget theirs. A rank that has failed
        sends nothing and waits for nobody; ``ok``, int32 [1] in shared memory, holds whether it has not.
        """
        experts, ranks, chunks = self.search.num_experts, self.search.num_ranks, self.shape.num_chunks
        error, own = self.at(region, "error"), self.tensor(region, "rank_counts")
        if tid == 0:
            failed, ok[0] = holds_failure(error), Int32(1)
            seen = wait_for(self.at(region, "state") + 4 * int(State.HISTOGRAMS), epoch * chunks, budget_ns, "gpu")
            if epoch * chunks - seen > 0:
                record_failure(error, Wait.HISTOGRAM, rank, epoch * chunks - seen, epoch)
            if failed | (epoch * chunks - seen > 0):
                ok[0] = Int32(0)
        arch.sync_threads()
        self.mark(region, Mark.HISTOGRAM, tid)
        sends, row = ok[0] == 1, counts + Int64(rank) * (4 * experts)
        if not sends:
            budget_ns = Int64(0)
        for expert in cutlass.range(tid, experts, THREADS):
            num = arch.load(own.iterator + expert, Int32)
            own[expert] = Int32(0)
            if expert == 0:
                num += self.block.is_stale(base) * STALE_COUNT
            if sends:
                for peer in cutlass.range(ranks, unroll=8):
                    words(peers[peer] + row, experts)[expert] = num
        arch.sync_threads()
        if sends:
            for peer in cutlass.range(tid, ranks, THREADS):
                publish(peers[peer] + self.map.offsets["counts_flags"] + Int64(rank) * 4, epoch, "sys")
        self.mark(region, Mark.SENT, tid)
        for peer in cutlass.range(tid, ranks, THREADS):
            seen = wait_for(self.at(region, "counts_flags") + Int64(peer) * 4, epoch, budget_ns, "sys")
            if epoch - seen > 0:
                record_failure(error, Wait.COUNTS, peer, epoch - seen, epoch)
            first = words(region + counts + Int64(peer) * (4 * experts))
            if first[0] >= STALE_COUNT:
                first[0] = first[0] - STALE_COUNT
                self.block.forget(base)
        arch.sync_threads()

    # ---- chunks ----------------------------------------------------------------------------------------------------

    @cute.jit
    def route(
        self,
        base,
        ok: cute.Tensor,
        addresses: cute.Tensor,
        batch: Batch,
        region: Int64,
        chunk: Int32,
        rank: Int32,
        epoch: Int32,
        budget_ns: Int64,
        tid: Int32,
    ):
        """Steps 1 and 4."""
        experts = self.search.num_experts
        all_chunks, state = self.tensor(region, "chunk_counts"), self.at(region, "state")
        own_counts = cute.make_tensor(all_chunks.iterator + chunk * experts, cute.make_layout(experts))
        self.routes.count(base, batch, chunk, own_counts, self.tensor(region, "rank_counts"), tid)
        if tid == 0:
            count_up(state + 4 * int(State.HISTOGRAMS), Int32(1), "gpu")
        self.mark_chunk(region, Mark.COUNTED, chunk, tid)
        self.routes.order(base, batch, chunk, Int32(0), tid)
        work = self.work(region)
        if const_expr(self.forward is not None):
            self.routes.load_peers(addresses, work.peers, tid)
            self.own.clear_counters(work, chunk, tid)
        if tid == 0:
            num = epoch * self.shape.num_chunks
            ok[0] = wait_for(state + 4 * int(State.HISTOGRAMS), num, budget_ns, "gpu") - num
        arch.sync_threads()
        if ok[0] >= 0:
            self.routes.add_chunks(base, all_chunks, chunk, tid)
        arch.sync_threads()
        self.mark_chunk(region, Mark.READY, chunk, tid)
        if tid == 0:
            if ok[0] >= 0:
                ok[0] = wait_for(state + 4 * int(State.PLAN), epoch, budget_ns * PLAN_WAIT_BUDGETS, "gpu") - epoch
                if holds_failure(self.at(region, "error")):  # a plan without the counts of every rank
                    ok[0] = Int32(-1)
        arch.sync_threads()
        self.mark_chunk(region, Mark.SEEN, chunk, tid)
        if ok[0] >= 0:
            self.write(base, addresses, batch, work, region, chunk, rank, epoch, tid)
        elif tid == 0:
            record_failure(self.at(region, "error"), Wait.PLAN, rank, chunk, epoch)

    def work(self, region) -> WorkAddresses:
        """Where the forward kernel's tables are."""
        addresses = self.tensor(region, "work")
        fields = (Work.HEADER, Work.TASKS, Work.TRANSFERS, Work.COUNTERS, Work.PEERS)
        return WorkAddresses(*[addresses[int(field)] for field in fields])

    @cute.jit
    def write(
        self,
        base,
        addresses: cute.Tensor,
        batch: Batch,
        work: WorkAddresses,
        region: Int64,
        chunk: Int32,
        rank: Int32,
        epoch: Int32,
        tid: Int32,
    ):
        """Routes and tables, once the plan is there; tables before routes, without a barrier between."""
        tables, own_base = plan_tables(self.search, self.at(region, "plan")), base + self.routes.num_words
        self.routes.load_plan(base, tables, tid)
        if const_expr(self.forward is not None):
            experts = self.search.num_experts
            home_of = words(self.at(region, "homes") + 4 * experts, experts)
            self.own.prepare(own_base, tables, work, home_of, chunk, rank, tid)
        arch.sync_threads()
        self.mark_chunk(region, Mark.LOADED, chunk, tid)
        if const_expr(self.forward is not None):
            _, segments = self.routes.views(base)
            self.own.write(own_base, segments, tables, work, chunk, rank, epoch, tid)
        self.routes.write(base, addresses, batch, chunk, rank, tid)
        self.mark_chunk(region, Mark.ROUTED, chunk, tid)


def compile_planner(
    shape: PlannerShape, forward: ForwardTables | None = None, trace: bool = False, totals: TotalsMap | None = None
):
    """The compiled launch; call it with the arguments of ``Planner.__call__``."""
    integers = (*[Int64(0)] * 7, *[Int32(0)] * 4, *[Int64(0)] * 3, Int32(0), Int64(0))
    return cached(
        lambda: cute.compile(Planner(shape, forward, trace, totals), *integers, cutlass.cuda.default_stream()),
        "planner",
        shape,
        forward,
        trace,
        totals,
    )


__all__ = ["Planner", "compile_planner"]
