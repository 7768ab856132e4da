"""The picture of prefill latencies: how much faster than fixed placement every backend is, case by case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.harness import figure
from benchmarks.serving.backends import BACKENDS

COLOURS = {name: f"C{index}" for index, name in enumerate(BACKENDS)}

Latencies = dict[tuple[int, int], dict[str, float]]
"""Milliseconds by (requests, budget) and backend."""


def draw_prefill(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a panel a model and routing, of the routings that were measured at several batches.

    Args:
        path: the PNG.
        rows: of ``prefill_latency``, as ``read_results`` gives them.
    """
    panels: dict[tuple[str, str], Latencies] = {}
    for row in rows:
        if row["metric"] == "latency_ms":
            case = row["case"]
            cells = panels.setdefault((case["model"], case["routing"]), {})
            cells.setdefault((case["batch"], case["chunk"]), {})[case["backend"]] = row["value"]
    panels = {
        key: cells for key, cells in panels.items() if len(cells) > 1 and all("fixed" in c for c in cells.values())
    }
    if not panels:
        return
    title = "Time to first token of a batch: fixed placement's over each backend's (more is better)"
    with figure(path, columns=len(panels), panel_inches=(4.6, 3.2), title=title) as axes:
        for axis, ((model, routing), cells) in zip(axes, panels.items(), strict=True):
            _draw_panel(axis, cells)
            axis.set_title(f"{model}, {routing}")
        shown = [name for name in BACKENDS if any(name in cell for cells in panels.values() for cell in cells.values())]
        handles = [Patch(color=COLOURS[name], label=name) for name in shown]
        axes[0].figure.legend(handles=handles, loc="outside lower center", ncols=len(shown))


def _draw_panel(axis: Axes, cells: Mapping[tuple[int, int], Mapping[str, float]]) -> None:
    names = [name for name in BACKENDS if any(name in cell for cell in cells.values())]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        heights = [cell["fixed"] / cell[name] if name in cell else 0.0 for cell in cells.values()]
        places = [x + (index - (len(names) - 1) / 2) * width for x in range(len(cells))]
        axis.bar(places, heights, width, color=COLOURS[name])
    axis.axhline(1.0, color="0.4", linewidth=0.8)
    axis.set_xticks(range(len(cells)), [f"{batch} x\n{chunk // 1024}K" for batch, chunk in cells])
    axis.set_xlabel("requests x tokens a step")


__all__ = ["draw_prefill"]
