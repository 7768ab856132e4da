"""Reports: the policies of the paper's Tables 6 and 21 on one window, side by side.

Decides which policies are compared and what is said of each. Plans nothing itself: ``plan`` and ``baselines`` do. A
policy is a placement and a schedule; costs are modelled, in units of C routed rows, and compared as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from megaflux_serve.errors import InputError
from megaflux_serve.routepack.baselines import dp_local_ffd, global_ffd, slime_schedule, verl_karmarkar_karp
from megaflux_serve.routepack.bounds import expert_excess
from megaflux_serve.routepack.communication import traffic
from megaflux_serve.routepack.demand import Demand, Int64Array
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.placement import Placement
from megaflux_serve.routepack.plan import PlanOptions, WindowPlan, rows_for
from megaflux_serve.routepack.score import Problem, row_costs, score
from megaflux_serve.routepack.topology import Topology


@dataclass(frozen=True)
class PolicyReport:
    """One policy on one window.

    Attributes:
        policy: its name.
        placement: ``before`` (the slots stay as they are) or ``repaired``.
        num_rows: R.
        utilization: tokens over R * D * C.
        primary: max_g U_g, what an optimizer step costs.
        dense, expert: sums over row-shards.
        window_excess, row_local_excess: expert excess of section 4.2, fractions of uniform EP work.
        rho: Eq. 19 in assignments.
        saved: fraction of Base's primary cost that is saved; None where Base cannot schedule the window.
    """

    policy: str
    placement: str
    num_rows: int
    utilization: float
    primary: float
    dense: float
    expert: float
    window_excess: float
    row_local_excess: float
    rho: float
    saved: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values by field."""
        return asdict(self)


def compare_policies(
    demand: Demand, plan: WindowPlan, options: PlanOptions, base: Placement | None = None
) -> list[PolicyReport]:
    """Base and every other policy on the window of a plan; savings are against Base.

    Base is DP-local FFD. Base, verl and slime keep the placement that the window found; Reroute keeps Base's rows under
    the repaired one; global FFD and RoutePack use both. A policy that cannot schedule this window (verl needs a
    multiple of D, Base as many trajectories for every slot as there are rows) is left out.

    Args:
        demand: the window.
        plan: RoutePack's plan for it.
        options: as ``plan`` was made with.
        base: placement of Base, verl and slime; by default the one that the window found.
    """
    topology, lengths = plan.topology, demand.lengths
    tables = {
        name: _problem(demand, placement, topology, options)
        for name, placement in (("before", base or plan.before), ("repaired", plan.placement))
    }
    choice = rows_for(demand, topology, options)
    schedules: tuple[tuple[str, str, Callable[[], Layout]], ...] = (
        ("Base", "before", lambda: dp_local_ffd(lengths, topology)),
        ("verl", "before", lambda: verl_karmarkar_karp(lengths, topology)),
        ("slime", "before", lambda: slime_schedule(lengths, topology)),
        ("Reroute", "repaired", lambda: dp_local_ffd(lengths, topology)),
        ("Global FFD", "repaired", lambda: global_ffd(lengths, topology, choice)),
        ("RoutePack", "repaired", lambda: plan.layout),
    )
    reports: list[PolicyReport] = []
    for policy, placement, schedule in schedules:
        try:
            layout = schedule()
        except InputError:
            continue
        problem, rank_loads = tables[placement]
        reports.append(_report(policy, placement, problem, rank_loads, layout))
    if reports[0].policy != "Base":
        return reports
    return [replace(report, saved=1 - report.primary / reports[0].primary) for report in reports]


def _problem(
    demand: Demand, placement: Placement, topology: Topology, options: PlanOptions
) -> tuple[Problem, Int64Array]:
    """The window's cost table under a placement, without a communication term, and its rank loads."""
    cost = replace(options.cost, communication=0.0)
    table = demand.rank_demand(placement.owner, topology.num_ranks)
    return Problem.of(table, demand.lengths, topology, cost), placement.rank_loads(demand.expert_loads())


def _report(policy: str, placement: str, problem: Problem, rank_loads: Int64Array, layout: Layout) -> PolicyReport:
    topology = problem.topology
    costs = row_costs(problem, layout)
    excess = expert_excess(problem, rank_loads, costs)
    assignments = problem.work[:, : topology.num_ranks, : problem.num_layers]
    return PolicyReport(
        policy=policy,
        placement=placement,
        num_rows=layout.num_rows,
        utilization=float(problem.lengths.sum()) / (layout.num_cells * topology.capacity),
        primary=score(problem, layout).primary,
        dense=float(costs.dense.sum()),
        expert=float(costs.expert.sum()),
        window_excess=excess.window,
        row_local_excess=excess.row_local,
        rho=traffic(assignments, layout, topology).rho,
        saved=None,
    )
