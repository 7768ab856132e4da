"""What replication does to the load of one layer, in the figures that tables and pictures show.

Decides the figures and how batches are brought together. Knows neither where the batches come from (a forecast or a
plan log) nor how they are printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from megaflux_serve.routing import max_over_mean


@dataclass(frozen=True)
class BatchOutcome:
    """One batch of one layer under its plan.

    Attributes:
        kappa: routing skew, 1 for uniform.
        fixed_loads: load of each rank without replicas, P values in any one unit (rows, blocks).
        loads: load of each rank under the plan, in the same unit.
        replicas: replicas that compute at least one block.
        blocks_moved: blocks computed away from their expert's home.
        transfers: replicas whose weights had to move.
        fixed_time: predicted time without replicas, in any one unit.
        time: predicted time under the plan, in the same unit.
        gated: True when the gate kept the fixed placement.
    """

    kappa: float
    fixed_loads: tuple[int, ...]
    loads: tuple[int, ...]
    replicas: int
    blocks_moved: int
    transfers: int
    fixed_time: float
    time: float
    gated: bool = False

    @property
    def max_over_mean_before(self) -> float:
        """Load of the busiest rank over the mean, without replicas."""
        return max_over_mean(self.fixed_loads)

    @property
    def max_over_mean_after(self) -> float:
        """Load of the busiest rank over the mean, under the plan."""
        return max_over_mean(self.loads)

    @property
    def eta(self) -> float | None:
        """Share of the busiest rank's excess that is removed (MegaFlux Eq. 8); None where there is no excess."""
        mean = sum(self.fixed_loads) / len(self.fixed_loads)
        excess = max(self.fixed_loads) - mean
        return None if excess == 0 else 1 - (max(self.loads) - mean) / excess


@dataclass(frozen=True)
class LayerSummary:
    """A layer's batches in one line; the function that made it says how they were brought together.

    Attributes:
        layer: name of the layer, or of a group of layers.
        num_batches: batches behind the figures.
        kappa, max_over_mean_before, max_over_mean_after, eta: see ``BatchOutcome``; eta is None if no batch has excess.
        replicas, blocks_moved, transfers: see ``BatchOutcome``.
        speedup: predicted time without replicas over predicted time under the plan.
        gated: batches that the gate kept at fixed placement.
        fixed_loads, loads: load of each rank before and after; P values.
    """

    layer: str
    num_batches: int
    kappa: float
    max_over_mean_before: float
    max_over_mean_after: float
    eta: float | None
    replicas: float
    blocks_moved: float
    transfers: float
    speedup: float
    gated: int
    fixed_loads: tuple[int, ...]
    loads: tuple[int, ...]


def summarise_layer(layer: str, outcomes: Sequence[BatchOutcome]) -> LayerSummary:
    """Medians over at least one batch of a layer; loads are those of the batch with the median fixed max/mean."""
    by_skew = sorted(outcomes, key=lambda outcome: outcome.max_over_mean_before)
    typical = by_skew[(len(by_skew) - 1) // 2]
    etas = [outcome.eta for outcome in outcomes if outcome.eta is not None]
    return LayerSummary(
        layer=layer,
        num_batches=len(outcomes),
        kappa=median(outcome.kappa for outcome in outcomes),
        max_over_mean_before=median(outcome.max_over_mean_before for outcome in outcomes),
        max_over_mean_after=median(outcome.max_over_mean_after for outcome in outcomes),
        eta=median(etas) if etas else None,
        replicas=median(outcome.replicas for outcome in outcomes),
        blocks_moved=median(outcome.blocks_moved for outcome in outcomes),
        transfers=median(outcome.transfers for outcome in outcomes),
        speedup=median(_ratio(outcome.fixed_time, outcome.time) for outcome in outcomes),
        gated=sum(outcome.gated for outcome in outcomes),
        fixed_loads=typical.fixed_loads,
        loads=typical.loads,
    )


def summarise_model(layers: Sequence[Sequence[BatchOutcome]]) -> LayerSummary:
    """All layers of a model as one line: they run one after the other, so their times and counts add up a batch.

    Skews and eta are medians over layers and batches.

    Args:
        layers: for each layer its batches, equally many and in the same order.
    """
    everything = summarise_layer("all", [outcome for outcomes in layers for outcome in outcomes])
    batches = list(zip(*layers, strict=True))
    return replace(
        everything,
        num_batches=len(batches),
        replicas=median(sum(outcome.replicas for outcome in batch) for batch in batches),
        blocks_moved=median(sum(outcome.blocks_moved for outcome in batch) for batch in batches),
        transfers=median(sum(outcome.transfers for outcome in batch) for batch in batches),
        speedup=median(
            _ratio(sum(outcome.fixed_time for outcome in batch), sum(outcome.time for outcome in batch))
            for batch in batches
        ),
    )


def accumulate(layer: str, outcomes: Sequence[BatchOutcome]) -> LayerSummary:
    """Sums over at least one batch, for batches of different sizes.

    Every batch ends when its busiest rank does, so max/mean, eta and speed-up are ratios of the sums of the batches'
    maxima and means. Kappa is the mean over batches, weighed by their load.
    """
    fixed_loads, loads = (
        tuple(sum(ranks) for ranks in zip(*(getattr(outcome, name) for outcome in outcomes), strict=True))
        for name in ("fixed_loads", "loads")
    )
    fixed_max = sum(max(outcome.fixed_loads) for outcome in outcomes)
    planned_max = sum(max(outcome.loads) for outcome in outcomes)
    work = sum(loads)
    mean = work / len(loads)
    return LayerSummary(
        layer=layer,
        num_batches=len(outcomes),
        kappa=sum(outcome.kappa * sum(outcome.loads) for outcome in outcomes) / work if work else 1.0,
        max_over_mean_before=_ratio(fixed_max, mean),
        max_over_mean_after=_ratio(planned_max, mean),
        eta=(fixed_max - planned_max) / (fixed_max - mean) if fixed_max > mean else None,
        replicas=sum(outcome.replicas for outcome in outcomes),
        blocks_moved=sum(outcome.blocks_moved for outcome in outcomes),
        transfers=sum(outcome.transfers for outcome in outcomes),
        speedup=_ratio(sum(outcome.fixed_time for outcome in outcomes), sum(outcome.time for outcome in outcomes)),
        gated=sum(outcome.gated for outcome in outcomes),
        fixed_loads=fixed_loads,
        loads=loads,
    )


def _ratio(part: float, whole: float) -> float:
    """Their ratio; 1 where there is nothing to compute."""
    return part / whole if whole > 0 else 1.0
