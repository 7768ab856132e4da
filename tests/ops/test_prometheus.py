"""The real thing: Prometheus scrapes the demonstration's server under load, and every panel and rule has data there."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards import queries
from examples.prometheus_server import program
from examples.watch_demo import RATE_INTERVAL, Watched, draw_all, load, watched
from megaflux_serve.cli.top.figures import figures
from megaflux_serve.cli.top.scrape import Change, scrape
from megaflux_serve.metrics import catalogue
from tests.ops.test_dashboards import ALERTS, RECORDED, SERIES

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(program("prometheus") is None, reason="no prometheus program; make prometheus fetches it"),
]
LOAD_S = 40.0


@pytest.fixture(scope="module")
def watch() -> Iterator[Watched]:
    """A server that has answered prompts for a while, and a trainer that has migrated to two windows of them."""
    with watched() as found:
        load(found.server, LOAD_S)
        while not found.prometheus.query("megaflux_window_migration_seconds_count > 1"):
            load(found.server, 5.0)
        yield found


def finite(watch: Watched, expression: str) -> int:
    """Values of an expression while the server was watched."""
    series = watch.prometheus.query_range(expression, watch.started, time.time(), 1)
    return sum(math.isfinite(value) for one in series for value in one.values)


def test_both_processes_are_scraped(watch: Watched) -> None:
    scraped = watch.prometheus.query("max_over_time(up[10m])")  # one scrape may time out on a busy machine
    assert {one.labels["job"]: one.values[-1] for one in scraped} == {"megaflux-server": 1, "megaflux-trainer": 1}


def test_every_metric_of_the_catalogue_is_there(watch: Watched) -> None:
    assert [name for name in SERIES if not finite(watch, name)] == []


@pytest.mark.parametrize("metric", catalogue.CATALOGUE, ids=lambda metric: metric.name)
def test_labels_are_those_of_the_catalogue(watch: Watched, metric: catalogue.Metric) -> None:
    for name in metric.series:
        for one in watch.prometheus.query(name):
            assert one.labels.keys() - {"__name__", "job", "instance", "le"} == metric.labels.keys()
            for label, closed in metric.labels.items():
                assert not closed or one.labels[label] in closed


@pytest.mark.parametrize("target", queries.all_targets(), ids=lambda target: f"{target.dashboard}, {target.panel}")
def test_every_panel_shows_something(watch: Watched, target: queries.Target) -> None:
    assert finite(watch, queries.filled(target.expression, RATE_INTERVAL))


def test_every_rule_is_evaluated_on_series_that_exist(watch: Watched) -> None:
    evaluated = [rule for group in watch.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in evaluated} == {*RECORDED, *(rule["alert"] for rule in ALERTS)}
    assert [rule for rule in evaluated if rule["health"] != "ok"] == []
    assert [name for name in RECORDED if not finite(watch, name)] == []
    for alert in ALERTS:
        for name in re.findall(r"[\w:]*megaflux_\w+(?::\w+)?|\bup\b", alert["expr"]):
            assert finite(watch, name), f"{alert['alert']} reads {name}"


def test_a_sound_server_raises_no_alarm(watch: Watched) -> None:
    firing = [alarm for alarm in watch.prometheus.get("alerts")["alerts"] if alarm["state"] == "firing"]
    assert [alarm for alarm in firing if alarm["labels"]["severity"] == "critical"] == []


def test_top_shows_what_prometheus_says(watch: Watched) -> None:
    def counted() -> list[float]:
        return [
            watch.prometheus.query(query)[0].values[-1]
            for query in (
                "sum(megaflux_batches_total) / count(megaflux_batches_total)",
                'sum(megaflux_busiest_rank_blocks_total{placement="fixed"}) / sum(megaflux_mean_rank_blocks_total)',
            )
        ]

    deadline = time.monotonic() + 30  # the load is over: totals stop changing once every worker has reported
    while True:
        seen, scraped = figures(Change(None, scrape(f"http://127.0.0.1:{watch.server.port}/metrics"))), counted()
        shown = [seen.total.batches, seen.total.fixed]
        if shown == pytest.approx(scraped) or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert shown == pytest.approx(scraped)
    assert [rank.rank for rank in seen.ranks] == ["0", "1"]
    assert seen.capture is not None
    assert seen.capture.dropped == {}


def test_every_dashboard_can_be_drawn(watch: Watched, tmp_path: Path) -> None:
    paths = draw_all(watch, tmp_path)
    assert len(paths) == len(queries.dashboards())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
