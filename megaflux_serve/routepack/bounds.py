"""Bounds and diagnostics: how far a plan is from what no plan can beat (RoutePack sections 3.4, 4.2, 5.3).

Decides nothing. Reads placements, layouts and their scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaflux_serve.routepack.demand import Int64Array
from megaflux_serve.routepack.score import Problem, RowCosts


@dataclass(frozen=True)
class LowerBound:
    """B of Eq. 17, in units of C routed rows; no layout under the placement has a smaller primary score.

    Attributes:
        expert: B_EP, every layer's busiest rank over the window, spread over the shards.
        dense: B_dense, every stage's work spread evenly over the slots.
    """

    expert: float
    dense: float

    @property
    def total(self) -> float:
        """B."""
        return self.expert + self.dense


def lower_bound(problem: Problem, rank_loads: Int64Array) -> LowerBound:
    """B_EP and B_dense for rank loads int64 [L, P] of the window under its placement.

    The communication and pipeline terms are non-negative, so B bounds a score with them too.
    """
    topology, lengths = problem.topology, problem.lengths
    expert = float(rank_loads.max(axis=1).sum()) / (topology.num_shards * topology.capacity)
    totals = [float(lengths.sum()), float((lengths**2).sum())]
    return LowerBound(expert, float((problem.stage_weights @ totals).sum()) / topology.num_slots)


def excess_removed(initial: float, final: float, bound: float) -> float:
    """eta of section 5.3: the share of the initial excess above the bound that is gone; 0 where there was none."""
    return (initial - final) / (initial - bound) if initial > bound else 0.0


@dataclass(frozen=True)
class ExpertExcess:
    """The two EP excess terms of section 4.2, as fractions of uniform EP work U.

    Attributes:
        window: "global": what the placement leaves; no schedule can lower it.
        row_local: what the schedule adds on top.
    """

    window: float
    row_local: float


def expert_excess(problem: Problem, rank_loads: Int64Array, costs: RowCosts) -> ExpertExcess:
    """Global and row-local excess of a layout with these row costs."""
    uniform = float(rank_loads.sum()) / rank_loads.shape[1]
    busiest = float(rank_loads.max(axis=1).sum())
    rows = float(costs.expert.sum()) * problem.topology.capacity
    return ExpertExcess(busiest / uniform - 1, (rows - busiest) / uniform)


@dataclass(frozen=True)
class AdmissionTimes:
    """Seconds between the sealing of a window and its admission to training (section 4.2).

    Attributes:
        place: profile finalisation and placement repair.
        reschedule: planning and batch preparation.
        auxiliary: post-rollout statistics and safety gates.
        state: placement-aware state loading.
    """

    place: float
    reschedule: float
    auxiliary: float
    state: float

    @property
    def target(self) -> float:
        """T_target: the modelled makespan."""
        return max(self.place + self.reschedule, max(self.place, self.auxiliary) + self.state)

    @property
    def exposed(self) -> float:
        """Seconds by which rescheduling delays admission; 0 where it hides behind state loading."""
        return self.target - (max(self.place, self.auxiliary) + self.state)
