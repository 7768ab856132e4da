"""Figures of a window: expert shares, skew, lengths, and how far apart the routing of its tasks is.

Decides definitions only; RoutePack's section 2.3.2 and Figure 5 are their source. Arrays in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.errors import ConfigError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class LayerProfile:
    """One MoE layer of a window.

    Attributes:
        rows: routed rows, tokens times k.
        kappa: routing skew, E times the sum of squared shares; 1 for uniform routing.
        hottest: expert with the most rows.
        hottest_over_uniform: its share over 1/E.
        idle: experts without a row.
        rank_max_over_mean: rows of the busiest rank over the mean rank, under identity placement.
    """

    rows: int
    kappa: float
    hottest: int
    hottest_over_uniform: float
    idle: int
    rank_max_over_mean: float


def layer_profiles(counts: NDArray[np.int32], num_ranks: int) -> list[LayerProfile]:
    """Figures of every MoE layer.

    Args:
        counts: int32 [N, L, E], demand of a window.
        num_ranks: expert-parallel ranks P of the identity placement, where rank ``e // (E/P)`` owns expert e.

    Raises:
        ConfigError: P does not divide E.
    """
    totals = counts.sum(axis=0, dtype=np.int64)
    ranks = rank_rows(totals, num_ranks)
    profiles = []
    for loads, rank_loads in zip(totals, ranks, strict=True):
        rows = int(loads.sum())
        shares = loads / max(rows, 1)
        profiles.append(
            LayerProfile(
                rows,
                float(loads.size * (shares**2).sum()),
                int(loads.argmax()),
                float(loads.size * shares.max()),
                int((loads == 0).sum()),
                float(rank_loads.max() / rank_loads.mean()) if rows else 1.0,
            )
        )
    return profiles


def rank_rows(totals: NDArray[Any], num_ranks: int) -> NDArray[np.int64]:
    """int64 [..., P], rows of each rank under identity placement, from rows [..., E] of each expert.

    Raises:
        ConfigError: P does not divide E.
    """
    num_experts = totals.shape[-1]
    if num_ranks < 1 or num_experts % num_ranks:
        raise ConfigError("ranks", num_ranks, f"a divisor of the {num_experts} experts")
    return np.asarray(totals.reshape(*totals.shape[:-1], num_ranks, -1).sum(axis=-1, dtype=np.int64))


def task_distances(counts: NDArray[np.int32], tasks: Sequence[str], num_ranks: int) -> tuple[list[str], FloatArray]:
    """How differently tasks load the ranks: square-root Jensen-Shannon divergence, mean over layers (Figure 5 (c)).

    Off the diagonal stand two tasks; on it two halves of one task, its trajectories dealt alternately in the window's
    order, which says how much distance chance alone makes. A task of one trajectory has no halves: NaN.

    Args:
        counts: int32 [N, L, E].
        tasks: N labels.
        num_ranks: P of the identity placement, a divisor of E.

    Returns:
        The labels in order, and float64 [tasks, tasks], 0 for equal to 1 for disjoint routing (logarithms to base 2).
    """
    ranks = rank_rows(counts, num_ranks)
    labels = sorted(set(tasks))
    members = [np.flatnonzero(np.asarray(tasks) == label) for label in labels]
    profiles = [ranks[index].sum(axis=0) for index in members]
    distances = np.zeros((len(labels), len(labels)))
    for i, index in enumerate(members):
        halves = [ranks[index[start::2]].sum(axis=0) for start in (0, 1)]
        distances[i, i] = root_jsd(*halves).mean() if len(index) > 1 else np.nan
        for j in range(i):
            distances[i, j] = distances[j, i] = root_jsd(profiles[i], profiles[j]).mean()
    return labels, distances


def root_jsd(first: NDArray[np.int64], second: NDArray[np.int64]) -> FloatArray:
    """Square root of the Jensen-Shannon divergence to base 2 of two sets of distributions, over the last axis.

    A metric (Endres and Schindelin, 2003), 0 to 1. Rows need not be normalised; one without weight counts as uniform.
    """
    p, q = (_normalised(rows) for rows in (first, second))
    middle = (p + q) / 2
    divergence = (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2
    return np.asarray(np.sqrt(np.maximum(divergence, 0.0)))


def _normalised(rows: NDArray[np.int64]) -> FloatArray:
    totals = rows.sum(axis=-1, keepdims=True)
    uniform = np.full(rows.shape, 1 / rows.shape[-1])
    return np.asarray(np.divide(rows, totals, out=uniform, where=totals > 0))


def _relative_entropy(p: FloatArray, q: FloatArray) -> FloatArray:
    ratio = np.divide(p, q, out=np.ones_like(p), where=p > 0)
    return np.asarray((p * np.log2(ratio)).sum(axis=-1))


__all__ = ["LayerProfile", "layer_profiles", "rank_rows", "root_jsd", "task_distances"]
