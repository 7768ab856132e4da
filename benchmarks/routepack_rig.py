"""What the RoutePack benchmarks share: models with their windows, a window under a placement, means over windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Plain, ResultRow
from benchmarks.routepack_corpus import (
    FLASH,
    GPTOSS_COST,
    GPTOSS_TOPOLOGY,
    TINY,
    TOPOLOGY,
    gptoss_routes,
    synthetic_windows,
)
from megaflux_serve.routepack import CostModel, Demand, Layout, Placement, Topology
from megaflux_serve.routepack.baselines import dp_local_ffd
from megaflux_serve.routepack.communication import rank_copies
from megaflux_serve.routepack.demand import Int32Array
from megaflux_serve.routepack.score import Problem, score

UNITS = {"rows": "1", "plan_s": "s", "proposals_m": "1e6", "joint_cost": "1", "late_moves": "1", "moves": "1"}
"""Units of metrics that are no percentages."""


@dataclass(frozen=True)
class Case:
    """A model with its windows; ``copies`` gives the exact token copies of a window for an owner map, or None."""

    model: str
    cost: CostModel
    topology: Topology
    windows: Callable[[int], Iterator[Demand]]
    num_windows: int
    copies: Callable[[Int32Array], Int32Array] | None = None

    @property
    def label(self) -> dict[str, Plain]:
        """The keys that every result row of this case has."""
        return {"model": self.model, "synthetic": self.model != "gptoss"}


def cases(num_windows: int) -> list[Case]:
    """The synthetic models, and gpt-oss where its trace is."""
    found = [
        Case(model.name, model.cost, TOPOLOGY, partial(synthetic_windows, model), num_windows)
        for model in (TINY, FLASH)
    ]
    path = gptoss_routes()
    if not path.exists():
        print(f"gpt-oss left out: {path} is absent")
        return found
    with np.load(path) as trace:
        experts, offsets = trace["experts"], trace["offsets"]
    demand = Demand.from_routes(experts, offsets, 32)

    def copies(owner: Int32Array) -> Int32Array:
        return rank_copies(experts, offsets, owner, GPTOSS_TOPOLOGY.num_ranks)

    return [*found, Case("gptoss", GPTOSS_COST, GPTOSS_TOPOLOGY, lambda _: iter([demand]), 1, copies)]


@dataclass(frozen=True)
class Setting:
    """A window under one placement, with DP-local FFD as its measure."""

    problem: Problem
    rank_loads: NDArray[np.int64]
    base: Layout

    @classmethod
    def of(cls, demand: Demand, case: Case, placement: Placement, window: int) -> Setting:
        """Tables of a window under a placement."""
        table = demand.rank_demand(placement.owner, case.topology.num_ranks)
        problem = Problem.of(table, demand.lengths, case.topology, case.cost)
        base = dp_local_ffd(demand.lengths, case.topology, window)
        return cls(problem, placement.rank_loads(demand.expert_loads()), base)

    def cost(self, layout: Layout) -> float:
        """Primary score."""
        return score(self.problem, layout).primary


def mean_rows(
    bench: str,
    label: Mapping[str, Plain],
    values: Mapping[str, list[float]],
    paper: Mapping[str, float],
) -> list[ResultRow]:
    """One row a metric: the mean over windows, beside the paper's figure where there is one."""
    rows = []
    for metric, samples in values.items():
        peer = {"name": "RoutePack paper", "value": paper[metric]} if metric in paper else None
        case = {**label, "windows": len(samples)}
        rows.append(ResultRow(bench, case, metric, float(np.mean(samples)), UNITS.get(metric, "%"), peer))
    return rows
