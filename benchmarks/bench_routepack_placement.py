"""Placement repair over consecutive windows: time, moves and how often the CV target is met (RoutePack Table 5).

Method: 20 synthetic windows a model (``benchmarks.routepack_corpus``, fitted to published statistics, not the paper's
corpus) and the real gpt-oss-20b window. Every planner carries its own mapping forward; the 19 transitions after the
cold start count. ``p50_ms`` is the median time of one transition over 7 calls each, from ready loads [L, E] to an
executable mapping, on one thread; ``hit_pct`` the layers with CV <= 5e-4; ``moves`` the mean number of experts (slots,
with replicas) rewritten a transition; ``excess_pct`` the global expert excess that is left. The gpt-oss trace is one
window: its repair starts from identity.

Planners: ``routepack``, the repair to the CV target by landing swaps; ``routepack-steepest``, by the paper's rule, so
that its moves should be the paper's if the windows were: the drift of the synthetic windows was set for that;
``routepack-cost``, landing with the cost-aware stop at 5400 routed rows a move: 16 bytes of weights and optimizer state
a parameter over 200 GB/s, against 6 operations a parameter and row at 400 TFLOP/s, whatever the size of an expert. For
gpt-oss 270, since its trajectories are a twentieth of the others' length. ``eplb-rN``, EPLB's packing anew, with N
further slots a rank. Beside them the paper's figures, from its 64-worker host.

Run: ``python -m benchmarks.bench_routepack_placement`` (two minutes); writes results/routepack_placement.{json,png}.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import NullFormatter
from rich.progress import track

from benchmarks.harness import RESULTS, Plain, ResultRow, RunContext, cpu_name, figure, print_table, write_results
from benchmarks.routepack_corpus import FLASH, TINY, TOPOLOGY, gptoss_routes, synthetic_windows
from megaflux_serve.routepack import Demand, Placement, PlacementOptions, repair_placement
from megaflux_serve.routepack.demand import FloatArray, Int32Array, Int64Array
from megaflux_serve.routepack.eplb import eplb_rank_loads, eplb_slots
from megaflux_serve.routepack.placement import coefficient_of_variation

BENCH = "routepack_placement"
NUM_WINDOWS, CALLS, CV_TARGET = 20, 7, 5e-4
MOVE_COST_ROWS = {"tiny": 5400.0, "flash": 5400.0, "gptoss": 270.0}
PAPER = {  # Table 5: hit %, moves, P50 ms
    ("tiny", "routepack"): (100.0, 389, 55.6),
    ("tiny", "routepack-steepest"): (100.0, 389, 55.6),
    ("tiny", "eplb-r0"): (45.08, 2504, 14.8),
    ("tiny", "eplb-r2"): (53.55, 2803, 18.0),
    ("tiny", "eplb-r4"): (51.95, 3028, 20.4),
    ("tiny", "eplb-r8"): (52.63, 3420, 25.0),
    ("flash", "routepack"): (100.0, 736, 237.0),
    ("flash", "routepack-steepest"): (100.0, 736, 237.0),
    ("flash", "eplb-r0"): (100.0, 17877, 88.5),
    ("flash", "eplb-r2"): (100.0, 18342, 104.0),
    ("flash", "eplb-r4"): (100.0, 18730, 109.0),
    ("flash", "eplb-r8"): (100.0, 19509, 119.0),
}
Mapping = Int32Array
"""Slots [L, E] of a placement, or the experts [L, P, slots] of EPLB."""


@dataclass(frozen=True)
class Planner:
    """A planner as the replay sees it: loads and the mapping before to a mapping, and the rank loads of a mapping."""

    plan: Callable[[Int64Array, Mapping | None], Mapping]
    rank_loads: Callable[[Int64Array, Mapping], FloatArray]


def routepack(options: PlacementOptions) -> Planner:
    """The repair from the placement before, identity at first."""

    def plan(loads: Int64Array, before: Mapping | None) -> Mapping:
        num_layers, num_experts = loads.shape
        start = Placement.identity(num_layers, num_experts, TOPOLOGY.num_ranks)
        return repair_placement(loads, start if before is None else Placement(before, start.num_ranks), options).slots

    def rank_loads(loads: Int64Array, slots: Mapping) -> FloatArray:
        return Placement(slots, TOPOLOGY.num_ranks).rank_loads(loads).astype(np.float64)

    return Planner(plan, rank_loads)


def eplb(replicas: int) -> Planner:
    """EPLB's packing anew."""
    return Planner(lambda loads, _: eplb_slots(loads, TOPOLOGY.num_ranks, replicas), eplb_rank_loads)


def planners(model: str) -> dict[str, Planner]:
    """All planners by name."""
    return {
        "routepack": routepack(PlacementOptions(CV_TARGET)),
        "routepack-steepest": routepack(PlacementOptions(CV_TARGET, rule="steepest")),
        "routepack-cost": routepack(PlacementOptions(CV_TARGET, MOVE_COST_ROWS[model])),
        **{f"eplb-r{replicas}": eplb(replicas) for replicas in (0, 2, 4, 8)},
    }


def replay(windows: Sequence[Int64Array], planner: Planner) -> dict[str, float]:
    """Metrics over all windows but the first; over the first where it is the only one."""
    mapping: Mapping | None = None
    seconds, hits, moves, excess = [], [], [], []
    for index, loads in enumerate(windows):
        before = mapping
        times = []
        for _ in range(CALLS + (index == 0)):
            start = time.perf_counter()
            mapping = planner.plan(loads, before)
            times.append(time.perf_counter() - start)
        assert mapping is not None
        if index == 0 and len(windows) > 1:
            continue
        ranks = planner.rank_loads(loads, mapping)
        seconds += times[-CALLS:]
        hits += (coefficient_of_variation(ranks.astype(np.int64)) <= CV_TARGET).tolist()
        start_slots = before if before is not None else planner.plan(np.ones_like(loads), None)
        moves.append(int((mapping != start_slots).sum()))
        excess.append(float(ranks.max(axis=1).sum() / ranks.mean(axis=1).sum() - 1))
    return {
        "p50_ms": 1e3 * float(np.median(seconds)),
        "hit_pct": 100 * float(np.mean(hits)),
        "moves": float(np.mean(moves)),
        "excess_pct": 100 * float(np.mean(excess)),
    }


def measure(model: str, windows: Sequence[Int64Array]) -> list[ResultRow]:
    """All planners on the windows of a model."""
    rows = []
    for name, planner in track(planners(model).items(), f"{model}: placement", transient=True):
        case: dict[str, Plain] = {"model": model, "planner": name, "windows": len(windows)}
        case["synthetic"] = model != "gptoss"
        hit, moves, p50 = PAPER.get((model, name), (None, None, None))
        paper = {"hit_pct": hit, "moves": moves, "p50_ms": p50}
        for metric, value in replay(windows, planner).items():
            unit = {"p50_ms": "ms", "moves": "1"}.get(metric, "%")
            peer = None if paper.get(metric) is None else {"name": "RoutePack paper, Table 5", "value": paper[metric]}
            rows.append(ResultRow(BENCH, case, metric, value, unit, peer))
    return rows


def draw(rows: Sequence[ResultRow]) -> None:
    """Moves and time of every planner, one panel a model and metric."""
    with figure(RESULTS / f"{BENCH}.png", columns=2, rows=2, title="Placement repair, ours and EPLB") as axes:
        for index, (model, metric) in enumerate((m, n) for n in ("moves", "p50_ms") for m in ("tiny", "flash")):
            chosen = [row for row in rows if row.case["model"] == model and row.metric == metric]
            names = [str(row.case["planner"]) for row in chosen]
            axes[index].barh(names, [row.value for row in chosen])
            papers = [(name, row.baseline["value"]) for name, row in zip(names, chosen, strict=True) if row.baseline]
            axes[index].scatter([value for _, value in papers], [name for name, _ in papers], marker="|", color="black")
            axes[index].invert_yaxis()
            axes[index].set(title=f"{model}: {metric} (line: the paper)", xscale="log")
            axes[index].xaxis.set_minor_formatter(NullFormatter())


def main() -> None:
    """Measure, print, write and draw."""
    rows: list[ResultRow] = []
    for model in (TINY, FLASH):
        windows = track(synthetic_windows(model, NUM_WINDOWS), f"{model.name}: windows", NUM_WINDOWS, transient=True)
        rows += measure(model.name, [window.expert_loads() for window in windows])
    if gptoss_routes().exists():
        rows += measure("gptoss", [Demand.load(gptoss_routes()).expert_loads()])
    else:
        print(f"gpt-oss left out: {gptoss_routes()} is absent")
    print_table(rows)
    write_results(RESULTS / f"{BENCH}.json", rows, RunContext.current(cpu_name(), "numpy", "numba"))
    draw(rows)


if __name__ == "__main__":
    main()
