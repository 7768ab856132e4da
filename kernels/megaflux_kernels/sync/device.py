"""Flags and bounded waits inside kernels. Every function is called by one thread; addresses are Int64.

Ordering of plain accesses around a flag is the caller's: ``sync_threads`` before ``publish`` and after ``wait_for``
extends the thread's release and acquire to its block.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megaflux_kernels.sync.record import CODE, EPOCH, RANK, SLOT

arch = cute.arch


def words(address, count: int = 1, align: int = 4):
    """int32 tensor [count] at a global address."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def doubles(address, count: int = 1):
    """int64 tensor [count] at a global address."""
    pointer = cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def publish(flag: Int64, value: Int32, scope: cutlass.Constexpr):
    """Set a flag after everything before (release)."""
    arch.store(words(flag).iterator, value, sem="release", scope=scope)


@cute.jit
def count_up(counter: Int64, amount: Int32, scope: cutlass.Constexpr):
    """Add to a counter after everything before (release)."""
    arch.red(words(counter).iterator, amount, op="add", dtype="s32", sem="release", scope=scope)


@cute.jit
def wait_for(flag: Int64, value: Int32, budget_ns: Int64, scope: cutlass.Constexpr):
    """Wait until ``*flag >= value`` (acquire), at most ``budget_ns`` nanoseconds.

    Returns:
        The last value read, Int32; it is below ``value`` if the wait failed. Differences are taken modulo 2**32.
    """
    pointer = words(flag).iterator
    seen = arch.load(pointer, Int32, sem="acquire", scope=scope)
    start = Int64(0)
    if value - seen > 0:
        start = arch.globaltimer()
    waiting = value - seen > 0
    while waiting:
        seen = arch.load(pointer, Int32, sem="acquire", scope=scope)
        waiting = (value - seen > 0) & (arch.globaltimer() - start < budget_ns)
    return seen


@cute.jit
def holds_failure(record: Int64):
    """Whether a wait of this rank has failed, in an earlier launch or before a flag that the caller has seen."""
    return arch.load(words(record).iterator + CODE, Int32, sem="relaxed", scope="gpu") != 0


@cute.jit
def record_failure(record: Int64, wait: cutlass.Constexpr, rank: Int32, slot: Int32, epoch: Int32):
    """Fill the error record unless an earlier failure holds it."""
    error = words(record, 8)
    first = arch.atomic_cas(error.iterator + CODE, cmp=Int32(0), val=Int32(int(wait)), sem="relaxed", scope="gpu") == 0
    if first:
        error[RANK] = rank
        error[SLOT] = slot
        error[EPOCH] = epoch


__all__ = ["count_up", "doubles", "holds_failure", "publish", "record_failure", "wait_for", "words"]
