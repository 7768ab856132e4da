"""The greedy search of one candidate by one warp (MegaFlux appendix A.1, step 2 of the reference planner).

Decides which blocks leave which owner for which replica. Knows neither where the counts came from nor what becomes of
the result. Equal to ``_Search.run`` of the reference planner, move for move.

State is compact, so that 512 experts on 72 ranks fit: blocks that stay at home, one entry for each replica slot, and
for every expert the set of ranks that hold a replica. Experts are numbered by home slot, ``h = home rank * E/P + home
index``, so that the owner is ``h // (E/P)`` and the order within an owner is the order of expert ids. Everything
lives in shared memory; all lanes of the warp take the same decisions from warp-wide reductions, and lane 0 writes.

Reductions order (value, tie) pairs by packing them into one positive int32, which the bounds of ``layout`` allow.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from megaflux_kernels.layout import SearchShape

arch = cute.arch

NONE = 0x7FFFFFFF
"""Key of a lane that has nothing to offer to a minimum."""
RANK_BITS = 7
IS_NEW = 1 << 30
"""Bit of a receiver's key: copies that are not new come first."""
NUM_CANDIDATES = 8
"""As many as the reference planner's ``CANDIDATES``, in that order."""


class SearchState(NamedTuple):
    """One candidate's state in shared memory, all int32.

    ``home_blocks`` [E] blocks at home; ``holders`` [E, mask words] ranks with a replica that computes; ``load`` [P]
    blocks; ``used`` [P] replica slots taken; ``entry_home`` [P * s] home slot of the expert in an entry, -1 for a free
    one; ``entry_blocks`` [P * s] blocks there; ``donor_key`` [P] priority of donors still to visit in this round.
    """

    home_blocks: cute.Tensor
    holders: cute.Tensor
    load: cute.Tensor
    used: cute.Tensor
    entry_home: cute.Tensor
    entry_blocks: cute.Tensor
    donor_key: cute.Tensor


def state_sizes(shape: SearchShape) -> dict[str, int]:
    """Words of each field of ``SearchState``."""
    entries, ranks = max(1, shape.num_replicas), shape.num_ranks
    return {
        "home_blocks": shape.num_experts,
        "holders": shape.num_experts * shape.mask_words,
        "load": ranks,
        "used": ranks,
        "entry_home": entries,
        "entry_blocks": entries,
        "donor_key": ranks,
    }


def state_words(shape: SearchShape) -> int:
    """Words of one candidate's state."""
    return sum(state_sizes(shape).values())


def state_at(shape: SearchShape, states, candidate) -> SearchState:
    """The state of a candidate within the array of all.

    Args:
        shape: compile-time shape.
        states: shared-memory pointer to int32 [NUM_CANDIDATES * state_words].
        candidate: index, Int32 or int.
    """
    fields, at = [], candidate * state_words(shape)
    for size in state_sizes(shape).values():
        fields.append(cute.make_tensor(states + at, cute.make_layout(size)))
        at = at + size
    return SearchState(*fields)


class Options(NamedTuple):
    """Run-time options of a search, uniform over its warp.

    ``target`` tau, blocks; ``transfer_cost`` blocks that a new copy must win beyond; both Int32. ``multiple`` new
    copies of an expert may be opened in a visit, not one; ``anew`` every copy is new, else those that are not resident,
    and residents come first; both Boolean.
    """

    target: Int32
    transfer_cost: Int32
    multiple: Boolean
    anew: Boolean


class Search:
    """Device code; one instance a shape. Without replica slots there is nothing to search."""

    def __init__(self, shape: SearchShape) -> None:
        self.shape = shape
        self.index_bits = (shape.experts_per_rank - 1).bit_length()  # 8 at most: see ``layout.MAX_HOME_SLOTS``

    @cute.jit
    def run(
        self,
        st: SearchState,
        resident: cute.Tensor,
        target: Int32,
        transfer_cost: Int32,
        candidate: Int32,
        lane: Int32,
    ):
        """Rounds of donor visits, at most s + 2.

        Args:
            st: the no-replica assignment; changed in place.
            resident: int32 [E, mask words], ranks that hold a copy from before.
            target, transfer_cost: as in ``Options``.
            candidate: index in ``CANDIDATES``: bit 2 is set without regard to residents, bit 1 chooses the donor
                priority, bit 0 the fan-out.

        Returns:
            Replicas opened and, of these, copies that need a transfer.
        """
        hottest = (candidate & 2) != 0
        options = Options(target, transfer_cost, (candidate & 1) != 0, (candidate & 4) != 0)
        opened, transfers, round_idx, moved = Int32(0), Int32(0), Int32(0), Boolean(True)
        while moved & (round_idx < self.shape.num_replica_slots + 2):
            moved = Boolean(False)
            self.order_donors(st, options.target, hottest, lane)
            donor = self.next_donor(st, lane)
            while donor >= 0:
                more, new = self.visit(st, resident, options, donor, lane)
                opened += more
                transfers += new
                moved = moved | (more > 0)
                donor = self.next_donor(st, lane)
            round_idx += 1
        return opened, transfers

    # ---- donors ----------------------------------------------------------------------------------------------------

    @cute.jit
    def order_donors(self, st: SearchState, target: Int32, hottest: Boolean, lane: Int32):
        """Freeze this round's priorities: load or hottest expert of every rank above tau, ties to the lower rank."""
        own = self.shape.experts_per_rank
        for word in cutlass.range_constexpr(self.shape.mask_words):
            rank = lane + 32 * word
            if rank < self.shape.num_ranks:
                key, value = Int32(-1), st.load[rank]
                if value > target:
                    if hottest:
                        value = Int32(0)
                        for i in cutlass.range(own, unroll=8):
                            j = (i + rank) % own  # rotated: lanes of one instruction meet different banks
                            value = cutlass.max(value, st.home_blocks[rank * own + j])
                    key = (value << RANK_BITS) | (127 - rank)
                st.donor_key[rank] = key
        arch.sync_warp()

    @cute.jit
    def next_donor(self, st: SearchState, lane: Int32):
        """Take the donor with the highest key, -1 when none is left."""
        best = Int32(-1)
        for word in cutlass.range_constexpr(self.shape.mask_words):
            rank = lane + 32 * word
            if rank < self.shape.num_ranks:
                best = cutlass.max(best, st.donor_key[rank])
        best = arch.warp_redux_sync(best, "max")
        donor = Int32(-1)
        if best >= 0:
            donor = 127 - (best & 127)
            arch.sync_warp()  # every lane has read its keys
            if lane == 0:
                st.donor_key[donor] = Int32(-1)
        arch.sync_warp()
        return donor

    # ---- new replicas ----------------------------------------------------------------------------------------------

    @cute.jit
    def visit(self, st: SearchState, resident: cute.Tensor, options: Options, donor: Int32, lane: Int32):
        """Offer the donor's experts by decreasing blocks at home until its load is at most tau.

        The reference first shifts blocks to replicas that exist already. That moves nothing: a shift ends with the
        receiver at tau, where it stays since it is never a donor, or with no blocks at home, and these never grow.

        Returns:
            Replicas opened and, of these, copies that need a transfer.
        """
        own, bits = self.shape.experts_per_rank, self.index_bits
        opened, transfers, done, visiting = Int32(0), Int32(0), Int32(0), Boolean(True)
        while visiting:
            best = Int32(0)  # `done`, bit t: this lane's t-th expert was offered
            for turn in cutlass.range_constexpr(-(-own // 32)):
                j = lane + 32 * turn
                if j < own:
                    blocks = st.home_blocks[donor * own + j]
                    if (((done >> turn) & 1) == 0) & (blocks > 0):
                        best = cutlass.max(best, (blocks << bits) | (own - 1 - j))
            best = arch.warp_redux_sync(best, "max")
            visiting = best > 0
            if visiting:
                j = own - 1 - (best & ((1 << bits) - 1))
                if (j & 31) == lane:
                    done = done | (Int32(1) << (j >> 5))
                more, new = self.spread(st, resident, options, donor * own + j, donor, lane)
                opened += more
                transfers += new
                visiting = st.load[donor] > options.target
                if more == 0:
                    visiting = visiting & self.any_receiver(st, options.target, lane)
        return opened, transfers

    @cute.jit
    def any_receiver(self, st: SearchState, target: Int32, lane: Int32):
        """True while some rank is below tau and has a free slot; if not, no expert can be offered to anyone."""
        found = Boolean(False)
        for word in cutlass.range_constexpr(self.shape.mask_words):
            rank = lane + 32 * word
            if rank < self.shape.num_ranks:
                found = found | ((st.load[rank] < target) & (st.used[rank] < self.shape.num_replica_slots))
        return arch.vote_ballot_sync(found) != 0

    @cute.jit
    def receiver(
        self, st: SearchState, resident: cute.Tensor, options: Options, home: Int32, donor: Int32, lane: Int32
    ):
        """Key of the rank that opens the next copy, or NONE: resident copies that count, then by load, then by rank."""
        best = Int32(NONE)
        for word in cutlass.range_constexpr(self.shape.mask_words):
            rank = lane + 32 * word
            if rank < self.shape.num_ranks:
                load, at = st.load[rank], home * self.shape.mask_words + word
                holds = ((st.holders[at] >> lane) & 1) != 0
                key = (load << RANK_BITS) | rank
                if (((resident[at] >> lane) & 1) == 0) | options.anew:
                    key = key | IS_NEW
                if (
                    (load < options.target)
                    & (st.used[rank] < self.shape.num_replica_slots)
                    & (rank != donor)
                    & (not holds)
                ):
                    best = cutlass.min(best, key)
        return arch.warp_redux_sync(best, "min")

    @cute.jit
    def spread(
        self,
        st: SearchState,
        resident: cute.Tensor,
        options: Options,
        home: Int32,
        donor: Int32,
        lane: Int32,
    ):
        """Open copies of one expert, one new one or several; returns copies opened and, of these, transfers.

        Each takes v = min(q at home, tau - load) blocks from the owner (Eq. 4).
        """
        opened, fresh, transfers, going = Int32(0), Int32(0), Int32(0), Boolean(True)
        blocks, load = st.home_blocks[home], st.load[donor]
        while going:
            key = self.receiver(st, resident, options, home, donor, lane)
            is_new, rank = (key & IS_NEW) != 0, key & 127
            room = options.target - ((key & (IS_NEW - 1)) >> RANK_BITS)
            num_blocks = cutlass.min(blocks, room)
            going = key != NONE
            if is_new:
                going = going & (options.multiple | (fresh == 0)) & (num_blocks > options.transfer_cost)
            arch.sync_warp()  # every lane has read what lane 0 is about to change
            if going:
                at = home * self.shape.mask_words + (rank >> 5)
                opened += 1
                transfers += 1 - ((resident[at] >> (rank & 31)) & 1)
                if is_new:
                    fresh += 1
                blocks -= num_blocks
                load -= num_blocks
                if lane == 0:
                    used = st.used[rank]
                    entry = rank * self.shape.num_replica_slots + used
                    st.entry_home[entry] = home
                    st.entry_blocks[entry] = num_blocks
                    st.used[rank] = used + 1
                    st.holders[at] = st.holders[at] | (Int32(1) << (rank & 31))
                    st.home_blocks[home] = blocks
                    st.load[donor] = load
                    st.load[rank] = options.target - room + num_blocks
                going = (blocks > 0) & (load > options.target)
            arch.sync_warp()
        return opened, transfers


__all__ = ["NONE", "NUM_CANDIDATES", "Options", "Search", "SearchState", "state_at", "state_words"]
