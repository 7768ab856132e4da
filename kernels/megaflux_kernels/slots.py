"""From the chosen allocation to the plan's tables: slots, transfers, pool positions, segments (step 7).

Decides which replica slot an expert takes and in which order blocks lie in a rank's pool, as ``assign_slots`` of the
reference planner and ``map_blocks`` of the reference routes do. Every function is called by the whole block, between
barriers; tables are those of ``layout.PlanLayout``.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from megaflux_kernels.layout import SearchShape
from megaflux_kernels.search import NONE, SearchState

arch = cute.arch


class PlanTables(NamedTuple):
    """The plan's regions as int32 tensors in global memory, fields as in ``layout.PlanLayout``."""

    header: cute.Tensor
    slot_blocks: cute.Tensor
    slot_base: cute.Tensor
    replica_experts: cute.Tensor
    loads: cute.Tensor
    transfers: cute.Tensor
    transfer_first: cute.Tensor
    expert_rows: cute.Tensor
    source_base: cute.Tensor
    segment_first: cute.Tensor
    segment_end: cute.Tensor
    segment_place: cute.Tensor
    segment_base: cute.Tensor


def plan_tables(shape: SearchShape, plan) -> PlanTables:
    """Views into a plan.

    Args:
        shape: compile-time shape.
        plan: Int64 address of the plan, 16-byte aligned.
    """
    fields = []
    for first, size in shape.plan.words.values():
        pointer = cute.make_ptr(Int32, plan + 4 * first, cute.AddressSpace.gmem, assumed_align=4)
        fields.append(cute.make_tensor(pointer, cute.make_layout(max(1, size))))
    return PlanTables(*fields)


class Copies(NamedTuple):
    """Copies held before, int32 in shared memory.

    ``resident`` [P * s] expert in each replica slot, -1 for none; ``holds_copy`` [E, mask words] the same as sets of
    ranks by home slot.
    """

    resident: cute.Tensor
    holds_copy: cute.Tensor


class SlotScratch(NamedTuple):
    """Shared memory of this stage, int32.

    ``slot_blocks``, ``slot_base`` [P * s] of replica slots; ``slot_new`` [P * s] expert that must be transferred, -1
    for none; ``entry_slot`` [P * s] slot, within its rank, of a search entry; ``free_slot`` [P * s] free slots of a
    rank in the order in which they are taken; ``home_base`` [E] pool position of home slots; ``transfer_first``
    [P + 1]; ``segment_first`` [E + 1]; ``segment_blocks``, ``segment_base`` [E + P * s]; ``warp_sums`` [warps].
    """

    slot_blocks: cute.Tensor
    slot_base: cute.Tensor
    slot_new: cute.Tensor
    entry_slot: cute.Tensor
    free_slot: cute.Tensor
    home_base: cute.Tensor
    transfer_first: cute.Tensor
    segment_first: cute.Tensor
    segment_blocks: cute.Tensor
    segment_base: cute.Tensor
    warp_sums: cute.Tensor


def scratch_sizes(shape: SearchShape, threads: int) -> dict[str, int]:
    """Words of each field of ``SlotScratch``."""
    replicas = max(1, shape.num_replicas)
    return {
        "slot_blocks": replicas,
        "slot_base": replicas,
        "slot_new": replicas,
        "entry_slot": replicas,
        "free_slot": replicas,
        "home_base": shape.num_experts,
        "transfer_first": shape.num_ranks + 1,
        "segment_first": shape.num_experts + 1,
        "segment_blocks": shape.num_segments,
        "segment_base": shape.num_segments,
        "warp_sums": threads // 32,
    }


@cute.jit
def warp_prefix(value: Int32, lane: Int32):
    """Inclusive prefix sum over the warp."""
    for step in cutlass.range_constexpr(5):
        other = arch.shuffle_sync_up(value, 1 << step)
        if lane >= (1 << step):
            value += other
    return value


class Slots:
    """Device code; one instance a shape and block size."""

    def __init__(self, shape: SearchShape, threads: int) -> None:
        self.shape, self.threads = shape, threads

    @cute.jit
    def write(
        self,
        st: SearchState,
        sc: SlotScratch,
        tables: PlanTables,
        copies: Copies,
        expert_of: cute.Tensor,
        home_of: cute.Tensor,
        tid: Int32,
    ):
        """Write every table but header, rows and sources; ``copies.resident`` becomes ``replica_experts``."""
        warp, lane = tid // 32, tid % 32
        if cutlass.const_expr(self.shape.num_replica_slots > 0):
            for rank in cutlass.range(warp, self.shape.num_ranks, self.threads // 32):
                self.assign(st, sc, tables, copies, expert_of, rank, lane)
        else:
            for rank in cutlass.range(tid, self.shape.num_ranks, self.threads):
                sc.transfer_first[rank + 1] = Int32(0)
        arch.sync_threads()
        if warp == 0:
            self.sum_transfers(sc, tables, lane)
        for rank in cutlass.range(warp, self.shape.num_ranks, self.threads // 32):
            self.place_slots(st, sc, tables, rank, lane)
        self.count_segments(st, sc, tables, home_of, tid)  # ends with a barrier
        self.list_transfers(sc, tables, tid)
        self.fill_segments(st, sc, tables, expert_of, tid)
        arch.sync_threads()
        self.close_segments(sc, tables, tid)

    # ---- slots and transfers ---------------------------------------------------------------------------------------

    @cute.jit
    def assign(
        self,
        st: SearchState,
        sc: SlotScratch,
        tables: PlanTables,
        copies: Copies,
        expert_of: cute.Tensor,
        rank: Int32,
        lane: Int32,
    ):
        """Slots of one rank by one warp; lane i stands for entry i and for slot i.

        Residents in use keep their slots; new replicas, by expert id, take empty slots, then those of residents that
        are not used, each by index.
        """
        slots = self.shape.num_replica_slots
        base, at = rank * slots, rank * slots + lane
        expert, held, blocks, stays = Int32(-1), Int32(-1), Int32(0), Boolean(False)
        if lane < slots:
            held = copies.resident[at]
            sc.slot_new[at] = Int32(-1)
            sc.slot_blocks[at] = Int32(0)
            home = st.entry_home[at]
            if home >= 0:
                expert, blocks = expert_of[home], st.entry_blocks[at]
                stays = ((copies.holds_copy[home * self.shape.mask_words + (rank >> 5)] >> (rank & 31)) & 1) != 0
        arch.sync_warp()
        slot = Int32(-1)
        if stays:
            for i in cutlass.range(slots):
                if copies.resident[base + i] == expert:
                    slot = i
            sc.slot_blocks[base + slot] = blocks
        arch.sync_warp()
        below, free = Int32(arch.lanemask_lt()), Boolean(False)
        if lane < slots:
            free = sc.slot_blocks[at] == 0
        empty, spare = arch.vote_ballot_sync(free & (held < 0)), arch.vote_ballot_sync(free & (held >= 0))
        if free:
            turn = arch.popc(empty & below)
            if held >= 0:
                turn = arch.popc(empty) + arch.popc(spare & below)
            sc.free_slot[base + turn] = lane
        newcomer, order = Int32(NONE), Int32(0)
        if (expert >= 0) & (not stays):
            newcomer = expert
        for i in cutlass.range_constexpr(slots):
            if arch.shuffle_sync(newcomer, i) < newcomer:
                order += 1
        arch.sync_warp()
        if newcomer != NONE:
            slot = sc.free_slot[base + order]
            sc.slot_new[base + slot] = expert
            sc.slot_blocks[base + slot] = blocks
        arch.sync_warp()
        num_new = arch.popc(arch.vote_ballot_sync(newcomer != NONE))
        if lane < slots:
            sc.entry_slot[at] = slot
            after = held
            if sc.slot_new[at] >= 0:
                after = sc.slot_new[at]
            tables.replica_experts[at] = after
            copies.resident[at] = after
        if lane == 0:
            sc.transfer_first[rank + 1] = num_new

    @cute.jit
    def sum_transfers(self, sc: SlotScratch, tables: PlanTables, lane: Int32):
        """One warp: transfers of each rank become the index of each rank's first."""
        before = Int32(0)
        for word in cutlass.range_constexpr(self.shape.mask_words):
            rank = lane + 32 * word
            num = Int32(0)
            if rank < self.shape.num_ranks:
                num = sc.transfer_first[rank + 1]
            upto = before + warp_prefix(num, lane)
            if rank < self.shape.num_ranks:
                sc.transfer_first[rank + 1] = upto
                tables.transfer_first[rank + 1] = upto
            before = arch.shuffle_sync(upto, 31)
        if lane == 0:
            sc.transfer_first[0] = Int32(0)
            tables.transfer_first[0] = Int32(0)

    @cute.jit
    def list_transfers(self, sc: SlotScratch, tables: PlanTables, tid: Int32):
        """Rows of the transfer table, one warp a rank and one lane a slot."""
        slots, lane = self.shape.num_replica_slots, tid % 32
        for rank in cutlass.range(tid // 32, self.shape.num_ranks, self.threads // 32):
            expert = Int32(-1)
            if lane < slots:
                expert = sc.slot_new[rank * slots + lane]
            moved = arch.vote_ballot_sync(expert >= 0)
            if expert >= 0:
                at = sc.transfer_first[rank] + arch.popc(moved & Int32(arch.lanemask_lt()))
                tables.transfers[3 * at] = expert
                tables.transfers[3 * at + 1] = rank
                tables.transfers[3 * at + 2] = lane

    # ---- pool positions --------------------------------------------------------------------------------------------

    @cute.jit
    def place_slots(self, st: SearchState, sc: SlotScratch, tables: PlanTables, rank: Int32, lane: Int32):
        """Blocks and first pool position of every slot of one rank, by one warp."""
        own, slots, width = self.shape.experts_per_rank, self.shape.num_replica_slots, self.shape.slots_per_rank
        before = Int32(0)
        for base in cutlass.range(0, width, 32):
            index, blocks = base + lane, Int32(0)
            if index < own:
                blocks = st.home_blocks[rank * own + index]
            elif index < width:
                blocks = sc.slot_blocks[rank * slots + index - own]
            upto = before + warp_prefix(blocks, lane)
            if index < width:
                tables.slot_blocks[rank * width + index] = blocks
                tables.slot_base[rank * width + index] = upto - blocks
                if index < own:
                    sc.home_base[rank * own + index] = upto - blocks
                else:
                    sc.slot_base[rank * slots + index - own] = upto - blocks
            before = arch.shuffle_sync(upto, 31)
        if lane == 0:
            tables.loads[rank] = before

    # ---- segments --------------------------------------------------------------------------------------------------

    @cute.jit
    def count_segments(self, st: SearchState, sc: SlotScratch, tables: PlanTables, home_of: cute.Tensor, tid: Int32):
        """First segment of every expert: an exclusive prefix sum of its homes and replicas over the block."""
        words, warp, lane = self.shape.mask_words, tid // 32, tid % 32
        each = -(-self.shape.num_experts // self.threads)
        mine = Int32(0)
        for i in cutlass.range_constexpr(each):
            expert = tid * each + i
            if expert < self.shape.num_experts:
                mine += 1
                for word in cutlass.range_constexpr(words):
                    mine += arch.popc(st.holders[home_of[expert] * words + word])
        upto = warp_prefix(mine, lane)
        if lane == 31:
            sc.warp_sums[warp] = upto
        arch.sync_threads()
        at = upto - mine
        for i in cutlass.range_constexpr(self.threads // 32):
            num = sc.warp_sums[i]
            if i < warp:
                at += num
        for i in cutlass.range_constexpr(each):
            expert = tid * each + i
            if expert < self.shape.num_experts:
                sc.segment_first[expert] = at
                tables.segment_first[expert] = at
                at += 1
                for word in cutlass.range_constexpr(words):
                    at += arch.popc(st.holders[home_of[expert] * words + word])
                if expert == self.shape.num_experts - 1:
                    sc.segment_first[expert + 1] = at
                    tables.segment_first[expert + 1] = at
        arch.sync_threads()

    @cute.jit
    def ranks_below(self, st: SearchState, home: Int32, rank: Int32):
        """How many ranks that compute an expert, its home included, are below ``rank``."""
        words, num = self.shape.mask_words, Int32(0)
        for word in cutlass.range_constexpr(words):
            mask = st.holders[home * words + word]
            if (rank >> 5) == word:
                mask = mask & ((Int32(1) << (rank & 31)) - 1)
            if (rank >> 5) < word:
                mask = Int32(0)
            num += arch.popc(mask)
        if home // self.shape.experts_per_rank < rank:
            num += 1
        return num

    @cute.jit
    def fill_segments(self, st: SearchState, sc: SlotScratch, tables: PlanTables, expert_of: cute.Tensor, tid: Int32):
        """Place, blocks and pool position of every segment, one thread a segment."""
        own, slots = self.shape.experts_per_rank, self.shape.num_replica_slots
        for home in cutlass.range(tid, self.shape.num_experts, self.threads):
            rank = home // own
            at = sc.segment_first[expert_of[home]] + self.ranks_below(st, home, rank)
            tables.segment_place[at] = (rank << 16) | (home - rank * own)
            sc.segment_blocks[at] = st.home_blocks[home]
            sc.segment_base[at] = sc.home_base[home]
        for entry in cutlass.range(tid, self.shape.num_replicas, self.threads):
            home = st.entry_home[entry]
            if home >= 0:
                rank, slot = entry // slots, sc.entry_slot[entry]
                at = sc.segment_first[expert_of[home]] + self.ranks_below(st, home, rank)
                tables.segment_place[at] = (rank << 16) | (own + slot)
                sc.segment_blocks[at] = st.entry_blocks[entry]
                sc.segment_base[at] = sc.slot_base[rank * slots + slot]

    @cute.jit
    def close_segments(self, sc: SlotScratch, tables: PlanTables, tid: Int32):
        """End of every segment in blocks of its expert, and its pool position relative to the expert's block 0."""
        for expert in cutlass.range(tid, self.shape.num_experts, self.threads):
            end = Int32(0)
            for at in cutlass.range(sc.segment_first[expert], sc.segment_first[expert + 1]):
                tables.segment_base[at] = sc.segment_base[at] - end
                end += sc.segment_blocks[at]
                tables.segment_end[at] = end


__all__ = ["Copies", "PlanTables", "SlotScratch", "Slots", "plan_tables", "scratch_sizes", "warp_prefix"]
