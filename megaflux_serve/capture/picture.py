"""A window in one picture: expert shares, rank skew, lengths, and distances between tasks (RoutePack Figure 5).

Decides what is drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megaflux_serve.capture.profile import layer_profiles, task_distances
from megaflux_serve.capture.window import SealedWindow
from megaflux_serve.drawing import BLUE, ORANGE, new_figure, png, styled


def window_picture(window: SealedWindow, num_ranks: int) -> bytes:
    """PNG of a window; the distances between tasks are left out where every record has the same label.

    Args:
        window: at least one record.
        num_ranks: P of the identity placement that ranks stand for, a divisor of E.

    Raises:
        ConfigError: P does not divide E.
    """
    labels, distances = task_distances(window.counts, [record.task for record in window.records], num_ranks)
    num_panels = 3 + (len(labels) > 1)
    with styled():
        figure = new_figure(4.2 * num_panels, 3.6)
        panels = list(figure.subplots(1, num_panels))
        _expert_shares(panels[0], figure, window)
        _rank_skew(panels[1], window, num_ranks)
        _lengths(panels[2], window)
        if len(labels) > 1:
            _task_distances(panels[3], labels, distances)
        return png(figure, f"window {window.name}: {len(window)} records")


def _expert_shares(axes: Axes, figure: Figure, window: SealedWindow) -> None:
    """A row a layer, its experts from hottest to coldest."""
    totals = window.counts.sum(axis=0, dtype=np.int64)
    over_uniform = np.sort(totals / np.maximum(totals.mean(axis=1, keepdims=True), 1e-300), axis=1)[:, ::-1]
    drawn = axes.imshow(over_uniform, aspect="auto", cmap="viridis", interpolation="none")
    axes.set_title("expert share over 1/E, sorted in each layer")
    axes.set_xlabel("experts, hottest first")
    axes.set_ylabel("MoE layer")
    figure.colorbar(drawn, ax=axes, shrink=0.9, pad=0.02)


def _rank_skew(axes: Axes, window: SealedWindow, num_ranks: int) -> None:
    layers = layer_profiles(window.counts, num_ranks)
    names = window.store.model.moe_layers
    axes.plot(names, [layer.hottest_over_uniform for layer in layers], color=ORANGE, label="hottest expert over 1/E")
    axes.plot(names, [layer.rank_max_over_mean for layer in layers], color=BLUE, label="busiest rank over mean")
    axes.axhline(1, color="0.25", linewidth=1, linestyle="--")
    axes.set_title(f"skew of each layer, {num_ranks} ranks, identity placement")
    axes.set_xlabel("layer")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="0.9")
    axes.legend(loc="lower right")


def _lengths(axes: Axes, window: SealedWindow) -> None:
    axes.hist(window.lengths, bins=min(40, max(1, len(window) // 4)), color=BLUE)
    for share, style in ((50, "-"), (95, "--")):
        value = float(np.percentile(window.lengths, share))
        axes.axvline(value, color="0.25", linestyle=style, linewidth=1, label=f"P{share} {value:,.0f}")
    axes.set_title("tokens of a record, prompt and output")
    axes.set_xlabel("tokens")
    axes.set_ylabel("records")
    axes.legend()


def _task_distances(axes: Axes, labels: list[str], distances: Any) -> None:
    axes.imshow(distances, cmap="YlGnBu", vmin=0, interpolation="none")
    middle = float(np.nanmax(distances)) / 2
    for i, j in np.ndindex(distances.shape):
        text = "-" if np.isnan(distances[i, j]) else f"{distances[i, j]:.2f}"
        axes.text(j, i, text, ha="center", va="center", color="white" if distances[i, j] > middle else "black")
    names = [label or "(none)" for label in labels]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", parse_math=False)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_title("root JSD of rank loads between tasks\n(diagonal: two halves of one task)")


__all__ = ["window_picture"]
