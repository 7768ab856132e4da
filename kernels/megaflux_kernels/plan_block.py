"""Counts to plan by one thread block: the whole planner of MegaFlux section 3.1, in shared memory.

Decides the order of the stages and who runs them: a search a warp, the passes after the selection on one warp,
everything else on the whole block. Knows neither how the counts arrived nor who reads the plan. Equal to
``plan_replicas`` and ``apply_gate`` of the core, integer for integer.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from megaflux_kernels.layout import MAX_SHARED_BYTES, STALE, Header, SearchShape, ShapeError
from megaflux_kernels.refine import Refine
from megaflux_kernels.search import NUM_CANDIDATES, Search, SearchState, state_at, state_words
from megaflux_kernels.slots import Copies, PlanTables, Slots, SlotScratch, plan_tables, scratch_sizes
from megaflux_kernels.sync.device import words

arch = cute.arch


class PlanRequest(NamedTuple):
    """What one plan is made from; uniform over the block.

    ``counts`` address of int32 [P, E]; ``homes`` address of int32 [2, E]: expert of every home slot, then home slot of
    every expert; ``resident`` address of int32 [P, s], copies held before, -1 for none, overwritten with those held
    afterwards; ``plan`` address of the plan's tables; ``source`` this rank; ``epoch`` launch number.
    """

    counts: Int64
    homes: Int64
    resident: Int64
    plan: Int64
    source: Int32
    epoch: Int32


class PlanOptions(NamedTuple):
    """Options of the reference planner and the gate's coefficients.

    ``transfer_cost``, ``penalty`` in blocks, Int32; ``block_ns``, ``replica_ns``, ``plan_ns`` Int64 nanoseconds and
    ``hidden_permille`` Int32 as in ``GateCosts`` of the core; ``block_ns`` = 0 leaves the gate out.
    """

    transfer_cost: Int32
    penalty: Int32
    block_ns: Int64
    replica_ns: Int64
    plan_ns: Int64
    hidden_permille: Int32


class Scratch(NamedTuple):
    """Shared memory of the block besides the candidates' states and ``SlotScratch``; int32 unless said otherwise.

    ``total`` [E] blocks by home slot; ``holds_copy`` [E, mask words] ranks with a resident copy; ``resident`` [P * s];
    ``expert_of``, ``home_of`` [E]; ``fixed_load`` [P]; ``results`` [8, 3] maximum load, transfers, replicas of each
    candidate; ``keys`` int64 [P * s] and ``order`` [P * s] of the pruning pass; ``num`` [1] replicas listed;
    ``remote``, ``incoming``, ``outgoing`` [P]; ``verdict`` [4] candidate, gated, maximum load, replicas.
    """

    total: cute.Tensor
    holds_copy: cute.Tensor
    resident: cute.Tensor
    expert_of: cute.Tensor
    home_of: cute.Tensor
    fixed_load: cute.Tensor
    results: cute.Tensor
    order: cute.Tensor
    num: cute.Tensor
    remote: cute.Tensor
    incoming: cute.Tensor
    outgoing: cute.Tensor
    verdict: cute.Tensor


def block_sizes(shape: SearchShape) -> dict[str, int]:
    """Words of each field of ``Scratch``."""
    experts, ranks, replicas = shape.num_experts, shape.num_ranks, max(1, shape.num_replicas)
    return {
        "total": experts,
        "holds_copy": experts * shape.mask_words,
        "resident": replicas,
        "expert_of": experts,
        "home_of": experts,
        "fixed_load": ranks,
        "results": 3 * NUM_CANDIDATES,
        "order": replicas,
        "num": 1,
        "remote": ranks,
        "incoming": ranks,
        "outgoing": ranks,
        "verdict": 4,
    }


CANDIDATE, GATED, MAX_LOAD, NUM_REPLICAS = range(4)


class PlanBlock:
    """Device code; one instance a shape. The block has ``threads`` threads, at least a warp a candidate."""

    def __init__(self, shape: SearchShape, threads: int = 256) -> None:
        self.shape, self.threads = shape, threads
        self.search, self.refine, self.slots = Search(shape), Refine(shape), Slots(shape, threads)
        self.num_words = (
            NUM_CANDIDATES * state_words(shape)
            + sum(block_sizes(shape).values())
            + sum(scratch_sizes(shape, threads).values())
        )
        self.num_keys = max(1, shape.num_replicas)
        if 4 * self.num_words + 8 * self.num_keys > MAX_SHARED_BYTES:
            raise ShapeError("num_experts", shape.num_experts, f"a state of at most {MAX_SHARED_BYTES} bytes a block")

    def views(self, base) -> tuple[Scratch, SlotScratch]:
        """The tensors of ``Scratch`` and ``SlotScratch`` behind the states in shared memory at ``base``."""
        at, groups = NUM_CANDIDATES * state_words(self.shape), []
        for kind, sizes in (
            (Scratch, block_sizes(self.shape)),
            (SlotScratch, scratch_sizes(self.shape, self.threads)),
        ):
            fields = []
            for size in sizes.values():
                fields.append(cute.make_tensor(base + at, cute.make_layout(size)))
                at += size
            groups.append(kind(*fields))
        return groups[0], groups[1]

    def state(self, base, candidate) -> SearchState:
        """The state of a candidate; takes an int or Int32."""
        return state_at(self.shape, base, candidate)

    @cute.jit
    def solve(self, base, keys: cute.Tensor, request: PlanRequest, options: PlanOptions, tid: Int32):
        """Plan ``request`` by the whole block: all stages in order.

        All tables are written by the block's threads when it returns, without a barrier.

        Args:
            base: shared-memory pointer to int32 [num_words].
            keys: int64 [num_keys] in shared memory.
            request: what to plan.
            options: options.
            tid: thread index.
        """
        self.prepare(base, request, tid)
        self.read(base, request, tid)
        self.run_searches(base, options, tid)
        self.choose(base, keys, options, tid)
        self.write(base, request, tid)

    @cute.jit
    def run_searches(self, base, options: PlanOptions, tid: Int32):
        """Steps 1 and 2, one warp a candidate; ends with a barrier."""
        sc, _ = self.views(base)
        warp, lane = tid // 32, tid % 32
        if const_expr(self.shape.num_replica_slots > 0):
            if warp < NUM_CANDIDATES:
                st, target = self.state(base, warp), self.target(sc, lane)
                opened, transfers = self.search.run(st, sc.holds_copy, target, options.transfer_cost, warp, lane)
                most = self.maximum(st.load, lane)
                if lane == 0:
                    sc.results[3 * warp] = most
                    sc.results[3 * warp + 1] = transfers
                    sc.results[3 * warp + 2] = opened
        if tid == 0:
            sc.num[0] = Int32(0)
        arch.sync_threads()

    @cute.jit
    def choose(self, base, keys: cute.Tensor, options: PlanOptions, tid: Int32):
        """Steps 3 to 6 and the gate: the winner's state, or the fixed placement in its stead; ends with a barrier."""
        sc, _ = self.views(base)
        winner, limit = self.winner(sc)
        st = self.state(base, winner)
        if const_expr(self.shape.num_replica_slots > 0):
            self.refine.list_keys(st, sc.holds_copy, sc.expert_of, keys, sc.num, tid, self.threads)
            arch.sync_threads()
            self.refine.sort_keys(keys, sc.num, sc.order, tid, self.threads)
            arch.sync_threads()
        if tid < 32:
            self.settle(st, sc, options, winner, limit, tid)
        arch.sync_threads()
        if sc.verdict[CANDIDATE] < 0:
            self.restore(st, sc, tid)
        arch.sync_threads()

    @cute.jit
    def write(self, base, request: PlanRequest, tid: Int32):
        """Step 7: the plan's tables and the copies held from now on."""
        sc, slot_scratch = self.views(base)
        tables = plan_tables(self.shape, request.plan)
        winner, _ = self.winner(sc)
        st = self.state(base, winner)
        if tid < 32:
            self.write_header(sc, tables, request, tid)
        copies = Copies(sc.resident, sc.holds_copy)
        self.slots.write(st, slot_scratch, tables, copies, sc.expert_of, sc.home_of, tid)
        held = words(request.resident, self.num_keys)
        for i in cutlass.range(tid, self.shape.num_replicas, self.threads):
            held[i] = sc.resident[i]

    # ---- input -----------------------------------------------------------------------------------------------------

    @cute.jit
    def prepare(self, base, request: PlanRequest, tid: Int32):
        """What does not depend on the counts: homes, copies held, empty states; ends with a barrier."""
        shape, threads = self.shape, self.threads
        sc, _ = self.views(base)
        homes, held = words(request.homes, 2 * shape.num_experts), words(request.resident, self.num_keys)
        for i in cutlass.range(tid, shape.num_experts, threads):
            sc.expert_of[i] = homes[i]
            sc.home_of[i] = homes[shape.num_experts + i]
        for i in cutlass.range(tid, shape.num_replicas, threads):
            sc.resident[i] = held[i]
        for i in cutlass.range(tid, shape.num_experts * shape.mask_words, threads):
            sc.holds_copy[i] = Int32(0)
        for candidate in cutlass.range_constexpr(NUM_CANDIDATES):
            self.clear(self.state(base, candidate), tid)
        arch.sync_threads()
        for i in cutlass.range(tid, shape.num_replicas, threads):
            if sc.resident[i] >= 0:
                rank = i // max(1, shape.num_replica_slots)
                at = sc.home_of[sc.resident[i]] * shape.mask_words + (rank >> 5)
                arch.atomic_or(sc.holds_copy.iterator + at, Int32(1) << (rank & 31), sem="relaxed", scope="cta")
        arch.sync_threads()

    @cute.jit
    def is_stale(self, base):
        """Int32, 1 if the copies that this rank holds are of weights before the present ones."""
        stale = Int32(0)
        if const_expr(self.shape.num_replicas > 0):
            if self.views(base)[0].resident[0] == STALE:
                stale = Int32(1)
        return stale

    @cute.jit
    def forget(self, base):
        """Hold no copy any more; by one thread, seldom."""
        sc, _ = self.views(base)
        for i in cutlass.range(self.shape.num_replicas, unroll=1):
            sc.resident[i] = Int32(-1)
        for i in cutlass.range(self.shape.num_experts * self.shape.mask_words, unroll=1):
            sc.holds_copy[i] = Int32(0)

    @cute.jit
    def clear(self, st: SearchState, tid: Int32):
        """No replicas, by the block."""
        for i in cutlass.range(tid, self.shape.num_experts * self.shape.mask_words, self.threads):
            st.holders[i] = Int32(0)
        for i in cutlass.range(tid, self.shape.num_ranks, self.threads):
            st.used[i] = Int32(0)
        for i in cutlass.range(tid, self.shape.num_replicas, self.threads):
            st.entry_home[i] = Int32(-1)
            st.entry_blocks[i] = Int32(0)

    @cute.jit
    def read(self, base, request: PlanRequest, tid: Int32):
        """Counts to blocks and fixed loads, in every state; ends with a barrier."""
        shape, threads = self.shape, self.threads
        sc, _ = self.views(base)
        tables = plan_tables(shape, request.plan)
        counts = words(request.counts, shape.num_ranks * shape.num_experts)
        for expert in cutlass.range(tid, shape.num_experts, threads):
            rows, before = Int32(0), Int32(0)
            for source in cutlass.range(shape.num_ranks, unroll=8):
                num = counts[source * shape.num_experts + expert]
                rows += num
                if source < request.source:
                    before += num
            tables.expert_rows[expert] = rows
            tables.source_base[expert] = before
            blocks, home = (rows + shape.block_rows - 1) // shape.block_rows, sc.home_of[expert]
            sc.total[home] = blocks
            self.set_home(base, home, blocks)
        arch.sync_threads()
        warp, lane = tid // 32, tid % 32
        for rank in cutlass.range(warp, shape.num_ranks, threads // 32):
            load = Int32(0)
            for i in cutlass.range(lane, shape.experts_per_rank, 32):
                load += sc.total[rank * shape.experts_per_rank + i]
            load = arch.warp_redux_sync(load, "add")
            if lane == 0:
                sc.fixed_load[rank] = load
                self.set_load(base, rank, load)
        arch.sync_threads()

    @cute.jit
    def set_home(self, base, home: Int32, blocks: Int32):
        """Blocks of an expert at home, in every state."""
        for candidate in cutlass.range_constexpr(NUM_CANDIDATES):
            st = self.state(base, candidate)
            st.home_blocks[home] = blocks

    @cute.jit
    def set_load(self, base, rank: Int32, load: Int32):
        """Load of a rank, in every state."""
        for candidate in cutlass.range_constexpr(NUM_CANDIDATES):
            st = self.state(base, candidate)
            st.load[rank] = load

    @cute.jit
    def all_blocks(self, sc: Scratch, lane: Int32):
        """Blocks of all ranks, by a warp."""
        mine = Int32(0)
        for rank in cutlass.range(lane, self.shape.num_ranks, 32):
            mine += sc.fixed_load[rank]
        return arch.warp_redux_sync(mine, "add")

    @cute.jit
    def target(self, sc: Scratch, lane: Int32):
        """tau = ceil(sum(b) / P)."""
        return (self.all_blocks(sc, lane) + self.shape.num_ranks - 1) // self.shape.num_ranks

    @cute.jit
    def maximum(self, values: cute.Tensor, lane: Int32):
        """Largest of int32 [P], by a warp."""
        most = Int32(0)
        for rank in cutlass.range(lane, self.shape.num_ranks, 32):
            most = cutlass.max(most, values[rank])
        return arch.warp_redux_sync(most, "max")

    @cute.jit
    def restore(self, st: SearchState, sc: Scratch, tid: Int32):
        """Back to the no-replica assignment, by the block."""
        self.clear(st, tid)
        for i in cutlass.range(tid, self.shape.num_experts, self.threads):
            st.home_blocks[i] = sc.total[i]

    # ---- verdict ---------------------------------------------------------------------------------------------------

    @cute.jit
    def winner(self, sc: Scratch):
        """Candidate with the smallest (maximum load, transfers, replicas, index), and that maximum; by every thread."""
        best, load, transfers, replicas = Int32(0), Int32(0), Int32(0), Int32(0)
        if const_expr(self.shape.num_replica_slots > 0):
            load, transfers, replicas = sc.results[0], sc.results[1], sc.results[2]
            for i in cutlass.range_constexpr(1, NUM_CANDIDATES):
                a, b, c = sc.results[3 * i], sc.results[3 * i + 1], sc.results[3 * i + 2]
                fewer = (b < transfers) | ((b == transfers) & (c < replicas))
                if (a < load) | ((a == load) & fewer):
                    best, load, transfers, replicas = Int32(i), a, b, c
        return best, load

    @cute.jit
    def settle(self, st: SearchState, sc: Scratch, options: PlanOptions, winner: Int32, limit: Int32, lane: Int32):
        """Refine the winner and decide between it and the fixed placement; by one warp, result in ``verdict``."""
        fixed = self.maximum(sc.fixed_load, lane)
        candidate, gated, replicas, load = Int32(-1), Int32(0), Int32(0), fixed
        if const_expr(self.shape.num_replica_slots > 0):
            self.refine.prune(st, sc.order, sc.num[0], limit, lane)
            self.refine.refine(st, sc.expert_of, sc.home_of, lane)
            worthwhile = Boolean(True)
            if options.penalty > 0:
                worthwhile = self.refine.prune_for_reduction(st, sc.remote, options.penalty, lane) < fixed
            found = self.count_replicas(st, lane)
            load = self.maximum(st.load, lane)
            if worthwhile & (found > 0):
                candidate, replicas = winner, found
                if options.block_ns > 0:
                    exposed = self.exposed_ns(st, sc, options, lane)
                    if Int64(fixed - load) * options.block_ns <= options.plan_ns + exposed:
                        candidate, gated, replicas = Int32(-1), Int32(1), Int32(0)
            if candidate < 0:
                load = fixed
        if lane == 0:
            sc.verdict[CANDIDATE] = candidate
            sc.verdict[GATED] = gated
            sc.verdict[MAX_LOAD] = load
            sc.verdict[NUM_REPLICAS] = replicas

    @cute.jit
    def count_replicas(self, st: SearchState, lane: Int32):
        """Replicas in use."""
        mine = Int32(0)
        for entry in cutlass.range(lane, self.shape.num_replicas, 32):
            if st.entry_home[entry] >= 0:
                mine += 1
        return arch.warp_redux_sync(mine, "add")

    @cute.jit
    def exposed_ns(self, st: SearchState, sc: Scratch, options: PlanOptions, lane: Int32):
        """Transfer time that computing does not hide: of the rank that receives or sends most replicas."""
        for rank in cutlass.range(lane, self.shape.num_ranks, 32):
            sc.incoming[rank] = Int32(0)
            sc.outgoing[rank] = Int32(0)
        arch.sync_warp()
        for entry in cutlass.range(lane, self.shape.num_replicas, 32):
            home = st.entry_home[entry]
            if home >= 0:
                rank = entry // self.shape.num_replica_slots
                if ((sc.holds_copy[home * self.shape.mask_words + (rank >> 5)] >> (rank & 31)) & 1) == 0:
                    owner = home // self.shape.experts_per_rank
                    arch.atomic_add(sc.incoming.iterator + rank, Int32(1), sem="relaxed", scope="cta")
                    arch.atomic_add(sc.outgoing.iterator + owner, Int32(1), sem="relaxed", scope="cta")
        arch.sync_warp()
        most = cutlass.max(self.maximum(sc.incoming, lane), self.maximum(sc.outgoing, lane))
        return Int64(most) * options.replica_ns * Int64(1000 - options.hidden_permille) // 1000

    @cute.jit
    def write_header(self, sc: Scratch, tables: PlanTables, request: PlanRequest, lane: Int32):
        """The plan's header, by one warp."""
        fixed, blocks = self.maximum(sc.fixed_load, lane), self.all_blocks(sc, lane)
        if lane == 0:
            tables.header[int(Header.CANDIDATE)] = sc.verdict[CANDIDATE]
            tables.header[int(Header.GATED)] = sc.verdict[GATED]
            tables.header[int(Header.MAX_LOAD)] = sc.verdict[MAX_LOAD]
            tables.header[int(Header.FIXED_MAX_LOAD)] = fixed
            tables.header[int(Header.NUM_BLOCKS)] = blocks
            tables.header[int(Header.NUM_REPLICAS)] = sc.verdict[NUM_REPLICAS]
            tables.header[int(Header.EPOCH)] = request.epoch


__all__ = ["PlanBlock", "PlanOptions", "PlanRequest"]
