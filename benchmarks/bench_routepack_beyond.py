"""What the RoutePack paper leaves open, measured: communication, pipeline bubbles, and planning before the window is
full.

Method: five synthetic windows a model (``benchmarks.routepack_corpus``) and the real gpt-oss-20b window, DP = EP = 8,
every window from identity placement; means over windows.

* ``routepack_communication``: Table 11's diagnostics for layouts with the rows of Base: ``rho_minus_1_pct`` in
  assignments, and for DeepEP's deduplicated copies the change of remote copies and of the cumulative endpoint peak
  against Base, and the endpoint efficiency. Copies are exact for gpt-oss and estimated from totals elsewhere.
  ``full+copies`` adds the communication term with weight 1 to the objective.
* ``routepack_pipeline``: four pipeline stages; makespan, the rows' sum plus three times the dearest row, saved against
  DP-local FFD under the same placement, when planned without (``full``) and with the pipeline term (``full+bubble``).
* ``routepack_anytime``: a placement made when a share of the window has finished, shortest trajectories first, as
  rollouts end. ``early_excess_pct``: the global excess that it would leave in the whole window. ``late_moves``: experts
  that still move when the sealed window is planned from it; ``moves``: those of a repair that waits.

Run: ``python -m benchmarks.bench_routepack_beyond`` (three minutes); writes results/routepack_beyond.json.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from rich.progress import track

from benchmarks.harness import RESULTS, ResultRow, RunContext, cpu_name, print_table, write_results
from benchmarks.routepack_rig import Case, Setting, cases, mean_rows
from megaflux_serve.routepack import Demand, FillingWindow, Placement, PlanOptions, SearchOptions, plan_window
from megaflux_serve.routepack.baselines import dp_local_ffd
from megaflux_serve.routepack.communication import expected_rank_copies, traffic
from megaflux_serve.routepack.demand import Int32Array
from megaflux_serve.routepack.placement import repair_placement
from megaflux_serve.routepack.score import Problem, score

NUM_WINDOWS, PIPELINE_STAGES = 5, 4
SEARCH = SearchOptions(proposals=6_000_000)
SHARES = (0.5, 0.75, 0.9)
PAPER_COMMUNICATION = {  # Table 11: rho - 1, change of remote copies, of the cumulative endpoint peak
    ("tiny", "base"): (72.7, 0.0, 0.0), ("tiny", "reroute"): (27.0, 38.3, 8.6), ("tiny", "full"): (12.7, 38.3, 1.3),
    ("flash", "base"): (40.1, 0.0, 0.0), ("flash", "reroute"): (13.7, 23.3, 7.6), ("flash", "full"): (9.4, 23.3, 4.9),
}  # fmt: skip
METRICS = ("rho_minus_1_pct", "remote_change_pct", "endpoint_peak_change_pct")
Measured = Iterator[tuple[str, dict[str, float]]]


def measure_communication(demand: Demand, case: Case) -> Measured:
    """Table 11's diagnostics of one window, all layouts with the rows of Base."""
    num_ranks = case.topology.num_ranks

    def copies(owner: Int32Array) -> Int32Array:
        return case.copies(owner) if case.copies else expected_rank_copies(demand, owner, num_ranks)

    base = dp_local_ffd(demand.lengths, case.topology)
    options = PlanOptions(case.cost, search=SEARCH, num_rows=base.num_rows)
    full = plan_window(demand, None, case.topology, options)
    aware = replace(options, cost=replace(case.cost, communication=1.0))
    with_copies = plan_window(demand, None, case.topology, aware, copies=copies)
    first = None
    for name, layout, placement in (
        ("base", base, full.before),
        ("reroute", base, full.placement),
        ("full", full.layout, full.placement),
        ("full+copies", with_copies.layout, with_copies.placement),
    ):
        sent = traffic(demand.rank_demand(placement.owner, num_ranks), layout, case.topology)
        deduplicated = traffic(copies(placement.owner), layout, case.topology)
        first = first or deduplicated
        joint = Setting.of(demand, case, placement, 0).cost(layout)
        yield (
            name,
            {
                "rho_minus_1_pct": 100 * (sent.rho - 1),
                "remote_change_pct": 100 * (deduplicated.volume / first.volume - 1),
                "endpoint_peak_change_pct": 100 * (deduplicated.endpoint_peak / first.endpoint_peak - 1),
                "endpoint_efficiency_pct": 100 * deduplicated.efficiency,
                "joint_cost": joint,
            },
        )


def measure_pipeline(demand: Demand, case: Case) -> Measured:
    """Makespan with and without the pipeline term."""
    topology = replace(case.topology, pipeline_stages=PIPELINE_STAGES)
    cost = replace(case.cost, pipeline_bubble=True)
    base = dp_local_ffd(demand.lengths, topology)
    for name, planned_for in (("full", case.cost), ("full+bubble", cost)):
        made = plan_window(demand, None, topology, PlanOptions(planned_for, search=SEARCH))
        table = demand.rank_demand(made.placement.owner, topology.num_ranks)
        problem = Problem.of(table, demand.lengths, topology, cost)
        saved = 1 - score(problem, made.layout).primary / score(problem, base).primary
        yield name, {"makespan_saving_pct": 100 * saved}


def measure_anytime(demand: Demand, case: Case) -> Measured:
    """Placements made before the window is full."""
    identity = Placement.identity(demand.num_layers, demand.num_experts, case.topology.num_ranks)
    loads = demand.expert_loads()
    moves = int(repair_placement(loads, identity).moved_from(identity).sum())
    filling = FillingWindow(demand.num_layers, demand.num_experts)
    finished = np.argsort(demand.lengths, kind="stable").tolist()
    for share in SHARES:
        for i in finished[len(filling) : round(share * len(finished))]:
            filling.add(demand.counts[i], int(demand.lengths[i]))
        early = filling.early_placement(identity)
        ranks = early.rank_loads(loads)
        values = {
            "early_excess_pct": 100 * float(ranks.max(axis=1).sum() / ranks.mean(axis=1).sum() - 1),
            "late_moves": float(repair_placement(loads, early).moved_from(early).sum()),
            "moves": float(moves),
        }
        yield f"at {share:.0%}", values


BENCHES: dict[str, Callable[[Demand, Case], Measured]] = {
    "routepack_communication": measure_communication,
    "routepack_pipeline": measure_pipeline,
    "routepack_anytime": measure_anytime,
}


def measure(case: Case) -> list[ResultRow]:
    """All three on the windows of a model."""
    collected: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for demand in track(case.windows(case.num_windows), f"{case.model}: windows", case.num_windows, transient=True):
        for bench, measure_one in BENCHES.items():
            for planner, values in measure_one(demand, case):
                for metric, value in values.items():
                    collected[bench, planner][metric].append(value)
    rows = []
    for (bench, planner), samples in collected.items():
        paper = dict(zip(METRICS, PAPER_COMMUNICATION.get((case.model, planner), ()), strict=False))
        rows += mean_rows(bench, {**case.label, "planner": planner}, samples, paper if "communication" in bench else {})
    return rows


def main() -> None:
    """Measure, print and write."""
    rows = [row for case in cases(NUM_WINDOWS) for row in measure(case)]
    for bench in BENCHES:
        print_table([row for row in rows if row.bench == bench])
    write_results(RESULTS / "routepack_beyond.json", rows, RunContext.current(cpu_name(), "numpy", "numba"))


if __name__ == "__main__":
    main()
