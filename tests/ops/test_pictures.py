"""Expressions and pictures of the dashboards, without a Prometheus."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from dashboards import promql, queries
from dashboards.picture import draw
from megaflux_serve.errors import ConfigError
from megaflux_serve.metrics import catalogue as m


@dataclass(frozen=True)
class Series:
    labels: dict[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


class StandIn:
    """Answers every query with two series that have every label that the query keeps."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def query(self, expression: str, at: float | None = None) -> list[Series]:
        return self.answer(expression, (at or 0.0,))

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        return self.answer(expression, tuple(np.arange(start, end, step)))

    def answer(self, expression: str, times: tuple[float, ...]) -> list[Series]:
        self.asked.append(expression)
        labels = {name for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(", ")}
        labels |= {"rank", "layer", "version"}
        return [Series(dict.fromkeys(labels, str(i)), times, tuple(i + np.sin(times) ** 2)) for i in (1, 2)]


class Silence(StandIn):
    """Knows no series."""

    def answer(self, expression: str, times: tuple[float, ...]) -> list[Series]:
        return []


@pytest.mark.parametrize("dashboard", queries.dashboards(), ids=lambda board: board["uid"])
@pytest.mark.parametrize("prometheus", [StandIn(), Silence()], ids=["with data", "without data"])
def test_every_panel_is_drawn(dashboard: dict[str, Any], prometheus: StandIn) -> None:
    png = draw(dashboard, prometheus, 1_800_000_000.0, 1_800_000_060.0, "20s")
    height, width, _ = matplotlib.image.imread(io.BytesIO(png)).shape
    assert width in (1295, 1296)  # matplotlib 3.10 rounds down
    assert height > 500
    assert not [asked for asked in prometheus.asked if "$" in asked]


def test_expressions_select_by_the_variables_and_sum_the_rest() -> None:
    chosen = 'engine=~"$engine", model=~"$model"'
    assert (
        promql.rate(m.TOKENS, "layer") == f"sum by (layer) (rate(megaflux_tokens_total{{{chosen}}}[$__rate_interval]))"
    )
    assert (
        promql.select(m.MEMORY, use="workspace") == f'megaflux_memory_bytes{{{chosen}, rank=~"$rank", use="workspace"}}'
    )
    assert promql.select(m.WINDOW_ROWS) == "megaflux_window_rows"
    assert promql.over("a", "b") == "a / b"
    assert promql.over("a", "b", "layer") == "a / on (layer) group_left () b"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: promql.select(m.MEMORY, use="nothing"),
        lambda: promql.select(m.TOKENS, place="home"),
        lambda: promql.select(m.TOKENS, "_bucket"),
        lambda: promql.share_below(1.07, m.LOAD_IMBALANCE, placement="planned"),
        lambda: promql.quantile(0.5, m.TOKENS),
    ],
)
def test_an_expression_of_what_does_not_exist_is_refused(ask: Any) -> None:
    with pytest.raises(ConfigError):
        ask()


def test_variables_are_filled_in_and_legends_named() -> None:
    assert queries.filled('a{rank=~"$rank"}[$__rate_interval]', "20s") == 'a{rank=~".*"}[20s]'
    assert queries.named("p50, rank {{rank}}", {"rank": "3"}) == "p50, rank 3"
    assert queries.named("", {"__name__": "a", "rank": "3", "layer": "1"}) == "layer 1, rank 3"
