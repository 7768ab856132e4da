"""LayerCollector: series of all workers, made from their snapshots whenever Prometheus asks.

Decides what each series is of the totals. Plan-wide series come from rank 0 alone: every rank carries out the same
plan. Register one collector with the registry that answers ``/metrics``; it works beside any mode of prometheus-client,
since it reads files and keeps no values of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from megaflux_kernels.totals_map import Total
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from megaflux_serve import __version__
from megaflux_serve.metrics import catalogue
from megaflux_serve.metrics.catalogue import HOTTEST_EXPERTS, Kind, Metric, Source
from megaflux_serve.metrics.snapshot import LayerInfo, Snapshot, read_snapshots
from megaflux_serve.planning.totals import totals_map

LATELY_S = 60.0
"""Rows of the last one to two times this many seconds say which experts are hottest."""
FAMILIES = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}
Regions = Mapping[str, NDArray[np.int64]]


class LayerCollector(Collector):
    """Series of the catalogue's sources LAYERS and WORKER.

    Args:
        folder: of the snapshots, see ``snapshot.FOLDER_VARIABLE``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._recent, self._differences = RecentRows(), Differences()

    def describe(self) -> Iterable[Family]:
        """Families without samples: prometheus-client then registers the collector without collecting."""
        return Families().families()

    def collect(self) -> Iterator[Family]:
        families = Families()
        for snapshot in read_snapshots(self.folder):
            add_worker(families, snapshot)
            if snapshot.worker.rank == 0:
                add_layers(families, snapshot, self._recent, self._differences)
        yield from families.families()


class Families:
    """Metric families of LAYERS and WORKER, and how samples get into them."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        for metric in catalogue.CATALOGUE:
            if metric.source in (Source.LAYERS, Source.WORKER):
                self._families[metric.name] = FAMILIES[metric.kind](metric.name, metric.help, labels=[*metric.labels])

    def families(self) -> list[Family]:
        """All of them, in the catalogue's order."""
        return list(self._families.values())

    def add(self, metric: Metric, labels: Sequence[object], value: float) -> None:
        """Add a sample."""
        self._families[metric.name].add_metric([str(label) for label in labels], value)

    def add_histogram(self, metric: Metric, labels: Sequence[object], counts: NDArray[np.int64], total: float) -> None:
        """Add a histogram.

        Args:
            counts: values in each bucket, the last beyond all bounds.
            total: sum of the values.
        """
        bounds = (*map(str, metric.buckets), "+Inf")
        buckets = list(zip(bounds, accumulate(counts.tolist()), strict=True))
        self._families[metric.name].add_metric([str(label) for label in labels], buckets, sum_value=total)


def add_worker(families: Families, snapshot: Snapshot) -> None:
    """Series of one worker."""
    worker = snapshot.worker
    labels = worker.engine, worker.model, worker.rank
    layers = [regions_of(snapshot, index) for index in range(len(snapshot.layers))]
    for metric, region, total in (
        (catalogue.PLANNER_SECONDS, "planner_time", Total.PLANNER_NS),
        (catalogue.LAYER_SECONDS, "layer_time", Total.LAYER_NS),
    ):
        add_histogram_of_layers(families, metric, labels, layers, region, total, 1e9)
    for use, size in snapshot.memory.items():
        families.add(catalogue.MEMORY, (*labels, use), size)
    timeouts = Counter(snapshot.timeouts)
    for phase in catalogue.WAIT_PHASES:
        families.add(catalogue.WAIT_TIMEOUTS, (*labels, phase), timeouts[phase])
    families.add(catalogue.LAST_REPORT, labels, snapshot.time)
    switches = [str(is_on).lower() for is_on in (worker.sticky, worker.gate)]
    families.add(catalogue.BUILD_INFO, (*labels, __version__, worker.engine_version, worker.executor, *switches), 1)
    families.add(catalogue.RANKS, labels, worker.num_ranks)
    families.add(catalogue.LAYERS, labels, len(layers))
    families.add(
        catalogue.REPLICA_SLOTS, labels, max((layer.num_replica_slots for layer in snapshot.layers), default=0)
    )


def add_layers(families: Families, snapshot: Snapshot, recent: RecentRows, differences: Differences) -> None:
    """Plan-wide series, of rank 0's snapshot."""
    server = snapshot.worker.engine, snapshot.worker.model
    layers = [regions_of(snapshot, index) for index in range(len(snapshot.layers))]
    names = layer_labels([layer.name for layer in snapshot.layers])
    for info, name, regions in zip(snapshot.layers, names, layers, strict=True):
        add_layer(families, (*server, name), info, regions, differences)
        hottest = recent.hottest(name, regions["expert_rows"], snapshot.time)
        for expert in hottest:
            labels = (*server, name, expert, info.home_rank[expert])
            families.add(catalogue.EXPERT_ROWS, labels, int(regions["expert_rows"][expert]))
    ratios = catalogue.LOAD_IMBALANCE, catalogue.LOAD_IMBALANCE, catalogue.ROUTING_KAPPA
    ends: tuple[tuple[str, ...], ...] = (("fixed",), ("planned",), ())
    totals = Total.FIXED_IMBALANCE, Total.IMBALANCE, Total.KAPPA
    for metric, end, total in zip(ratios, ends, totals, strict=True):
        add_histogram_of_layers(families, metric, (*server, *end), layers, total.name.lower(), total, 1e3)


def add_layer(
    families: Families, labels: tuple[str, ...], info: LayerInfo, regions: Regions, differences: Differences
) -> None:
    """Counters of one layer."""
    sums, num_ranks = regions["sums"], len(regions["loads"])
    value = {total: int(sums[total]) for total in Total if total is not Total.SIZE}
    for metric, amount in (
        (catalogue.BATCHES, value[Total.BATCHES]),
        (catalogue.TOKENS, value[Total.ROWS] // info.top_k),
        (catalogue.BLOCKS, value[Total.BLOCKS]),
        (catalogue.MEAN_RANK_BLOCKS, value[Total.BLOCKS] / num_ranks),
        (catalogue.BALANCED_RANK_BLOCKS, value[Total.BALANCED]),
        (catalogue.REPLICA_BYTES, value[Total.TRANSFERS] * info.expert_bytes),
        (catalogue.MOVED_BLOCKS, value[Total.MOVED]),
    ):
        families.add(metric, labels, amount)
    families.add(catalogue.BUSIEST_RANK_BLOCKS, (*labels, "fixed"), value[Total.FIXED_BUSIEST])
    families.add(catalogue.BUSIEST_RANK_BLOCKS, (*labels, "planned"), value[Total.BUSIEST])
    for rank in range(num_ranks):
        families.add(catalogue.RANK_BLOCKS, (*labels, rank, "fixed"), int(regions["fixed_loads"][rank]))
        families.add(catalogue.RANK_BLOCKS, (*labels, rank, "planned"), int(regions["loads"][rank]))
    resident, others = differences.counted(
        labels,
        value[Total.BATCHES],
        value[Total.REPLICAS] - value[Total.TRANSFERS],
        value[Total.BATCHES] - value[Total.REPLICATED] - value[Total.REFUSED],
    )
    families.add(catalogue.REPLICAS, (*labels, "resident"), resident)
    families.add(catalogue.REPLICAS, (*labels, "copied"), value[Total.TRANSFERS])
    has_slots = info.num_replica_slots > 0
    for decision, batches in (
        ("replicated", value[Total.REPLICATED]),
        ("refused", value[Total.REFUSED]),
        ("not_needed", others if has_slots else 0),
        ("no_slots", 0 if has_slots else others),
    ):
        families.add(catalogue.PLAN_DECISIONS, (*labels, decision), batches)


def add_histogram_of_layers(
    families: Families,
    metric: Metric,
    labels: Sequence[object],
    layers: Sequence[Regions],
    region: str,
    total: Total,
    unit: float,
) -> None:
    """Add one histogram of all layers together; ``unit`` of the sums makes one of the metric."""
    counts = np.zeros(len(metric.buckets) + 1, dtype=np.int64)
    for regions in layers:
        counts += regions[region]
    families.add_histogram(metric, labels, counts, sum(int(regions["sums"][total]) for regions in layers) / unit)


def regions_of(snapshot: Snapshot, index: int) -> Regions:
    """The totals of one layer by region."""
    num_experts = len(snapshot.layers[index].home_rank)
    return totals_map(snapshot.worker.num_ranks, num_experts).split(snapshot.totals[index])


def layer_labels(names: Sequence[str]) -> list[str]:
    """The number of each layer in the model, which dashboards can sort; the names where numbers are not unique."""
    numbers = [re.search(r"\.(\d+)(?:\.|$)", name) for name in names]
    labels = [number[1] if number else name for number, name in zip(numbers, names, strict=True)]
    return labels if len(set(labels)) == len(labels) else list(names)


class Differences:
    """Counters that are differences of totals, kept from falling.

    Totals are copied while a batch is added to them, so one may hold a batch that another does not hold yet. A
    difference of the two is then too large or too small until the next copy, and a counter that falls would be taken
    for one of a new process, with all that it holds as its gain.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, ...], tuple[int, ...]] = {}

    def counted(self, layer: tuple[str, ...], batches: int, *values: int) -> tuple[int, ...]:
        """The values, each at least 0 and what it was, unless the layer's worker was started anew.

        Args:
            layer: the layer's labels.
            batches: that the layer has served, which tells of a new start.
            values: the differences.
        """
        before = self._last.get(layer, ())
        if not before or batches < before[0]:
            before = (0,) * (1 + len(values))
        self._last[layer] = last = (batches, *map(max, values, before[1:]))
        return last[1:]


class RecentRows:
    """Which experts of a layer got most rows lately.

    Rows that fell, or are of other experts, belong to a worker that was started anew: it then counts from its start.
    """

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[float, NDArray[np.int64]]]] = {}

    def hottest(self, layer: str, rows: NDArray[np.int64], now: float) -> list[int]:
        """The ``HOTTEST_EXPERTS`` experts with most rows since the mark before the last, or since the start.

        Args:
            layer: the layer's label.
            rows: int64 [E], all rows so far.
            now: when they were counted, Unix time.
        """
        marks = self._marks.get(layer, [])
        if not marks or rows.shape != marks[-1][1].shape or (rows < marks[-1][1]).any():
            self._marks[layer] = marks = [(now, np.zeros_like(rows))]
        if now - marks[-1][0] >= LATELY_S:
            self._marks[layer] = marks = [marks[-1], (now, rows.copy())]
        lately = rows - marks[0][1]
        order = np.lexsort((np.arange(rows.size), -lately))[:HOTTEST_EXPERTS]
        return [int(expert) for expert in order if lately[expert] > 0]


__all__ = ["LayerCollector", "layer_labels"]
