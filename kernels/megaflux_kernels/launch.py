"""What every warp of a launch is given, and the flags by which ranks meet.

``Ranks`` is a launch's view of the other ranks. A flag row holds one launch number a rank: row 0, *start*, and row 1,
*done*, see ``forward.py``. Decides how ranks signal and wait; does not know for what.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from megaflux_kernels.peers import PEER_WORDS, Peer
from megaflux_kernels.sync.device import doubles, holds_failure, publish, record_failure, wait_for

arch = cute.arch
START, DONE = 0, 1
TRACE_WORDS = 8


class Place(NamedTuple):
    """Where a thread is: lane of its warp, CTA of its cluster, CTA of the grid."""

    lane: Int32
    member: Int32
    cta: Int32


class Buffers(NamedTuple):
    """Addresses of this rank's pool and activations, see ``forward_map.py``, and of W1 and W2 of its replica slots."""

    pool: Int64
    act: Int64
    replica_w1: Int64
    replica_w2: Int64


class Tables(NamedTuple):
    """Addresses of the launch's tables, see ``worklist.py``."""

    header: Int64
    tasks: Int64
    row_source: Int64
    places: Int64
    transfers: Int64
    counters: Int64


class Ranks(NamedTuple):
    """This rank among its peers.

    ``peers`` and ``flags`` are the addresses of the peer table and of this rank's flags, ``error`` that of the error
    record; ``launch`` is the number of this launch, ``budget_ns`` what a wait may take.
    """

    peers: Int64
    flags: Int64
    error: Int64
    me: Int32
    launch: Int32
    budget_ns: Int64


@cute.jit
def has_failed(ranks: Ranks):
    """Whether a wait of this rank has failed, in this launch or an earlier one."""
    return holds_failure(ranks.error)


@cute.jit
def wait_budget(ranks: Ranks):
    """Nanoseconds that a wait may take: none once this rank has failed, so that what is queued drains at once."""
    budget = ranks.budget_ns
    if has_failed(ranks):
        budget = Int64(0)
    return budget


@cute.jit
def wait_counter(counter, need: cutlass.Constexpr, code: cutlass.Constexpr, slot, ranks: Ranks, budget):
    """One thread's bounded wait for a counter of this rank; returns the budget, 0 after a failure."""
    seen = wait_for(Int64(counter), Int32(need), budget, "gpu")
    if seen < need:
        record_failure(ranks.error, code, ranks.me, slot, ranks.launch)
        budget = Int64(0)
    return budget


@cute.jit
def signal_peers(lane, ranks: Ranks, row: cutlass.Constexpr, num_ranks: cutlass.Constexpr):
    """Publish this launch in a flag row of every rank, this one included; called by a warp, one lane a rank."""
    for peer in cutlass.range(lane, num_ranks, 32, unroll=1):
        base = arch.load(doubles(ranks.peers).iterator + (peer * PEER_WORDS + int(Peer.FLAGS)), Int64)
        publish(base + 4 * Int64(row * num_ranks + ranks.me), ranks.launch, "sys")


@cute.jit
def await_peers(lane, ranks: Ranks, row: cutlass.Constexpr, num_ranks: cutlass.Constexpr, code: cutlass.Constexpr):
    """Wait until every rank has published this launch in a flag row here; called by a warp, one lane a rank.

    Returns:
        Int32, 1 if all have, the same in all lanes.
    """
    budget, late = wait_budget(ranks), Int32(0)
    for peer in cutlass.range(lane, num_ranks, 32, unroll=1):
        seen = wait_for(ranks.flags + 4 * Int64(row * num_ranks + peer), ranks.launch, budget, "sys")
        if ranks.launch - seen > 0:
            record_failure(ranks.error, code, peer, ranks.launch, ranks.launch)
            budget, late = Int64(0), Int32(1)
    arch.sync_warp()  # each lane has acquired its peers' writes; now all lanes may read them
    return Int32(1) - Int32(arch.vote_any_sync(late == 1))


@cute.jit
def mark(trace: Int64, place: Place, index: cutlass.Constexpr, enabled: cutlass.Constexpr):
    """Record the global time of this CTA, if enabled."""
    if const_expr(enabled):
        if place.lane == 0:
            arch.store(doubles(trace).iterator + (place.cta * TRACE_WORDS + index), arch.globaltimer())


__all__ = [
    "DONE",
    "START",
    "TRACE_WORDS",
    "Buffers",
    "Place",
    "Ranks",
    "Tables",
    "await_peers",
    "has_failed",
    "mark",
    "signal_peers",
    "wait_budget",
    "wait_counter",
]
