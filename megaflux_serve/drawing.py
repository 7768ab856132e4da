"""The look of pictures: one style, drawn off screen, as PNG bytes. Knows no data.

Imported only by modules that draw, since matplotlib loads slowly.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito: told apart with every kind of colour vision.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


@contextmanager
def styled() -> Iterator[None]:
    """Figures made, filled and turned into PNGs in the block have our style; it ends with the block."""
    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An off-screen figure; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, title: str | None = None) -> bytes:
    """The figure as a PNG, with one line above all panels where there is a title."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
    return image.getvalue()


__all__ = ["BLUE", "GREEN", "ORANGE", "new_figure", "png", "styled"]
