"""The few kinds of panels that the dashboards are made of, over grafana-foundation-sdk.

Decides how a panel looks: colours, legends, sizes, how an answer becomes a picture. Knows no metric: title, meaning,
unit and queries are arguments. Widths are in Grafana's columns, 24 to a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATA_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
RATIO, SHARE, COUNT, PER_S = "none", "percentunit", "short", "suffix:/s"
SECONDS, BYTES, BYTES_PER_S = "s", "bytes", "binBps"
HEIGHT, FIGURE_HEIGHT = 8, 3

Panel = Any  # every builder of a panel has build(), id(), height() and span(); the SDK has no common class for them


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the name of its series, ``{{label}}`` standing for the label's value."""

    expression: str
    legend: str = ""


def graph(
    title: str,
    meaning: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = 8,
    minimum: float = 0.0,
    stacked: bool = False,
) -> Panel:
    """Lines over time."""
    panel = (
        timeseries.Panel()
        .min(minimum)
        .line_width(1)
        .fill_opacity(25 if stacked else 6)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    return finish(panel, title, meaning, unit, queries, width, HEIGHT)


def figure(title: str, meaning: str, unit: str, query: Query, *, width: int = 4, decimals: int | None = None) -> Panel:
    """One number, the newest, with its course behind it."""
    panel = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .color_mode(common_models.BigValueColorMode.NONE)
    )
    if decimals is not None:
        panel.decimals(decimals)
    return finish(panel, title, meaning, unit, [query], width, FIGURE_HEIGHT)


def bars(title: str, meaning: str, unit: str, query: Query, *, width: int = 8) -> Panel:
    """The newest value of every series as a bar, longest first."""
    panel = (
        bargauge.Panel()
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .display_mode(common_models.BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .min(0)
        .color_scheme(board.FieldColor().mode(models.FieldColorModeId.CONTINUOUS_BL_YL_RD))
    )
    sorted_query = Query(f"sort_desc({query.expression})", query.legend)
    return finish(panel, title, meaning, unit, [sorted_query], width, HEIGHT, instant=True)


def matrix(
    title: str,
    meaning: str,
    unit: str,
    query: Query,
    *,
    row: str,
    column: str,
    minimum: float,
    maximum: float,
    width: int = 12,
) -> Panel:
    """The newest values as a coloured table: label ``row`` down, label ``column`` across; the range of the colours."""
    panel = (
        table.Panel()
        .with_transformation(
            models.DataTransformerConfig(
                id_val="groupingToMatrix",
                options={"rowField": row, "columnField": column, "valueField": "Value"},
            )
        )
        .cell_options(common_models.TableColoredBackgroundCellOptions())
        .color_scheme(board.FieldColor().mode(models.FieldColorModeId.CONTINUOUS_BL_YL_RD))
        .decimals(2)
        .min(minimum)
        .max(maximum)
    )
    return finish(panel, title, meaning, unit, [query], width, HEIGHT + 4, instant=True)


def over_time(title: str, meaning: str, unit: str, query: Query, *, minimum: float, width: int = 12) -> Panel:
    """A heat map: time across, one row a series, colour for the value from ``minimum`` upwards."""
    panel = (
        heatmap.Panel()
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("YlOrRd").steps(64).min(minimum))
        .rows_frame(heatmap.RowsHeatmapOptions().value(title))
        .cell_values(heatmap.CellValues().unit(unit).decimals(2))
        .show_color_scale(True)
    )
    return finish(panel, title, meaning, unit, [query], width, HEIGHT)


def facts(title: str, meaning: str, query: Query, labels: Sequence[str]) -> Panel:
    """A table of labels over the whole width, one line a series."""
    panel = table.Panel().with_transformation(
        models.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": list(labels)}})
    )
    return finish(panel, title, meaning, COUNT, [query], 24, HEIGHT - 2, instant=True)


def finish(
    panel: Panel,
    title: str,
    meaning: str,
    unit: str,
    queries: Sequence[Query],
    width: int,
    height: int,
    *,
    instant: bool = False,
) -> Panel:
    """What all panels have: words, unit, size, source and queries."""
    panel.title(title).description(meaning).unit(unit).span(width).height(height).datasource(DATA_SOURCE)
    for letter, query in zip(ascii_uppercase, queries, strict=False):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(letter)
        if instant:
            target.instant()
            target.format(PromQueryFormat.TABLE if isinstance(panel, table.Panel) else PromQueryFormat.TIME_SERIES)
        else:
            target.range()
        panel.with_target(target)
    return panel
