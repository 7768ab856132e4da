"""Metrics of commands, in a file for the textfile collector of Prometheus' node exporter.

A command ends before Prometheus could ask it. So its counters and histograms are added to those that the file holds,
and its gauges take the place of theirs: over many commands the file reads like one long process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from megaflux_serve.durable import write_atomically
from megaflux_serve.errors import InputError
from megaflux_serve.metrics.catalogue import BY_NAME, Kind, Metric
from megaflux_serve.metrics.events import instruments

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Value by name of the series and its labels."""


def add_to_textfile(path: Path) -> None:
    """Add this process's events to the file; several commands may do so at once.

    Args:
        path: a file that ends in ``.prom``, as the node exporter wants; made if it does not exist.

    Raises:
        InputError: the file holds anything else.
    """
    with _locked(path):
        held = _read(path) if path.exists() else {}
        for metric, instrument in instruments().items():
            samples = held.setdefault(metric, {})
            for (name, labels), value in _samples(instrument.collect()).items():
                before = 0.0 if metric.kind is Kind.GAUGE else samples.get((name, labels), 0.0)
                samples[name, labels] = before + value
        registry = CollectorRegistry()
        registry.register(_Held(held))
        write_atomically(path, generate_latest(registry))


class _Held(Collector):
    """Samples as families."""

    def __init__(self, held: dict[Metric, Samples]) -> None:
        self._held = held

    def collect(self) -> Iterator[Family]:
        for metric, samples in self._held.items():
            family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind.value)
            for (name, labels), value in samples.items():
                family.add_sample(name, dict(labels), value)
            yield family


def _read(path: Path) -> dict[Metric, Samples]:
    try:
        families = list(text_string_to_metric_families(path.read_text()))
        by_metric = {family.name if family.name in BY_NAME else f"{family.name}_total": family for family in families}
        return {BY_NAME[name]: _samples([family]) for name, family in by_metric.items()}
    except (ValueError, KeyError) as error:
        raise InputError(str(path), f"cannot be added to ({error})", "a file that only this library writes") from error


def _samples(families: list[Family]) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


__all__ = ["add_to_textfile"]
