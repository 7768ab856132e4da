"""What a running server shows on ``/metrics``, for tests of both engines."""

from __future__ import annotations

import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from megaflux_serve.metrics.catalogue import CATALOGUE, Source

REPORT_S = 2.5
"""Workers report once a second, one batch late."""

Series = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and values by name."""


def scrape(url: str) -> Series:
    """The series of a server, once every worker has reported what it did before."""
    time.sleep(REPORT_S)
    found: Series = {}
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as response:
        for family in text_string_to_metric_families(response.read().decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def total(series: Series, name: str, **labels: str) -> float:
    """Sum of the series with these labels."""
    return sum(value for found, value in series.get(name, []) if found.items() >= labels.items())


def missing(series: Series) -> list[str]:
    """Series of layers and workers that the catalogue names and the server does not show."""
    wanted = [metric for metric in CATALOGUE if metric.source in (Source.LAYERS, Source.WORKER)]
    return [name for metric in wanted for name in metric.series if not series.get(name)]
