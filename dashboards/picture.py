"""A dashboard as a picture, from the answers that a Prometheus gives to its panels' queries.

Decides where panels lie, as the dashboard says, and who is asked. This is not Grafana: it shows what an operator would
see there, for documents and for those who have no Grafana.
"""

from __future__ import annotations

import io
from datetime import datetime, timezone
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dashboards.drawing import KINDS, Answer, all_values, flat, show_time
from dashboards.queries import filled, panels, targets

COLUMNS, COLUMN_IN, ROW_IN, TITLE_IN = 24, 0.6, 0.36, 0.6
GAP_IN = 0.05  # between the frames of panels
ROOM_IN = {
    "default": (0.66, 0.2, 0.4, 0.6),
    "stat": (0.2, 0.1, 0.5, 0.15),
    "table": (0.66, 0.2, 0.4, 0.3),
    "bargauge": (2.3, 0.3, 0.4, 0.45),
}
"""Left, right, top and bottom inside the frame, by kind of panel: for ticks, names, title and legend."""


class Answers(Protocol):
    """Who answers queries; ``examples/prometheus_server.Prometheus`` does."""

    def query(self, expression: str, at: float | None = None) -> list[Any]: ...

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Any]: ...


def draw(dashboard: dict[str, Any], prometheus: Answers, start: float, end: float, interval: str) -> bytes:
    """PNG of every panel.

    Args:
        dashboard: a committed dashboard.
        prometheus: who answers.
        start, end: seconds since the epoch.
        interval: what ``$__rate_interval`` stands for.
    """
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    figure = Figure(figsize=(COLUMNS * COLUMN_IN, rows * ROW_IN + TITLE_IN), facecolor="white")
    FigureCanvasAgg(figure)
    write(figure, 0.1, 0.25, dashboard["title"], fontsize=15, weight="bold")
    when = datetime.fromtimestamp(end, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    note = f"Prometheus' answers, drawn with matplotlib; this is not Grafana; {when}"
    write(figure, COLUMNS * COLUMN_IN - 0.1, 0.25, note, fontsize=8, color="grey", ha="right")
    for row in dashboard["panels"]:
        if row["type"] == "row":
            middle = TITLE_IN + (row["gridPos"]["y"] + 0.5) * ROW_IN
            write(figure, 0.1, middle, row["title"], fontsize=11, weight="bold", color="#444444")
    for panel in panels(dashboard):
        axes = framed(figure, panel)
        answers = ask(dashboard, panel, prometheus, start, end, interval)
        if np.isfinite(all_values(flat(answers))).any():
            KINDS[panel["type"]](axes, panel, answers)
            if panel["type"] in ("timeseries", "heatmap"):
                show_time(axes, start, end)
        else:
            axes.set_axis_off()
            axes.text(0.5, 0.5, "no data", ha="center", va="center", color="grey", transform=axes.transAxes)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=90)
    return png.getvalue()


def write(figure: Figure, x: float, y: float, text: str, **style: Any) -> None:
    """Text at a place in inches from the figure's upper left corner."""
    width, height = figure.get_size_inches()
    figure.text(x / width, 1 - y / height, text, va="center", **style)


def framed(figure: Figure, panel: dict[str, Any]) -> Axes:
    """The frame and the title of a panel, and axes inside."""
    place = panel["gridPos"]
    left, top = place["x"] * COLUMN_IN + GAP_IN, TITLE_IN + place["y"] * ROW_IN + GAP_IN
    wide, high = place["w"] * COLUMN_IN - 2 * GAP_IN, place["h"] * ROW_IN - 2 * GAP_IN
    figure.patches.append(
        Rectangle(*fractions(figure, left, top, wide, high), transform=figure.transFigure, fill=False, ec="#dddddd")
    )
    write(figure, left + 0.12, top + 0.18, panel["title"], fontsize=8.5)
    room_left, room_right, room_top, room_bottom = ROOM_IN.get(panel["type"], ROOM_IN["default"])
    corner, inner_width, inner_height = fractions(
        figure, left + room_left, top + room_top, wide - room_left - room_right, high - room_top - room_bottom
    )
    return figure.add_axes((*corner, inner_width, inner_height))


def fractions(
    figure: Figure, left: float, top: float, wide: float, high: float
) -> tuple[tuple[float, float], float, float]:
    """Lower left corner, width and height in fractions of the figure, from inches and its upper left corner."""
    width, height = figure.get_size_inches()
    return (left / width, 1 - (top + high) / height), wide / width, high / height


def ask(
    dashboard: dict[str, Any], panel: dict[str, Any], prometheus: Answers, start: float, end: float, interval: str
) -> list[Answer]:
    """The answer to each query of a panel."""
    answers = []
    for target in targets(dashboard, panel):
        expression = filled(target.expression, interval)
        if target.instant:
            answers.append((target.legend, prometheus.query(expression, end)))
        else:
            step = max((end - start) / 200, 1.0)
            answers.append((target.legend, prometheus.query_range(expression, start, end, step)))
    return answers


__all__ = ["Answers", "draw"]
