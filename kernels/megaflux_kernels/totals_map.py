"""Memory map of a layer's totals: what its batches add up to, in int64 words on one rank. No DSL, no torch.

The planner adds every batch (``totals.py``), so that totals grow when a CUDA graph is replayed too; the host copies
them whenever it likes. They are never reset. A batch may be half added when they are copied: figures of one copy can
differ by one batch. The reference implementation is ``LayerTotals`` of the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


class Total(IntEnum):
    """Words of ``sums``; sums over batches unless said otherwise."""

    BATCHES = 0
    ROWS = 1  # routed rows on all ranks
    BLOCKS = 2  # token blocks on all ranks
    BUSIEST = 3  # blocks of the busiest rank
    FIXED_BUSIEST = 4  # the same without replicas
    BALANCED = 5  # ceil(blocks / P)
    MOVED = 6  # blocks computed away from home
    REPLICAS = 7  # replicas that computed blocks
    TRANSFERS = 8  # those of them whose weights were copied
    REPLICATED = 9  # batches with replicas
    REFUSED = 10  # batches whose replicas the gate refused
    IMBALANCE = 11  # busiest rank over mean, thousandths
    FIXED_IMBALANCE = 12  # the same without replicas
    KAPPA = 13  # skew, thousandths
    PLANNER_NS = 14  # from the start of planning until the plan is known
    LAYER_NS = 15  # from there until the rows are combined; a batch is added with the next one
    STARTED = 16  # when planning the last batch started, global timer; no sum
    FINISHED = 17  # when the last batch that had rows here was combined; no sum
    SIZE = 24


@dataclass(frozen=True)
class TotalsMap:
    """Regions of the totals, int64, one behind the other.

    ``sums``             [Total.SIZE].
    ``loads``            [P] blocks that each rank computed.
    ``fixed_loads``      [P] blocks that each rank would have computed without replicas.
    ``expert_rows``      [E] rows routed to each expert.
    ``imbalance``, ``fixed_imbalance``, ``kappa``  [len(ratio_bounds) + 1] batches by value: the first bucket whose
        bound is not below it, the last bucket beyond all bounds.
    ``planner_time``, ``layer_time``  [len(time_bounds) + 1] the same for times.

    Attributes:
        num_ranks: P.
        num_experts: E.
        ratio_bounds: of imbalance and kappa, thousandths, ascending.
        time_bounds: of times, nanoseconds, ascending.
    """

    num_ranks: int
    num_experts: int
    ratio_bounds: tuple[int, ...]
    time_bounds: tuple[int, ...]

    @cached_property
    def words(self) -> dict[str, tuple[int, int]]:
        """First word and length of every region."""
        ratios, times = len(self.ratio_bounds) + 1, len(self.time_bounds) + 1
        sizes = {
            "sums": int(Total.SIZE),
            "loads": self.num_ranks,
            "fixed_loads": self.num_ranks,
            "expert_rows": self.num_experts,
            "imbalance": ratios,
            "fixed_imbalance": ratios,
            "kappa": ratios,
            "planner_time": times,
            "layer_time": times,
        }
        table, at = {}, 0
        for name, size in sizes.items():
            table[name] = (at, size)
            at += size
        return table

    @property
    def num_words(self) -> int:
        """Words of a layer's totals."""
        first, size = list(self.words.values())[-1]
        return first + size

    def split(self, totals: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Views of the regions of totals on the host, int64 [num_words]."""
        return {name: totals[first : first + size] for name, (first, size) in self.words.items()}


__all__ = ["Total", "TotalsMap"]
