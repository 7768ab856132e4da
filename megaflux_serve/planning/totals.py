"""LayerTotals: what the plans of one layer add up to, from which metrics are made.

Decides what is counted, and is the specification of what the device planner adds (``megaflux_kernels.totals``), word
for word, times excepted. Knows no names that an operator sees and nothing of who reads the totals.
"""

from __future__ import annotations

import numpy as np
from megaflux_kernels.totals_map import Total, TotalsMap

from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.routing import CountArray

RATIO_BOUNDS = (
    *(1010, 1025, 1050, 1100, 1150, 1200, 1300, 1400),
    *(1600, 1800, 2000, 2500, 3000, 4000, 6000, 8000),
)
"""Upper bounds of the buckets of max / mean and of kappa, in thousandths."""
TIME_BOUNDS = (*(digit * 10**power for power in range(4, 9) for digit in (1, 2, 5)), 10**9)
"""Upper bounds of the buckets of times, in nanoseconds: 10 us to 1 s."""


def totals_map(num_ranks: int, num_experts: int) -> TotalsMap:
    """The words of a layer of E experts on P ranks."""
    return TotalsMap(num_ranks, num_experts, RATIO_BOUNDS, TIME_BOUNDS)


class LayerTotals:
    """Totals of one layer on the host.

    Args:
        num_ranks: P.
        num_experts: E.

    Attributes:
        words: int64 [map.num_words], in the order of ``TotalsMap``.
    """

    def __init__(self, num_ranks: int, num_experts: int) -> None:
        self.map = totals_map(num_ranks, num_experts)
        self.words = np.zeros(self.map.num_words, dtype=np.int64)
        self._regions = self.map.split(self.words)

    def add(self, plan: ReplicaPlan) -> None:
        """Add one batch."""
        rows, loads, fixed = plan.counts.sum(axis=0), plan.loads, plan.fixed_loads
        blocks, ranks = int(loads.sum()), plan.layout.num_ranks
        busiest, fixed_busiest, replicas = int(loads.max()), int(fixed.max()), plan.replicas
        sums = self._regions["sums"]
        for total, amount in (
            (Total.BATCHES, 1),
            (Total.ROWS, rows.sum()),
            (Total.BLOCKS, blocks),
            (Total.BUSIEST, busiest),
            (Total.FIXED_BUSIEST, fixed_busiest),
            (Total.BALANCED, -(-blocks // ranks)),
            (Total.MOVED, plan.blocks[replicas[:, 0], replicas[:, 1]].sum()),
            (Total.REPLICAS, len(replicas)),
            (Total.TRANSFERS, len(plan.transfers)),
            (Total.REPLICATED, len(replicas) > 0),
            (Total.REFUSED, plan.gated),
        ):
            sums[total] += amount
        self._regions["loads"] += loads
        self._regions["fixed_loads"] += fixed
        self._regions["expert_rows"] += rows
        self._note(Total.IMBALANCE, "imbalance", imbalance_permille(busiest, blocks, ranks))
        self._note(Total.FIXED_IMBALANCE, "fixed_imbalance", imbalance_permille(fixed_busiest, blocks, ranks))
        self._note(Total.KAPPA, "kappa", kappa_permille(rows))

    def add_times(self, planner_ns: int, layer_ns: int | None) -> None:
        """Add the times of one batch, nanoseconds; the layer's is None where it was not measured."""
        self._note(Total.PLANNER_NS, "planner_time", planner_ns)
        if layer_ns is not None:
            self._note(Total.LAYER_NS, "layer_time", layer_ns)

    def _note(self, total: Total, region: str, value: int) -> None:
        """Add a value to its sum and to its bucket."""
        bounds = TIME_BOUNDS if region.endswith("time") else RATIO_BOUNDS
        self._regions["sums"][total] += value
        self._regions[region][np.searchsorted(bounds, value)] += 1


def imbalance_permille(load: int, blocks: int, num_ranks: int) -> int:
    """A rank's blocks over the mean of all ranks, in thousandths, rounded down; 1000 where there are no blocks."""
    return load * 1000 * num_ranks // blocks if blocks else 1000


def kappa_permille(rows: CountArray) -> int:
    """``routing.kappa`` of int64 [E] rows in thousandths, in float64, rounded down; 1000 where there are no rows."""
    total = float(rows.sum())
    return int(float(1000 * rows.size) * float(np.square(rows).sum()) / (total * total)) if total else 1000


__all__ = ["RATIO_BOUNDS", "TIME_BOUNDS", "LayerTotals", "imbalance_permille", "kappa_permille", "totals_map"]
