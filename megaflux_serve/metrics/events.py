"""Events of the process itself: requests whose routes are stored, windows that are sealed, planned and migrated to.

Decides which counters an event moves. They are prometheus-client's own, so that they appear wherever the process serves
metrics, in its multiprocess mode too. That mode is chosen when prometheus-client is first imported, which SGLang does
late on purpose: this module imports it with the first event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megaflux_serve.metrics import catalogue
from megaflux_serve.metrics.catalogue import Kind, Metric, Source

if TYPE_CHECKING:
    from megaflux_serve.migration import MigrationReport
    from megaflux_serve.routepack import WindowPlan


class CaptureEvents:
    """What becomes of finished requests; all its series are there from the start, at 0.

    Args:
        engine: ``vllm`` or ``sglang``.
        model: the name that the model is served as.
    """

    def __init__(self, engine: str, model: str) -> None:
        self._labels = engine, model
        for metric in (catalogue.CAPTURE_RECORDS, catalogue.CAPTURE_TOKENS, catalogue.CAPTURE_BYTES):
            instrument(metric).labels(*self._labels)
        for reason in catalogue.DROP_REASONS:
            instrument(catalogue.CAPTURE_DROPPED).labels(*self._labels, reason)

    def stored(self, tokens: int, num_bytes: int) -> None:
        """A record of so many tokens and bytes is in the store."""
        instrument(catalogue.CAPTURE_RECORDS).labels(*self._labels).inc()
        instrument(catalogue.CAPTURE_TOKENS).labels(*self._labels).inc(tokens)
        instrument(catalogue.CAPTURE_BYTES).labels(*self._labels).inc(num_bytes)

    def dropped(self, reason: str) -> None:
        """A request is not stored: ``refused`` or ``storage``."""
        instrument(catalogue.CAPTURE_DROPPED).labels(*self._labels, reason).inc()


def prepare_windows() -> None:
    """Show counters and histograms of windows at 0 from now on, so that the first window is an increase, too.

    Gauges come with the first plan: a 0 would claim one.
    """
    for metric in catalogue.CATALOGUE:
        if metric.source is Source.WINDOW and metric.kind is not Kind.GAUGE:
            instrument(metric)


def window_sealed(seconds: float) -> None:
    """A window was sealed."""
    instrument(catalogue.WINDOW_SEAL_SECONDS).observe(seconds)


def window_planned(plan: WindowPlan) -> None:
    """A window was planned."""
    instrument(catalogue.WINDOW_PLACEMENT_SECONDS).observe(plan.seconds["place"])
    instrument(catalogue.WINDOW_PLANNING_SECONDS).observe(sum(plan.seconds.values()))
    instrument(catalogue.WINDOW_TRAJECTORIES).inc(plan.layout.cell.size)
    instrument(catalogue.WINDOW_MOVED_EXPERTS).inc(plan.num_moved)
    instrument(catalogue.WINDOW_ROWS).set(plan.layout.num_rows)
    instrument(catalogue.WINDOW_EXCESS_REMOVED).set(plan.excess_removed)
    instrument(catalogue.WINDOW_EXPERT_EXCESS).labels("window").set(plan.excess.window)
    instrument(catalogue.WINDOW_EXPERT_EXCESS).labels("row_local").set(plan.excess.row_local)


def window_migrated(report: MigrationReport) -> None:
    """Experts are in the slots of a window's placement."""
    instrument(catalogue.WINDOW_MIGRATION_SECONDS).observe(report.seconds)
    instrument(catalogue.WINDOW_MIGRATED_BYTES).inc(report.received_bytes)


_made: dict[Metric, Any] = {}


def instruments() -> Mapping[Metric, Any]:
    """The metrics that events have moved in this process, as prometheus-client has them."""
    return _made


def instrument(metric: Metric) -> Any:
    """The metric of prometheus-client's default registry, made when it is first needed."""
    if metric not in _made:
        _made[metric] = _make(metric)
    return _made[metric]


def _make(metric: Metric) -> Any:
    import prometheus_client

    labels = [*metric.labels]
    if metric.kind is Kind.COUNTER:
        return prometheus_client.Counter(metric.name, metric.help, labels)
    if metric.kind is Kind.GAUGE:
        return prometheus_client.Gauge(metric.name, metric.help, labels, multiprocess_mode="mostrecent")
    return prometheus_client.Histogram(metric.name, metric.help, labels, buckets=metric.buckets)


__all__ = ["CaptureEvents", "instruments", "prepare_windows", "window_migrated", "window_planned", "window_sealed"]
