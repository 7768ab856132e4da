"""The figures that ``megaflux top`` shows: those of the dashboards, from two looks at one server.

Decides what is computed from which metric; None stands for what nothing was observed of. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaflux_serve.cli.top.scrape import Change
from megaflux_serve.metrics import catalogue as m


@dataclass(frozen=True)
class Balance:
    """What the plans of some batches did.

    Attributes:
        name: the layer, or "all".
        batches: batches of a layer, added up over layers.
        tokens: tokens of those batches.
        fixed, planned: blocks of the busiest rank over the mean, without replicas and with them.
        removed: part of the busiest rank's blocks above the best possible balance that is gone.
        replicas: replicas that computed, a batch.
        resident: part of them whose weights were in their slot.
        refused: part of the batches whose plan the gate refused.
        copied_bytes: weights copied into replica slots.
    """

    name: str
    batches: float
    tokens: float
    fixed: float | None
    planned: float | None
    removed: float | None
    replicas: float | None
    resident: float | None
    refused: float | None
    copied_bytes: float


@dataclass(frozen=True)
class Rank:
    """One worker.

    Attributes:
        rank: its number, as the label says.
        fixed, planned: its blocks over the mean of the ranks, without replicas and with them.
        layer_s, layer_p99_s: mean and 99th percentile of a layer's time, seconds.
        planner_share: mean planner time over mean layer time.
        slot_bytes: memory of its replica slots.
        silent_s: seconds since it last reported.
    """

    rank: str
    fixed: float | None
    planned: float | None
    layer_s: float | None
    layer_p99_s: float | None
    planner_share: float | None
    slot_bytes: float | None
    silent_s: float


@dataclass(frozen=True)
class Expert:
    """A hot expert; ``chosen_by`` is the part of the layer's tokens that were routed to it."""

    layer: str
    expert: str
    home_rank: str
    chosen_by: float


@dataclass(frozen=True)
class Capture:
    """What was stored of finished requests, since the server started; ``dropped`` by reason."""

    records: float
    tokens: float
    num_bytes: float
    dropped: Mapping[str, float]


@dataclass(frozen=True)
class Figures:
    """Everything that is shown.

    Attributes:
        servers: labels of ``build_info``, one mapping a different one.
        seconds: between the two looks, or None if the figures are since the server started.
        total: all layers; its ``batches`` and ``tokens`` are means over layers.
        layers: layer by layer, hottest first.
        ranks: in the order of their numbers.
        experts: the hottest, first.
        capture: None where the server does not capture.
        timeouts: waits that timed out since the server started, by phase; only those that happened.
    """

    servers: tuple[Mapping[str, str], ...]
    seconds: float | None
    total: Balance
    layers: tuple[Balance, ...]
    ranks: tuple[Rank, ...]
    experts: tuple[Expert, ...]
    capture: Capture | None
    timeouts: Mapping[str, float]


def figures(change: Change, num_experts: int = 6) -> Figures:
    """What changed, as figures.

    Args:
        change: two looks.
        num_experts: how many of the hottest experts to name.
    """
    names = [layer for (layer,) in change.by(m.BATCHES, "layer")]
    layers = [balance(change, layer, layer=layer) for layer in names]
    hottest = sorted(layers, key=lambda layer: layer.fixed or 0.0, reverse=True)
    return Figures(
        servers(change),
        change.seconds,
        balance(change, "all", num_layers=max(len(names), 1)),
        tuple(hottest),
        ranks(change),
        hot_experts(change)[:num_experts],
        capture(change),
        {phase: count for (phase,), count in change.now.by(m.WAIT_TIMEOUTS, "phase").items() if count},
    )


def servers(change: Change) -> tuple[Mapping[str, str], ...]:
    """What runs, without the rank."""
    builds = [one.labels for one in change.now.series if one.name == m.BUILD_INFO.name]
    different = {tuple(sorted((k, v) for k, v in build.items() if k != "rank")) for build in builds}
    return tuple(dict(build) for build in sorted(different))


def balance(change: Change, name: str, num_layers: int = 1, **chosen: str) -> Balance:
    """Figures of one layer, or of all."""

    def gained(metric: m.Metric, **equal: str) -> float:
        return change.sum(metric, **chosen, **equal)

    fixed = gained(m.BUSIEST_RANK_BLOCKS, placement="fixed")
    planned = gained(m.BUSIEST_RANK_BLOCKS, placement="planned")
    mean, balanced = gained(m.MEAN_RANK_BLOCKS), gained(m.BALANCED_RANK_BLOCKS)
    batches, replicas = gained(m.BATCHES), gained(m.REPLICAS)
    return Balance(
        name,
        batches / num_layers,
        gained(m.TOKENS) / num_layers,
        ratio(fixed, mean),
        ratio(planned, mean),
        ratio(fixed - planned, fixed - balanced),
        ratio(replicas, batches),
        ratio(gained(m.REPLICAS, weights="resident"), replicas),
        ratio(gained(m.PLAN_DECISIONS, decision="refused"), gained(m.PLAN_DECISIONS)),
        gained(m.REPLICA_BYTES),
    )


def ranks(change: Change) -> tuple[Rank, ...]:
    """Figures of every worker."""
    mean = change.sum(m.MEAN_RANK_BLOCKS)
    blocks = {place: change.by(m.RANK_BLOCKS, "rank", placement=place) for place in m.PLACEMENTS}
    slots = change.now.by(m.MEMORY, "rank", use="replica_slots")
    reports = change.now.by(m.LAST_REPORT, "rank")
    found = []
    for (rank,), reported in sorted(reports.items(), key=lambda one: int(one[0][0])):
        layer = mean_seconds(change, m.LAYER_SECONDS, rank)
        planner = mean_seconds(change, m.PLANNER_SECONDS, rank)
        found.append(
            Rank(
                rank,
                ratio(blocks["fixed"].get((rank,), 0.0), mean),
                ratio(blocks["planned"].get((rank,), 0.0), mean),
                layer,
                quantile(change, 0.99, m.LAYER_SECONDS, rank),
                None if layer is None or planner is None else planner / layer,
                slots.get((rank,)),
                max(change.now.unix_time - reported, 0.0),
            )
        )
    return tuple(found)


def hot_experts(change: Change) -> tuple[Expert, ...]:
    """The experts that are counted one by one, hottest first.

    One that has become hot since the earlier look shows all its rows, of which some are older: it is left out.
    """
    names = "layer", "expert", "home_rank"
    tokens, rows = change.by(m.TOKENS, "layer"), change.by(m.EXPERT_ROWS, *names)
    counted = rows if change.before is None else change.before.by(m.EXPERT_ROWS, *names)
    shares = [
        Expert(layer, expert, home, ratio(count, tokens.get((layer,), 0.0)) or 0.0)
        for (layer, expert, home), count in rows.items()
        if (layer, expert, home) in counted
    ]
    return tuple(sorted(shares, key=lambda one: one.chosen_by, reverse=True))


def capture(change: Change) -> Capture | None:
    """What was captured so far."""
    if not change.now.by(m.CAPTURE_RECORDS):
        return None
    stored, tokens, num_bytes = (
        sum(change.now.by(metric).values()) for metric in (m.CAPTURE_RECORDS, m.CAPTURE_TOKENS, m.CAPTURE_BYTES)
    )
    dropped = {reason: count for (reason,), count in change.now.by(m.CAPTURE_DROPPED, "reason").items() if count}
    return Capture(stored, tokens, num_bytes, dropped)


def mean_seconds(change: Change, metric: m.Metric, rank: str) -> float | None:
    """Mean of a histogram on one rank."""
    return ratio(change.sum(metric, "_sum", rank=rank), change.sum(metric, "_count", rank=rank))


def quantile(change: Change, q: float, metric: m.Metric, rank: str) -> float | None:
    """Quantile of a histogram on one rank, interpolated within its bucket as Prometheus does."""
    buckets = change.by(metric, "le", suffix="_bucket", rank=rank)
    bounds = sorted((float(bound), count) for (bound,), count in buckets.items())
    wanted = q * bounds[-1][1] if bounds else 0.0
    if not wanted:
        return None
    lower, below = 0.0, 0.0
    for bound, count in bounds[:-1]:
        if count >= wanted:
            return lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower


def ratio(a: float, b: float) -> float | None:
    """a / b, or None where b is not positive."""
    return a / b if b > 0 else None


__all__ = ["Balance", "Capture", "Expert", "Figures", "Rank", "figures"]
