"""Timing statistics. Decides what median and p99 mean here; knows nothing of what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Timing:
    """Statistics of repeated runs, in microseconds.

    Attributes:
        median_us: median over iterations.
        p99_us: 99th percentile, linearly interpolated.
        min_us: fastest iteration.
        iterations: how many were measured.
    """

    median_us: float
    p99_us: float
    min_us: float
    iterations: int


def summarise(samples_us: ArrayLike) -> Timing:
    """Statistics of float [iterations], or of [ranks, iterations] after taking the slowest rank of each iteration.

    Raises:
        ValueError: no samples, or an array of another rank.
    """
    samples = np.asarray(samples_us, dtype=np.float64)
    if samples.ndim not in (1, 2) or samples.size == 0:
        raise ValueError(
            f"samples_us has shape {samples.shape}; allowed: [iterations] or [ranks, iterations], not empty"
        )
    slowest = samples if samples.ndim == 1 else samples.max(axis=0)
    return Timing(float(np.median(slowest)), float(np.percentile(slowest, 99)), float(slowest.min()), slowest.size)


def time_call(
    call: Callable[[], Any],
    iterations: int = 50,
    warmup: int = 5,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> NDArray[np.float64]:
    """float64 [iterations]: host microseconds of each call, after ``warmup`` calls that are not measured.

    A device call must synchronise before it returns, or be timed with device events instead.
    """
    for _ in range(warmup):
        call()
    samples = np.empty(iterations)
    for iteration in range(iterations):
        start = clock_ns()
        call()
        samples[iteration] = (clock_ns() - start) / 1e3
    return samples
