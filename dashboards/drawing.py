"""How each kind of panel is drawn with matplotlib.

Decides units, colours, names and axes. Asks nobody: a panel's answers are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from dashboards.queries import named

MAX_NAMES, MAX_NAME = 8, 34
LINE = 0.16  # of a table, of the panel's height
DATES = timezone.utc

Answer = tuple[str, list[Any]]
"""Legend and series of one query."""


# ---- values and names ------------------------------------------------------------------------------------------------


def scale(panel: dict[str, Any], values: Sequence[float]) -> tuple[float, str]:
    """By what to multiply values for a readable unit, and the unit's name."""
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    finite = [abs(value) for value in values if np.isfinite(value)]
    largest = max(finite, default=0.0)
    if unit in ("bytes", "binBps"):
        suffix = "B" if unit == "bytes" else "B/s"
        sizes = ((2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))
        size, prefix = next((entry for entry in sizes if largest >= entry[0]), (1.0, ""))
        return 1 / size, prefix + suffix
    if unit == "s":
        return next((pair for limit, pair in ((1e-3, (1e6, "µs")), (1.0, (1e3, "ms"))) if largest < limit), (1.0, "s"))
    return {"percentunit": (100.0, "%"), "suffix:/s": (1.0, "/s")}.get(unit, (1.0, ""))


def flat(answers: Sequence[Answer]) -> list[tuple[str, Any]]:
    """Name and series of every line of a panel."""
    return [(named(legend, one.labels), one) for legend, series in answers for one in series]


def all_values(lines: Sequence[tuple[str, Any]]) -> list[float]:
    """Every value of every line."""
    return [value for _, one in lines for value in one.values]


def readable(value: float, unit: str) -> str:
    """A number with as many digits as help."""
    digits = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def natural(name: str) -> tuple[Any, ...]:
    """Sorts "layer 10" after "layer 9"."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in name.replace(".", " ").split())


def show_time(axes: Axes, start: float, end: float) -> None:
    """A time axis from ``start`` to ``end``."""
    axes.set_xlim(*dated([start, end]))
    locator = AutoDateLocator(minticks=3, maxticks=6, tz=DATES)
    axes.xaxis_date(DATES)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=DATES, show_offset=False))
    axes.tick_params(labelsize=7)


# ---- the kinds of panels ---------------------------------------------------------------------------------------------


def draw_lines(axes: Axes, panel: dict[str, Any], answers: Sequence[Answer]) -> None:
    lines = flat(answers)
    factor, unit = scale(panel, all_values(lines))
    is_stacked = panel["fieldConfig"]["defaults"]["custom"].get("stacking", {}).get("mode") == "normal"
    handles = (stack if is_stacked else plot)(axes, lines, factor)
    axes.set_ylabel(unit, fontsize=7)
    if panel["fieldConfig"]["defaults"].get("min") == 0:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.grid(alpha=0.25)
    shown = [name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…" for name, _ in lines[:MAX_NAMES]]
    if len(lines) > MAX_NAMES:
        shown[-1] += f" and {len(lines) - MAX_NAMES} more"
    if any(shown):
        axes.legend(
            handles[:MAX_NAMES],
            shown,
            fontsize=6,
            ncols=min(len(shown), 4),
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.1),
        )


def plot(axes: Axes, lines: Sequence[tuple[str, Any]], factor: float) -> list[Artist]:
    """Each series as a line."""
    return [axes.plot(dated(one.times), np.multiply(one.values, factor), lw=1.2)[0] for _, one in lines]


def stack(axes: Axes, lines: Sequence[tuple[str, Any]], factor: float) -> list[Artist]:
    """Series on top of each other; one that has no value at a time counts as 0 there."""
    times, grid = table_of(lines, factor)
    return list(axes.stackplot(dated(times), np.nan_to_num(grid), alpha=0.75))


def table_of(lines: Sequence[tuple[str, Any]], factor: float) -> tuple[list[float], NDArray[np.float64]]:
    """All times, and a row of values a series, NaN where it has none."""
    times = sorted({t for _, one in lines for t in one.times})
    grid = np.full((len(lines), len(times)), np.nan)
    for row, (_, one) in zip(grid, lines, strict=True):
        row[np.searchsorted(times, one.times)] = np.multiply(one.values, factor)
    return times, grid


def dated(times: Sequence[float]) -> list[float]:
    """Unix times as matplotlib's dates."""
    return [date2num(datetime.fromtimestamp(t, DATES)) for t in times]


def draw_figure(axes: Axes, panel: dict[str, Any], answers: Sequence[Answer]) -> None:
    lines = flat(answers)
    last = [one.values[-1] for _, one in lines]
    factor, unit = scale(panel, last)
    axes.set_axis_off()
    text = "\n".join(f"{name} {readable(v * factor, unit)}".strip() for (name, _), v in zip(lines, last, strict=True))
    axes.text(
        0.0, 0.45, text, va="center", fontsize=17 if len(lines) == 1 else 9, weight="bold", transform=axes.transAxes
    )


def draw_bars(axes: Axes, panel: dict[str, Any], answers: Sequence[Answer]) -> None:
    lines = sorted(flat(answers), key=lambda line: line[1].values[-1], reverse=True)
    values = [one.values[-1] for _, one in lines]
    factor, unit = scale(panel, values)
    axes.barh(range(len(lines)), np.multiply(values, factor), color="#3b78b0")
    axes.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=7)
    axes.tick_params(labelsize=6)


def draw_table(axes: Axes, panel: dict[str, Any], answers: Sequence[Answer]) -> None:
    options = {one["id"]: one.get("options", {}) for one in panel.get("transformations", [])}
    series = [one for _, found in answers for one in found]
    if "groupingToMatrix" in options:
        draw_matrix(axes, panel, series, options["groupingToMatrix"])
    else:
        draw_facts(axes, series, options["filterFieldsByName"]["include"]["names"])


def draw_matrix(axes: Axes, panel: dict[str, Any], series: Sequence[Any], options: dict[str, str]) -> None:
    """A coloured table with a number in every cell."""
    row, column = options["rowField"], options["columnField"]
    rows = sorted({one.labels[row] for one in series}, key=natural)
    columns = sorted({one.labels[column] for one in series}, key=natural)
    grid = np.full((len(rows), len(columns)), np.nan)
    for one in series:
        grid[rows.index(one.labels[row]), columns.index(one.labels[column])] = one.values[-1]
    factor, unit = scale(panel, list(grid.ravel()))
    limits = panel["fieldConfig"]["defaults"]
    image = axes.imshow(grid * factor, aspect="auto", cmap="RdYlBu_r", vmin=limits.get("min"), vmax=limits.get("max"))
    shades = np.asarray(image.norm(grid * factor))
    for (i, j), value in np.ndenumerate(grid * factor):
        dark = np.isfinite(value) and abs(shades[i, j] - 0.5) > 0.35
        axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_yticks(range(len(rows)), rows, fontsize=6)
    axes.set_xticks(range(len(columns)), [f"{column} {name}" for name in columns], fontsize=7)
    axes.set_ylabel(f"{row} ({unit})" if unit else row, fontsize=7)


def draw_facts(axes: Axes, series: Sequence[Any], labels: Sequence[str]) -> None:
    """A table of labels."""
    axes.set_axis_off()
    cells = sorted({tuple(one.labels.get(label, "") for label in labels) for one in series})
    height = min(LINE * (len(cells) + 1), 1.0)
    box = Bbox.from_bounds(0, 1 - height, 1, height)
    table = axes.table(cells, colLabels=list(labels), bbox=box, cellLoc="left", colLoc="left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(7.5)


def draw_heat(axes: Axes, panel: dict[str, Any], answers: Sequence[Answer]) -> None:
    lines = sorted(flat(answers), key=lambda line: natural(line[0]))
    factor, unit = scale(panel, all_values(lines))
    times, grid = table_of(lines, factor)
    lowest = panel["options"]["color"].get("min")
    image = axes.pcolormesh(dated(times), range(len(lines)), grid, cmap="YlOrRd", shading="nearest", vmin=lowest)
    axes.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=6)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01)
    bar.ax.tick_params(labelsize=6)
    bar.set_label(unit, fontsize=7)


KINDS = {
    "timeseries": draw_lines,
    "stat": draw_figure,
    "bargauge": draw_bars,
    "table": draw_table,
    "heatmap": draw_heat,
}

__all__ = ["KINDS", "Answer", "all_values", "flat", "show_time"]
