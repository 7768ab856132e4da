"""Pictures of a plan and of a replay, as PNG bytes.

Decides what is drawn: rank loads before and after, the cost of every row, the policies' costs split into work and
excess (the paper's Figure 8), and the cost of every window of a replay (Figure 14). Knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from megaflux_serve.drawing import BLUE, GREEN, ORANGE, new_figure, png, styled
from megaflux_serve.routepack.baselines import dp_local_ffd
from megaflux_serve.routepack.demand import Demand
from megaflux_serve.routepack.placement import Placement
from megaflux_serve.routepack.plan import WindowPlan
from megaflux_serve.routepack.report import PolicyReport
from megaflux_serve.routepack.score import Problem, row_costs

GREY = "0.6"


def window_picture(demand: Demand, plan: WindowPlan, policies: Sequence[PolicyReport]) -> bytes:
    """Rank loads, row costs and policies of one window."""
    with styled():
        figure = new_figure(13, 3.6)
        loads, rows, bars = figure.subplots(1, 3)
        _draw_rank_loads(loads, demand, plan)
        _draw_row_costs(rows, demand, plan, with_base=policies[0].policy == "Base")
        _draw_policies(bars, policies, plan.bound.total)
        return png(figure)


def replay_picture(windows: Sequence[Sequence[PolicyReport]]) -> bytes:
    """Joint cost of every policy in every window, Base = 100 (Figure 14).

    Args:
        windows: per window what ``compare_policies`` returned; policies that a window lacks leave a gap, and so does a
            window without Base.
    """
    names = list(dict.fromkeys(report.policy for reports in windows for report in reports))
    with styled():
        figure = new_figure(8, 3.6)
        axes = figure.subplots()
        for name in names:
            saved = [next((r.saved for r in reports if r.policy == name), None) for reports in windows]
            costs = [np.nan if share is None else 100 * (1 - share) for share in saved]
            axes.plot(range(1, len(windows) + 1), costs, marker="o", markersize=3, label=name)
        axes.set(xlabel="window", ylabel="joint cost, Base = 100")
        axes.set_title("Cost of every window")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        return png(figure)


def _draw_rank_loads(axes: Axes, demand: Demand, plan: WindowPlan) -> None:
    loads = demand.expert_loads()
    for placement, label, colour in ((plan.before, "before", ORANGE), (plan.placement, "after", BLUE)):
        rank_loads = placement.rank_loads(loads)
        axes.plot(rank_loads.max(axis=1) / rank_loads.mean(axis=1), color=colour, label=label, drawstyle="steps-mid")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set(xlabel="MoE layer", ylabel="busiest rank / mean")
    axes.set_title(f"Placement: {plan.num_moved} experts move")
    axes.legend()


def _draw_row_costs(axes: Axes, demand: Demand, plan: WindowPlan, with_base: bool) -> None:
    schedules = [(plan.placement, plan.layout, "RoutePack", BLUE)]
    if with_base:
        schedules.insert(0, (plan.before, dp_local_ffd(demand.lengths, plan.topology), "Base", ORANGE))
    for placement, layout, label, colour in schedules:
        costs = row_costs(_problem(demand, placement, plan), layout)
        order = np.argsort(-costs.joint.reshape(-1))
        axes.plot(costs.joint.reshape(-1)[order], color=colour, label=f"{label}, {layout.num_rows} rows")
        axes.plot(costs.dense.reshape(-1)[order], color=colour, linestyle=":", linewidth=1)
    axes.set(xlabel="row-shard, dearest first", ylabel="modelled cost", ylim=(0, None))
    axes.set_title("Rows: joint (line), dense part (dots)")
    axes.legend()


def _draw_policies(axes: Axes, policies: Sequence[PolicyReport], bound: float) -> None:
    names = [report.policy for report in policies]
    dense = np.array([report.dense for report in policies])
    expert = np.array([report.expert for report in policies])
    excess = np.array([report.window_excess + report.row_local_excess for report in policies])
    uniform = expert / (1 + excess)
    axes.barh(names, dense, color=GREEN, label="dense side")
    axes.barh(names, uniform, left=dense, color=BLUE, label="uniform expert work")
    axes.barh(names, expert - uniform, left=dense + uniform, color=ORANGE, hatch="//", label="expert excess")
    axes.axvline(bound, color=GREY, linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="modelled cost (grey line: bound B)")
    axes.set_title("Policies")
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.2))


def _problem(demand: Demand, placement: Placement, plan: WindowPlan) -> Problem:
    table = demand.rank_demand(placement.owner, plan.topology.num_ranks)
    copies = np.zeros_like(table) if plan.cost.communication else None
    return Problem.of(table, demand.lengths, plan.topology, plan.cost, copies)
