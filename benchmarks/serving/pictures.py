"""The picture of prefill latencies: how much faster than fixed placement every backend is, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import figure
from benchmarks.serving.backends import BACKENDS

CONTROL = "balanced"


def draw_prefill(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a panel a model and routing, of the routings that were measured at several batches.

    Args:
        path: the PNG.
        rows: of ``prefill_latency``, as ``read_results`` gives them.
    """
    latency = {}
    for row in rows:
        if row["metric"] == "latency_ms" and row["case"]["routing"] != CONTROL:
            case = row["case"]
            panel = latency.setdefault((case["model"], case["routing"]), {})
            panel.setdefault((case["batch"], case["chunk"]), {})[case["backend"]] = row["value"]
    panels = {key: cells for key, cells in latency.items() if all("fixed" in cell for cell in cells.values())}
    if not panels:
        return
    title = "Time to first token of a batch: fixed placement's over each backend's (more is better)"
    with figure(path, columns=len(panels), panel_inches=(4.6, 3.2), title=title) as axes:
        for axis, ((model, routing), cells) in zip(axes, panels.items(), strict=True):
            names = [name for name in BACKENDS if any(name in cell for cell in cells.values())]
            width = 0.8 / len(names)
            for index, name in enumerate(names):
                heights = [cell["fixed"] / cell[name] if name in cell else 0.0 for cell in cells.values()]
                places = [x + (index - (len(names) - 1) / 2) * width for x in range(len(cells))]
                axis.bar(places, heights, width, label=name)
            axis.axhline(1.0, color="0.4", linewidth=0.8)
            axis.set_xticks(range(len(cells)), [f"{batch} x\n{chunk // 1024}K" for batch, chunk in cells])
            axis.set_title(f"{model}, {routing}")
            axis.set_xlabel("requests x tokens a step")
        axes[0].legend(ncols=2, fontsize=8)
