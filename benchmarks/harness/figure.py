"""Pictures of results: one style, drawn off screen, written whole or not at all. Knows no benchmark."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megaflux_serve.durable import write_atomically

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "legend.frameon": False,
    # Okabe and Ito's palette: told apart with every kind of colour vision.
    "axes.prop_cycle": cycler(color=["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"]),
}


@contextmanager
def figure(
    path: Path,
    columns: int = 1,
    rows: int = 1,
    panel_inches: tuple[float, float] = (4.4, 3.2),
    title: str | None = None,
) -> Iterator[list[Axes]]:
    """Axes to draw on, row by row; the PNG is written when the block ends without an error.

    Args:
        path: ``benchmarks/results/<name>.png``; parents are created.
        columns: panels side by side.
        rows: panels one above the other.
        panel_inches: width and height of a panel.
        title: above all panels.
    """
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(panel_inches[0] * columns, panel_inches[1] * rows), layout="constrained")
        FigureCanvasAgg(drawing)
        axes = drawing.subplots(rows, columns, squeeze=False)
        if title:
            drawing.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        yield list(axes.flat)
        image = io.BytesIO()
        drawing.savefig(image, format="png", dpi=150, metadata={"Software": None})
    write_atomically(path, image.getvalue())
