"""Pictures of rank loads before and after replication, as PNG files, drawn off screen.

Decides what a load picture looks like. Knows only ``LayerSummary``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megaflux_serve.cli.summary import LayerSummary
from megaflux_serve.drawing import BLUE, ORANGE, new_figure, png, styled

MAX_BAR_PANELS, MAX_BAR_RANKS = 16, 16
"""More layers or ranks than this are drawn as a heat map; bars would be too thin to read."""

BEFORE, AFTER = ORANGE, BLUE


def draw_loads(layers: Sequence[LayerSummary], title: str, unit: str) -> bytes:
    """The load of each rank before and after, layer by layer, as a PNG.

    Grouped bars while they can be read, else one heat map of load over mean for before and one for after.

    Args:
        layers: at least one layer; all with the same number of ranks.
        title: one line above the picture.
        unit: what the loads count, such as ``rows`` or ``blocks``.
    """
    small = len(layers) <= MAX_BAR_PANELS and len(layers[0].loads) <= MAX_BAR_RANKS
    with styled():
        return png(_bars(layers, unit) if small else _heat_maps(layers), title)


def _bars(layers: Sequence[LayerSummary], unit: str) -> Figure:
    """A panel a layer: two bars a rank, and the mean that no plan can beat."""
    num_ranks = len(layers[0].loads)
    columns = min(len(layers), 4 if num_ranks <= 8 else 2)
    rows = -(-len(layers) // columns)
    figure = new_figure(max(5.0, columns * max(2.5, 0.42 * num_ranks + 0.6)), 2.3 * rows + 0.9)
    panels: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, sharey=len(layers) > 1).flat)
    ranks = np.arange(num_ranks)
    for layer, axes in zip(layers, panels, strict=False):
        axes.bar(ranks - 0.2, layer.fixed_loads, 0.38, color=BEFORE, label="fixed placement")
        axes.bar(ranks + 0.2, layer.loads, 0.38, color=AFTER, label="with replicas")
        axes.axhline(float(np.mean(layer.loads)), color="0.25", linewidth=1, linestyle="--", label="mean")
        axes.set_title(_heading(layer))
        axes.set_xticks(ranks)
        axes.grid(axis="y", color="0.9")
    for axes in panels[len(layers) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel(unit)
    for axes in panels[max(0, len(layers) - columns) : len(layers)]:
        axes.set_xlabel("rank")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _heat_maps(layers: Sequence[LayerSummary]) -> Figure:
    """Layer by rank, load over the layer's mean; one colour scale for before and after, white at the mean."""
    before, after = (_over_mean([getattr(layer, name) for layer in layers]) for name in ("fixed_loads", "loads"))
    num_layers, num_ranks = before.shape
    figure = new_figure(max(7.5, 2 * min(0.45 * num_ranks, 8) + 2.2), max(3.2, min(0.24 * num_layers, 16) + 1.4))
    reach = max(float(np.abs(np.stack([before, after]) - 1).max()), 0.05)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, loads, name in zip(panels, (before, after), ("fixed placement", "with replicas"), strict=True):
        drawn = axes.imshow(loads, aspect="auto", cmap="RdBu_r", vmin=1 - reach, vmax=1 + reach, interpolation="none")
        worst = loads.max(axis=1)
        axes.set_title(f"{name}\nmax/mean {np.median(worst):.3f} (median), {worst.max():.3f} (worst layer)")
        axes.set_xlabel("rank")
        axes.set_xticks(np.arange(0, num_ranks, -(-num_ranks // 16)))
        axes.spines[:].set_visible(False)
    step = -(-num_layers // 32)
    panels[0].set_yticks(np.arange(0, num_layers, step), [layer.layer for layer in layers[::step]])
    panels[0].set_ylabel("layer")
    figure.colorbar(drawn, ax=list(panels), label="load / mean", shrink=0.9, pad=0.02)
    return figure


def _over_mean(loads: list[tuple[int, ...]]) -> Any:
    """float64 [layers, P]: loads over the mean of their layer; 1 where a layer has none."""
    array = np.asarray(loads, dtype=np.float64)
    mean = array.mean(axis=1, keepdims=True)
    return np.divide(array, mean, out=np.ones_like(array), where=mean > 0)


def _heading(layer: LayerSummary) -> str:
    """Name and what happened, for a panel of bars."""
    name = f"layer {layer.layer}" if layer.layer.isdecimal() else layer.layer
    return f"{name}\nmax/mean {layer.max_over_mean_before:.2f} → {layer.max_over_mean_after:.2f}"
