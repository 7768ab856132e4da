"""What a server's /metrics says of MegaFlux, and how it changed since an earlier look.

Decides how series are fetched, chosen and added up. Knows no table; which figures are made of them is ``top``'s.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException

from megaflux_serve.errors import InputError
from megaflux_serve.metrics.catalogue import PREFIX, Kind, Metric

TIMEOUT_S = 10.0
LabelValues = tuple[str, ...]


@dataclass(frozen=True)
class Series:
    """One series of a scrape: name as exposed, labels, value."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Scrape:
    """One look at a server.

    Attributes:
        at: seconds of a monotonic clock.
        unix_time: seconds since the epoch.
        series: MegaFlux' series.
    """

    at: float
    unix_time: float
    series: tuple[Series, ...]

    def by(self, metric: Metric, *labels: str, suffix: str = "", **equal: str) -> dict[LabelValues, float]:
        """Sums by the values of ``labels``, over the series whose labels have the values of ``equal``.

        Args:
            metric: of the catalogue.
            labels: what to keep apart.
            suffix: of one of a histogram's series.
            equal: label -> value.
        """
        sums: dict[LabelValues, float] = {}
        for one in self.series:
            if one.name == metric.name + suffix and equal.items() <= one.labels.items():
                key = tuple(one.labels[label] for label in labels)
                sums[key] = sums.get(key, 0.0) + one.value
        return sums


@dataclass(frozen=True)
class Change:
    """What counters and histograms gained between two looks, or since the server started if there was no earlier one.

    A counter that fell belongs to a server that was started anew; it then gained what it holds.
    """

    before: Scrape | None
    now: Scrape

    @property
    def seconds(self) -> float | None:
        """Time between the looks; None since the start, which the server does not tell."""
        return None if self.before is None else self.now.at - self.before.at

    def by(self, metric: Metric, *labels: str, suffix: str = "", **equal: str) -> dict[LabelValues, float]:
        """Gains of a counter or a histogram; see ``Scrape.by``. The newest value of a gauge."""
        now = self.now.by(metric, *labels, suffix=suffix, **equal)
        if metric.kind is Kind.GAUGE or self.before is None:
            return now
        before = self.before.by(metric, *labels, suffix=suffix, **equal)
        return {key: value - (old if (old := before.get(key, 0.0)) <= value else 0.0) for key, value in now.items()}

    def sum(self, metric: Metric, suffix: str = "", **equal: str) -> float:
        """All of ``by`` together."""
        return sum(self.by(metric, suffix=suffix, **equal).values())


def metrics_url(address: str) -> str:
    """``/metrics`` of a server that is named as ``host:port``, as the URL of its API (``/v1`` or not), or in full."""
    url = address if "://" in address else f"http://{address}"
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}/{'metrics' if path.rstrip('/') in ('', 'v1') else path}"


def scrape(url: str) -> Scrape:
    """Look at a server.

    Args:
        url: of its metrics, http or https.

    Raises:
        InputError: nobody answers, or the answer has no metrics of MegaFlux.
    """
    from prometheus_client.parser import text_string_to_metric_families

    if not url.startswith(("http://", "https://")):
        raise InputError(url, "is no address", "host:port or an http address, such as http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            text = response.read().decode()
        families = list(text_string_to_metric_families(text))
    except urllib.error.HTTPError as error:
        raise InputError(url, f"answers with status {error.code}", "the metrics of a server") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise InputError(
            url, f"gives no metrics: {reason}", "a running server, such as http://127.0.0.1:8000"
        ) from None
    series = [
        Series(sample.name, sample.labels, sample.value)
        for family in families
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    ]
    if not series:
        raise InputError(url, "shows no metrics of MegaFlux", "a server that runs with it and has metrics on")
    return Scrape(time.monotonic(), time.time(), tuple(series))


__all__ = ["Change", "Scrape", "Series", "metrics_url", "scrape"]
