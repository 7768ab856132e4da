"""PromQL from the metric catalogue: an expression can only name a metric that exists, with labels that it has.

Decides how series are selected by the dashboards' variables and added up. Knows no panel.
"""

from __future__ import annotations

from megaflux_serve.errors import ConfigError
from megaflux_serve.metrics.catalogue import Kind, Metric

VARIABLES = ("engine", "model", "rank")
"""Labels that a dashboard has a variable for, in the order in which they narrow down."""
INTERVAL = "$__rate_interval"


def select(metric: Metric, suffix: str = "", **equal: str) -> str:
    """The series of a metric that the dashboard's variables choose and whose labels have these values.

    Args:
        metric: of the catalogue.
        suffix: of one of a histogram's series: ``_bucket``, ``_sum`` or ``_count``.
        equal: label -> value.

    Raises:
        ConfigError: the metric has no such series, label or value.
    """
    if metric.name + suffix not in metric.series:
        raise ConfigError("suffix", suffix, f"what makes one of {metric.series}")
    for label, value in equal.items():
        if value not in metric.labels.get(label, ()):
            raise ConfigError(label, value, f"labels of {metric.name}: {dict(metric.labels)}")
    chosen = [f'{label}=~"${label}"' for label in VARIABLES if label in metric.labels]
    chosen += [f'{label}="{value}"' for label, value in equal.items()]
    return f"{metric.name}{suffix}{{{', '.join(chosen)}}}" if chosen else metric.name + suffix


def total(metric: Metric, *by: str, **equal: str) -> str:
    """A gauge, added up but for the labels of ``by``."""
    return f"sum{_by(by)}({select(metric, **equal)})"


def rate(metric: Metric, *by: str, suffix: str = "", interval: str = INTERVAL, **equal: str) -> str:
    """Per second over an interval, added up but for the labels of ``by``."""
    return f"sum{_by(by)}(rate({select(metric, suffix, **equal)}[{interval}]))"


def mean(metric: Metric, *by: str, interval: str = INTERVAL) -> str:
    """Mean of a histogram's observations."""
    parts = (rate(metric, *by, suffix=suffix, interval=interval) for suffix in ("_sum", "_count"))
    return over(*parts)


def share_below(bound: float, metric: Metric, **equal: str) -> str:
    """The part of a histogram's observations that are at most ``bound``.

    Raises:
        ConfigError: no bucket ends there.
    """
    if bound not in metric.buckets:
        raise ConfigError("bound", bound, f"a bucket of {metric.name}: {metric.buckets}")
    bucket = select(metric, "_bucket", **equal).replace("}", f', le="{bound}"}}')
    return over(f"sum(rate({bucket}[{INTERVAL}]))", rate(metric, suffix="_count", **equal))


def quantile(q: float, metric: Metric, *by: str, **equal: str) -> str:
    """Quantile of a histogram's observations, interpolated within a bucket."""
    if metric.kind is not Kind.HISTOGRAM:
        raise ConfigError("metric", metric.name, "a histogram")
    return f"histogram_quantile({q}, {rate(metric, 'le', *by, suffix='_bucket', **equal)})"


def over(numerator: str, denominator: str, *on: str) -> str:
    """``numerator / denominator``; with ``on``, each series over the one that has the same values of these labels."""
    return f"{numerator} / on ({', '.join(on)}) group_left () {denominator}" if on else f"{numerator} / {denominator}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""
