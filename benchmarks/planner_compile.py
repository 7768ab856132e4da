"""Compile the planner's kernels for many shapes at once, a process each, into the kernel cache.

A benchmark that compiles one shape after another leaves its device idle for minutes; afterwards ``compile_planner`` and
``compile_plan_counts`` of these shapes load an object file.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import NamedTuple

from megaflux_kernels.layout import SearchShape
from megaflux_kernels.planner_map import PlannerShape
from megaflux_kernels.worklist import LayerShape, Tiling


class Job(NamedTuple):
    """One kernel: the launch for a ``PlannerShape``, the batch of plans for a ``SearchShape``.

    ``layer``: the layer whose tables the launch writes, or None; ``trace``: record the ends of the stages.
    """

    shape: PlannerShape | SearchShape
    layer: LayerShape | None = None
    trace: bool = False


def compile_all(jobs: Sequence[Job]) -> None:
    """Compile all jobs; returns when their objects are stored."""
    processes = max(1, min(len(jobs), (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_job, jobs, chunksize=1)


def compile_job(job: Job) -> None:
    """Compile one job, or find it stored."""
    from megaflux_kernels.own_tables import ForwardTables
    from megaflux_kernels.plan_counts import compile_plan_counts
    from megaflux_kernels.planner import compile_planner

    if isinstance(job.shape, SearchShape):
        compile_plan_counts(job.shape)
    else:
        compile_planner(job.shape, ForwardTables(job.layer, Tiling()) if job.layer else None, job.trace)


__all__ = ["Job", "compile_all"]
