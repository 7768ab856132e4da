"""Schedules of whole windows: cost against the paper's baselines, and quality against time.

Method: 20 synthetic windows a model (``benchmarks.routepack_corpus``, fitted to published statistics, not the paper's
corpus) and the real gpt-oss-20b window, DP = EP = 8, EDP = 1. As in the paper's appendix K, every window starts from
identity placement, and all schedules of a window share its repaired placement. Every layout is checked before it
counts; values are means over windows.

* ``joint_saving_pct``: modelled cost saved against DP-local FFD under the same placement (Table 21).
* ``full_saving_pct``: against DP-local FFD under identity placement (Table 6, Full).
* ``excess_removed_pct``: eta of section 5.3, against global FFD with the same rows (Figure 11: 28.9 to 54.3 online).
* ``rows``, ``expert_pct``, ``dense_pct``: rows, and the two costs with DP-local FFD under the same placement as 100.
* ``global_excess_pct``, ``row_local_excess_pct``: what is left of Table 6's excess terms.
* ``plan_s``: wall-clock seconds of the whole plan on two threads; for baselines, of building their layout.
* ``proposals_m``: millions of moves that the search proposed in its time.

Planners: ``routepack``, ``reschedule`` (identity placement kept, Table 6), ``paper-population`` (64 chains, two levels,
1.28 M proposals, at least eight parents), ``routepack-curve`` (the first five windows, several budgets), and the
baselines.

Run: ``python -m benchmarks.bench_routepack_schedule`` (eight minutes); writes results/routepack_schedule.{json,png}.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from rich.progress import track

from benchmarks.harness import RESULTS, ResultRow, RunContext, cpu_name, figure, print_table, write_results
from benchmarks.routepack_rig import Case, Setting, cases, mean_rows
from megaflux_serve.routepack import (
    Demand,
    Layout,
    PlacementOptions,
    PlanOptions,
    SearchOptions,
    WindowPlan,
    plan_window,
)
from megaflux_serve.routepack.baselines import dp_local_ffd, global_ffd, slime_schedule, verl_karmarkar_karp
from megaflux_serve.routepack.bounds import excess_removed, expert_excess, lower_bound
from megaflux_serve.routepack.rows import choose_rows
from megaflux_serve.routepack.score import row_costs

BENCH = "routepack_schedule"
NUM_WINDOWS, CURVE_WINDOWS = 20, 5
BUDGET_S = 1.0
CURVE_S = (0.03, 0.1, 0.3, 1.0, 3.0)
KEEP_PLACEMENT = PlacementOptions(cv_target=1e9)
PAPER_POPULATION = SearchOptions(proposals=1_280_000, members=64, levels=2, min_parents=8, candidates=8)
PAPER = {  # Tables 6 and 21
    ("tiny", "routepack"): {
        "joint_saving_pct": 6.39, "full_saving_pct": 20.56, "rows": 60.30, "expert_pct": 88.41, "dense_pct": 98.66,
        "global_excess_pct": 0.06, "row_local_excess_pct": 8.84, "plan_s": 3.25,
    },
    ("tiny", "reschedule"): {"full_saving_pct": 4.18, "global_excess_pct": 61.23, "row_local_excess_pct": 1.41},
    ("tiny", "global-ffd"): {"joint_saving_pct": -3.35, "rows": 60.30, "expert_pct": 113.04, "dense_pct": 93.99},
    ("tiny", "dp-local-ffd"): {"full_saving_pct": 15.30, "rows": 63.25, "row_local_excess_pct": 23.17},
    ("flash", "routepack"): {
        "joint_saving_pct": 3.69, "full_saving_pct": 16.61, "rows": 29.95, "expert_pct": 97.18, "dense_pct": 94.89,
        "global_excess_pct": 0.05, "row_local_excess_pct": 8.24, "plan_s": 2.18,
    },
    ("flash", "reschedule"): {"full_saving_pct": 2.50, "global_excess_pct": 36.03, "row_local_excess_pct": 2.23},
    ("flash", "global-ffd"): {"joint_saving_pct": -1.04, "rows": 29.95, "expert_pct": 105.84, "dense_pct": 93.19},
    ("flash", "dp-local-ffd"): {"full_saving_pct": 13.41, "rows": 31.70, "row_local_excess_pct": 11.39},
}  # fmt: skip


def metrics(setting: Setting, layout: Layout, ffd: Layout, identity: Setting, seconds: float) -> dict[str, float]:
    """What the module docstring lists, of one layout of one window."""
    layout.check(setting.problem.lengths, setting.problem.topology)
    costs, base = row_costs(setting.problem, layout), row_costs(setting.problem, setting.base)
    excess = expert_excess(setting.problem, setting.rank_loads, costs)
    bound = lower_bound(setting.problem, setting.rank_loads).total
    cost = setting.cost(layout)
    return {
        "joint_saving_pct": 100 * (1 - cost / setting.cost(setting.base)),
        "full_saving_pct": 100 * (1 - cost / identity.cost(identity.base)),
        "excess_removed_pct": 100 * excess_removed(setting.cost(ffd), cost, bound),
        "rows": layout.num_rows,
        "expert_pct": 100 * float(costs.expert.sum() / base.expert.sum()),
        "dense_pct": 100 * float(costs.dense.sum() / base.dense.sum()),
        "global_excess_pct": 100 * excess.window,
        "row_local_excess_pct": 100 * excess.row_local,
        "plan_s": seconds,
    }


def plan(demand: Demand, case: Case, search: SearchOptions, placement: PlacementOptions | None = None) -> WindowPlan:
    """A plan from identity placement."""
    options = PlanOptions(case.cost, placement or PlacementOptions(), search)
    return plan_window(demand, None, case.topology, options)


def planned(made: WindowPlan, setting: Setting, ffd: Layout, identity: Setting) -> dict[str, float]:
    """``metrics`` of a plan, and how many moves it took."""
    measured = metrics(setting, made.layout, ffd, identity, sum(made.seconds.values()))
    return {**measured, "proposals_m": sum(made.proposals) / 1e6}


def measure_window(demand: Demand, case: Case, window: int) -> Iterator[tuple[str, float, dict[str, float]]]:
    """(planner, budget, metrics) of every planner on one window; budget 0 where there is no search."""
    made = plan(demand, case, SearchOptions(budget_s=BUDGET_S))
    identity = Setting.of(demand, case, made.before, window)
    repaired = Setting.of(demand, case, made.placement, window)
    choice = choose_rows(demand.lengths, case.topology)
    ffd = global_ffd(demand.lengths, case.topology, choice)
    yield "routepack", BUDGET_S, planned(made, repaired, ffd, identity)

    kept = plan(demand, case, SearchOptions(budget_s=BUDGET_S), KEEP_PLACEMENT)
    yield "reschedule", BUDGET_S, planned(kept, identity, ffd, identity)

    baselines: tuple[tuple[str, Callable[[], Layout]], ...] = (
        ("dp-local-ffd", lambda: dp_local_ffd(demand.lengths, case.topology, window)),
        ("global-ffd", lambda: global_ffd(demand.lengths, case.topology, choice)),
        ("verl-kk", lambda: verl_karmarkar_karp(demand.lengths, case.topology)),
        ("slime", lambda: slime_schedule(demand.lengths, case.topology)),
    )
    for name, build in baselines:
        start = time.perf_counter()
        layout = build()
        yield name, 0.0, metrics(repaired, layout, ffd, identity, time.perf_counter() - start)

    if window < CURVE_WINDOWS:
        old = plan(demand, case, PAPER_POPULATION)
        yield "paper-population", 0.0, planned(old, repaired, ffd, identity)
        for budget in CURVE_S:
            timed = plan(demand, case, SearchOptions(budget_s=budget))
            yield "routepack-curve", budget, planned(timed, repaired, ffd, identity)


def measure(case: Case) -> tuple[list[ResultRow], list[float]]:
    """Rows of a model, and RoutePack's joint saving window by window."""
    plan(next(case.windows(1)), case, SearchOptions(budget_s=0.01))  # compiles, or loads the compiled code
    collected: dict[tuple[str, float], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    windows = case.windows(case.num_windows)
    for window, demand in enumerate(track(windows, f"{case.model}: windows", case.num_windows, transient=True)):
        for planner, budget, values in measure_window(demand, case, window):
            for metric, value in values.items():
                collected[planner, budget][metric].append(value)
    rows = []
    for (planner, budget), samples in collected.items():
        label = {**case.label, "planner": planner, "budget_s": budget}
        rows += mean_rows(BENCH, label, samples, PAPER.get((case.model, planner), {}))
    return rows, collected["routepack", BUDGET_S]["joint_saving_pct"]


def draw(rows: Sequence[ResultRow], windows: dict[str, list[float]]) -> None:
    """Left: joint cost of every window (Figure 14); middle: quality against time; right: the excess that is left."""
    value = {
        (r.case["model"], r.case["planner"], r.case["budget_s"], r.metric): r.value for r in rows if r.bench == BENCH
    }
    with figure(RESULTS / f"{BENCH}.png", columns=3, title="Trajectory schedules, DP-local FFD = 100") as axes:
        every, curve, excess = axes
        for model, saved in windows.items():
            if len(saved) > 1:
                every.plot(range(1, len(saved) + 1), [100 - value for value in saved], marker=".", label=model)
            quality = [value[model, "routepack-curve", budget, "joint_saving_pct"] for budget in CURVE_S]
            curve.plot(CURVE_S, quality, marker=".", label=model)
        for model in ("tiny", "flash"):
            line = PAPER[model, "routepack"]["joint_saving_pct"]
            curve.axhline(line, color="0.6", linewidth=0.8)
            curve.annotate(f"paper, {model}, 64 workers", (CURVE_S[0], line), fontsize=7, va="bottom")
        every.set(xlabel="window", ylabel="joint cost", title="RoutePack, every window (Figure 14)")
        curve.set(
            xlabel="seconds of search, two threads", ylabel="joint saving, %", xscale="log", title="Quality and time"
        )
        names, window, row_local = [], [], []
        for model in ("tiny", "flash"):
            for planner, budget in (
                ("reschedule", BUDGET_S),
                ("dp-local-ffd", 0.0),
                ("global-ffd", 0.0),
                ("routepack", BUDGET_S),
            ):
                names.append(f"{model} {planner}")
                window.append(value[model, planner, budget, "global_excess_pct"])
                row_local.append(value[model, planner, budget, "row_local_excess_pct"])
        excess.barh(names, window, label="global")
        excess.barh(names, row_local, left=window, label="row-local")
        excess.invert_yaxis()
        excess.set(xlabel="expert excess, % of uniform work", title="Excess left (Table 6)")
        for axis in axes:
            axis.legend()


def main() -> None:
    """Measure, print, write and draw."""
    rows: list[ResultRow] = []
    windows: dict[str, list[float]] = {}
    for case in cases(NUM_WINDOWS):
        measured, windows[case.model] = measure(case)
        rows += measured
    print_table(rows)
    write_results(RESULTS / f"{BENCH}.json", rows, RunContext.current(cpu_name(), "numpy", "numba"))
    draw(rows, windows)


if __name__ == "__main__":
    main()
