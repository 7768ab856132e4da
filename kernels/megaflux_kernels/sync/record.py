"""The error record of a rank, as the host reads it: eight int32 words, all zero while no wait has failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaflux_kernels.layout import Wait

RECORD_WORDS = 8
CODE, RANK, SLOT, EPOCH = range(4)


@dataclass(frozen=True)
class FailedWait:
    """The first bounded wait of a rank that ended without an answer.

    Attributes:
        wait: what was waited for.
        rank: the rank that did not answer.
        slot: block, slot or count as ``Wait`` says for this code.
        epoch: the launch that waited, from 1.
    """

    wait: Wait
    rank: int
    slot: int
    epoch: int

    def __str__(self) -> str:
        return f"rank {self.rank} did not answer: phase {self.wait.name.lower()}, slot {self.slot}, launch {self.epoch}"


def failed_wait(record: Sequence[int]) -> FailedWait | None:
    """The failure in an error record, or None.

    Args:
        record: the ``RECORD_WORDS`` words, copied from the device.
    """
    if len(record) != RECORD_WORDS:
        raise ValueError(f"record has {len(record)} words; allowed: {RECORD_WORDS}")
    if record[CODE] == 0:
        return None
    return FailedWait(Wait(record[CODE]), record[RANK], record[SLOT], record[EPOCH])
