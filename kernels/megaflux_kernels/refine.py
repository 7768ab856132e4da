"""What follows the search: pruning, single-block moves, reduction-aware pruning (steps 4 to 6 of the reference
planner).

Decides on the selected candidate only, in place. ``order`` is done by the whole block, the passes by one warp.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from megaflux_kernels.layout import SearchShape
from megaflux_kernels.search import NONE, RANK_BITS, SearchState

arch = cute.arch

REFINE_MOVES_PER_RANK = 4
"""Bound of the single-block pass, as in the reference planner."""


class Refine:
    """Device code; one instance a shape."""

    def __init__(self, shape: SearchShape) -> None:
        self.shape = shape

    # ---- step 4: pruning -------------------------------------------------------------------------------------------

    @cute.jit
    def list_keys(
        self,
        st: SearchState,
        resident: cute.Tensor,
        expert_of: cute.Tensor,
        keys: cute.Tensor,
        num: cute.Tensor,
        tid: Int32,
        threads: cutlass.Constexpr,
    ):
        """Append the sort key of every replica in use to ``keys``, in any order; the block calls it with ``num[0]`` =
        0.

        A key is (resident, blocks, expert, entry), most significant first; entries of an expert go by rank.
        """
        entries, slots = self.shape.num_replicas, self.shape.num_replica_slots
        for entry in cutlass.range(tid, entries, threads):
            home = st.entry_home[entry]
            if home >= 0:
                rank = entry // slots
                held = (resident[home * self.shape.mask_words + (rank >> 5)] >> (rank & 31)) & 1
                key = (Int64(held) << 44) | (Int64(st.entry_blocks[entry]) << 21)
                at = arch.atomic_add(num.iterator, Int32(1), sem="relaxed", scope="cta")
                keys[at] = key | Int64((expert_of[home] << 11) | entry)

    @cute.jit
    def sort_keys(
        self, keys: cute.Tensor, num: cute.Tensor, order: cute.Tensor, tid: Int32, threads: cutlass.Constexpr
    ):
        """Entries by ascending key into ``order``: a key's place is the number of smaller ones. By the whole block."""
        count = num[0]
        for i in cutlass.range(tid, count, threads):
            key, place = keys[i], Int32(0)
            for j in cutlass.range(count):
                if keys[j] < key:
                    place += 1
            order[place] = Int32(key & 2047)

    @cute.jit
    def prune(self, st: SearchState, order: cute.Tensor, count: Int32, limit: Int32, lane: Int32):
        """Close replicas whose blocks fit elsewhere under ``limit``: at the owner, else at the least loaded copy."""
        own, slots = self.shape.experts_per_rank, self.shape.num_replica_slots
        for i in cutlass.range(count):
            entry = order[i]
            rank, home, blocks = entry // slots, st.entry_home[entry], st.entry_blocks[entry]
            owner, target, at_home = home // own, Int32(-1), Boolean(False)
            if st.load[owner] + blocks <= limit:
                target, at_home = owner, Boolean(True)
            else:
                best = Int32(NONE)
                for word in cutlass.range_constexpr(self.shape.mask_words):
                    copy = lane + 32 * word
                    if copy < self.shape.num_ranks:
                        holds = ((st.holders[home * self.shape.mask_words + word] >> lane) & 1) != 0
                        load = st.load[copy]
                        if holds & (copy != rank) & (load + blocks <= limit):
                            best = cutlass.min(best, (load << RANK_BITS) | copy)
                best = arch.warp_redux_sync(best, "min")
                if best != NONE:
                    target = best & 127
            if target >= 0:
                other = Int32(0)
                if not at_home:
                    other = self.entry_of(st, home, target, lane)
                arch.sync_warp()
                if lane == 0:
                    if at_home:
                        st.home_blocks[home] = st.home_blocks[home] + blocks
                    else:
                        st.entry_blocks[other] = st.entry_blocks[other] + blocks
                    st.load[target] = st.load[target] + blocks
                    st.load[rank] = st.load[rank] - blocks
                    self.close(st, home, rank, entry)
            arch.sync_warp()

    @cute.jit
    def entry_of(self, st: SearchState, home: Int32, rank: Int32, lane: Int32):
        """The entry in which ``rank`` holds a replica of the expert; there must be one."""
        slots, found = self.shape.num_replica_slots, Boolean(False)
        if lane < slots:
            found = st.entry_home[rank * slots + lane] == home
        votes = arch.vote_ballot_sync(found)
        return rank * slots + arch.popc(~votes & (votes - 1))

    @cute.jit
    def close(self, st: SearchState, home: Int32, rank: Int32, entry: Int32):
        """One lane: free an entry that computes nothing any more."""
        at = home * self.shape.mask_words + (rank >> 5)
        st.entry_home[entry] = Int32(-1)
        st.entry_blocks[entry] = Int32(0)
        st.holders[at] = st.holders[at] & ~(Int32(1) << (rank & 31))

    # ---- step 5: single blocks -------------------------------------------------------------------------------------

    @cute.jit
    def extremes(self, st: SearchState, lane: Int32):
        """(most loaded rank, its load, least loaded rank, its load), ties to the lower rank."""
        high, low = Int32(-1), Int32(NONE)
        for word in cutlass.range_constexpr(self.shape.mask_words):
            rank = lane + 32 * word
            if rank < self.shape.num_ranks:
                load = st.load[rank] << RANK_BITS
                high = cutlass.max(high, load | (127 - rank))
                low = cutlass.min(low, load | rank)
        high, low = arch.warp_redux_sync(high, "max"), arch.warp_redux_sync(low, "min")
        return 127 - (high & 127), high >> RANK_BITS, low & 127, low >> RANK_BITS

    @cute.jit
    def refine(self, st: SearchState, expert_of: cute.Tensor, home_of: cute.Tensor, lane: Int32):
        """Move single blocks from the most to the least loaded rank, where both hold a copy of the expert."""
        own, slots = self.shape.experts_per_rank, self.shape.num_replica_slots
        moves, going = Int32(0), Boolean(True)
        while going & (moves < REFINE_MOVES_PER_RANK * self.shape.num_ranks):
            high, most, low, least = self.extremes(st, lane)
            blocks, expert = Int32(0), Int32(NONE)
            other_blocks, other = Int32(0), Int32(NONE)
            if lane < slots:
                home = st.entry_home[low * slots + lane]  # a replica on the least loaded rank, of the most loaded one
                if home >= 0:
                    if home // own == high:
                        blocks, expert = st.home_blocks[home], expert_of[home]
                home = st.entry_home[high * slots + lane]  # a replica on the most loaded rank, of which low has a copy
                if home >= 0:
                    holds = ((st.holders[home * self.shape.mask_words + (low >> 5)] >> (low & 31)) & 1) != 0
                    if holds | (home // own == low):
                        other_blocks, other = st.entry_blocks[high * slots + lane], expert_of[home]
            top = arch.warp_redux_sync(cutlass.max(blocks, other_blocks), "max")
            first = Int32(NONE)
            if blocks == top:
                first = expert
            if other_blocks == top:
                first = cutlass.min(first, other)
            first = arch.warp_redux_sync(first, "min")
            going = (most - least > 1) & (top > 0)
            if going:
                self.move_one(st, home_of[first], high, low, lane)
                moves += 1

    @cute.jit
    def move_one(self, st: SearchState, home: Int32, high: Int32, low: Int32, lane: Int32):
        """Move one block of an expert between two ranks that hold it, by the whole warp."""
        owner, source, destination = home // self.shape.experts_per_rank, Int32(0), Int32(0)
        if owner != high:
            source = self.entry_of(st, home, high, lane)
        if owner != low:
            destination = self.entry_of(st, home, low, lane)
        arch.sync_warp()
        if lane == 0:
            if owner == high:
                st.home_blocks[home] = st.home_blocks[home] - 1
            else:
                st.entry_blocks[source] = st.entry_blocks[source] - 1
                if st.entry_blocks[source] == 0:
                    self.close(st, home, high, source)
            if owner == low:
                st.home_blocks[home] = st.home_blocks[home] + 1
            else:
                st.entry_blocks[destination] = st.entry_blocks[destination] + 1
            st.load[high] = st.load[high] - 1
            st.load[low] = st.load[low] + 1
        arch.sync_warp()

    # ---- step 6: reduction-aware pruning ---------------------------------------------------------------------------

    @cute.jit
    def prune_for_reduction(self, st: SearchState, remote: cute.Tensor, penalty: Int32, lane: Int32):
        """Return the smallest replica of the costliest owner while it is smaller than lambda (appendix A.2).

        Args:
            st: state.
            remote: int32 [P] scratch: remote replicas of each rank's experts, n_r of Eq. 5.
            penalty: lambda in blocks.
            lane: lane.

        Returns:
            The largest load + lambda * n_r at the end.
        """
        slots, own = self.shape.num_replica_slots, self.shape.experts_per_rank
        self.count_remote(st, remote, lane)
        cost, going = Int32(0), Boolean(True)
        while going:
            top = Int32(-1)
            for word in cutlass.range_constexpr(self.shape.mask_words):
                rank = lane + 32 * word
                if rank < self.shape.num_ranks:
                    top = cutlass.max(top, ((st.load[rank] + penalty * remote[rank]) << RANK_BITS) | (127 - rank))
            top = arch.warp_redux_sync(top, "max")
            owner, cost = 127 - (top & 127), top >> RANK_BITS
            blocks, tie = Int32(NONE), Int32(NONE)
            for entry in cutlass.range(lane, self.shape.num_replicas, 32):
                home = st.entry_home[entry]
                if home >= 0:
                    if home // own == owner:
                        key, here = ((home - owner * own) << 11) | entry, st.entry_blocks[entry]
                        if (here < blocks) | ((here == blocks) & (key < tie)):
                            blocks, tie = here, key
            least = arch.warp_redux_sync(blocks, "min")
            if blocks != least:
                tie = Int32(NONE)
            tie = arch.warp_redux_sync(tie, "min")
            going = least < penalty
            if going:
                entry, home = tie & 2047, owner * own + (tie >> 11)
                rank = entry // slots
                arch.sync_warp()
                if lane == 0:
                    st.home_blocks[home] = st.home_blocks[home] + least
                    st.load[owner] = st.load[owner] + least
                    st.load[rank] = st.load[rank] - least
                    remote[owner] = remote[owner] - 1
                    self.close(st, home, rank, entry)
            arch.sync_warp()
        return cost

    @cute.jit
    def count_remote(self, st: SearchState, remote: cute.Tensor, lane: Int32):
        """Remote replicas of each rank's experts into ``remote`` [P]."""
        for rank in cutlass.range(lane, self.shape.num_ranks, 32):
            remote[rank] = Int32(0)
        arch.sync_warp()
        for entry in cutlass.range(lane, self.shape.num_replicas, 32):
            home = st.entry_home[entry]
            if home >= 0:
                owner = home // self.shape.experts_per_rank
                arch.atomic_add(remote.iterator + owner, Int32(1), sem="relaxed", scope="cta")
        arch.sync_warp()


__all__ = ["REFINE_MOVES_PER_RANK", "Refine"]
