"""The frame of a dashboard: rows of panels, and the variables that narrow its queries down.

Decides identity, time range and layout. Knows no metric but the one that lists what is running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import DATA_SOURCE, Panel
from dashboards.promql import VARIABLES
from megaflux_serve.metrics.catalogue import BUILD_INFO

TAG = "megaflux"


@dataclass(frozen=True)
class Row:
    """A title and the panels under it."""

    title: str
    panels: Sequence[Panel]


def dashboard(
    uid: str, title: str, description: str, rows: Sequence[Row], variables: Sequence[str] = VARIABLES
) -> models.Dashboard:
    """A dashboard of rows, with a link to its sisters.

    Args:
        uid: identity in Grafana; links and bookmarks hold it.
        title: as listed.
        description: one sentence.
        rows: from top to bottom.
        variables: labels of ``VARIABLES`` that its queries use.
    """
    board = (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(builders.DashboardLink("MegaFlux").type(models.DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True))
        .with_variable(builders.DatasourceVariable("datasource").label("data source").type("prometheus"))
    )
    for index, label in enumerate(variables):
        board.with_variable(_variable(label, variables[:index]))
    numbers = count(1)
    for row in rows:
        board.with_row(builders.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            board.with_panel(panel.id(next(numbers)))
    return board.build()


def _variable(label: str, outer: Sequence[str]) -> builders.QueryVariable:
    """Values of a label, among the series that the variables before it choose."""
    chosen = ", ".join(f'{name}=~"${name}"' for name in outer)
    series = f"{BUILD_INFO.name}{{{chosen}}}" if chosen else BUILD_INFO.name
    query: dict[str, object] = {"query": f"label_values({series}, {label})", "refId": label}
    return (
        builders.QueryVariable(label)
        .datasource(DATA_SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )
