"""The schedule search against exact optima and CP-SAT on small windows (RoutePack section 4.3 and Table 7).

Method: nested prefixes of synthetic windows (``benchmarks.routepack_corpus``) under the repaired placement of their
whole window, rows from length alone, primary score only. Prefixes of 8 and 12 trajectories have two slots, 16 four, 32
and more eight. The optimum of 8 and 12 is certified twice: by dynamic programming over all sets of trajectories, and by
CP-SAT where it ends in time. CP-SAT gets one thread, a hint (global FFD) and ``SECONDS`` of time; the search gets
``PROPOSALS`` moves, half a second or less. Larger prefixes are searched only: the paper's CP-SAT found nothing at 256
in 60 s on 64 workers.

* ``gap_pct``: the search's score above the optimum, or from 16 on above CP-SAT's lower bound; there it is mostly the
  bound that is open.
* ``gap_to_cpsat_pct``: above the best layout that CP-SAT found; negative where the search is better.
* ``certified``: windows whose optimum CP-SAT proved as well.
* ``reduction_pct``: median reduction from global FFD, beside the paper's search on its own corpus (Table 7).

Gaps are the worst of all windows.

Run: ``python -m benchmarks.bench_routepack_optimum`` (fifteen minutes; needs ortools); writes
results/routepack_optimum.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.progress import track

from benchmarks.harness import RESULTS, Plain, ResultRow, RunContext, cpu_name, print_table, write_results
from benchmarks.routepack_corpus import MODELS, TOPOLOGY, Model, synthetic_windows
from megaflux_serve.routepack import Demand, Placement, SearchOptions, repair_placement
from megaflux_serve.routepack.baselines import global_ffd
from megaflux_serve.routepack.demand import Int32Array
from megaflux_serve.routepack.optimum import solve_schedule
from megaflux_serve.routepack.population import search
from megaflux_serve.routepack.rows import choose_rows
from megaflux_serve.routepack.score import Problem, score
from megaflux_serve.routepack.seeds import build_seeds, choose_seeds
from tests.oracles.routepack_optimum import optimum as exact_optimum

BENCH = "routepack_optimum"
NUM_WINDOWS, SECONDS, PROPOSALS = 5, 20.0, 1_000_000
SLOTS = {8: 2, 12: 2, 16: 4, 32: 8, 64: 8, 128: 8, 256: 8}
EXACT, SOLVED = (8, 12), (8, 12, 16, 32)
PAPER = {
    ("tiny", 32): 6.63, ("tiny", 64): 5.68, ("tiny", 128): 7.53, ("tiny", 256): 6.19,
    ("flash", 32): 12.02, ("flash", 64): 8.38, ("flash", 128): 6.73, ("flash", 256): 4.99,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One prefix: percentages as in the module docstring, None where CP-SAT was not asked or found nothing."""

    reduction: float
    gap: float | None
    gap_to_cpsat: float | None
    certified: bool


def solve(demand: Demand, owner: Int32Array, model: Model, size: int) -> Outcome:
    """Search, and where ``SOLVED`` says so solve, the first ``size`` trajectories of a window."""
    prefix = demand.select(range(size))
    topology = replace(TOPOLOGY, num_slots=SLOTS[size])
    problem = Problem.of(prefix.rank_demand(owner, topology.num_ranks), prefix.lengths, topology, model.cost)
    ffd = global_ffd(prefix.lengths, topology, choose_rows(prefix.lengths, topology))
    options = SearchOptions.for_size(size, proposals=PROPOSALS)
    seeds = choose_seeds(problem, build_seeds(problem, ffd, options.candidates, 0), options.members)
    found = search(problem, seeds, options).score.primary
    reduction = 100 * (1 - found / score(problem, ffd).primary)
    if size not in SOLVED:
        return Outcome(reduction, None, None, False)
    solved = solve_schedule(problem, ffd, SECONDS)
    gap_to_cpsat = 100 * (found / solved.primary - 1) if solved.layout else None
    bound = solved.bound
    if size in EXACT:
        stages = [(stage.linear, stage.quadratic) for stage in model.cost.stages]
        work = problem.work.astype(np.int64)
        bound = exact_optimum(prefix.lengths, work, stages, topology.capacity, ffd.num_rows)
    return Outcome(reduction, 100 * (found / bound - 1), gap_to_cpsat, solved.certified)


def rows_of(model: Model, size: int, outcomes: Sequence[Outcome]) -> list[ResultRow]:
    """Worst gaps and the median reduction over windows."""
    case: dict[str, Plain] = {
        "model": model.name,
        "trajectories": size,
        "slots": SLOTS[size],
        "windows": len(outcomes),
        "synthetic": True,
    }
    paper = PAPER.get((model.name, size))
    peer = None if paper is None else {"name": "RoutePack paper, Table 7", "value": paper}
    median = float(np.median([outcome.reduction for outcome in outcomes]))
    rows = [ResultRow(BENCH, case, "reduction_pct", median, "%", peer)]
    if size in SOLVED:
        rows.append(ResultRow(BENCH, case, "certified", sum(outcome.certified for outcome in outcomes), "windows"))
        rows.append(ResultRow(BENCH, case, "gap_pct", max(o.gap for o in outcomes if o.gap is not None), "%"))
        found = [outcome.gap_to_cpsat for outcome in outcomes if outcome.gap_to_cpsat is not None]
        if found:
            rows.append(ResultRow(BENCH, case, "gap_to_cpsat_pct", max(found), "%"))
    return rows


def main() -> None:
    """Measure, print and write."""
    rows: list[ResultRow] = []
    for model in MODELS.values():
        windows = list(synthetic_windows(model, NUM_WINDOWS))
        owners = []
        for window in windows:
            loads = window.expert_loads()
            identity = Placement.identity(window.num_layers, window.num_experts, TOPOLOGY.num_ranks)
            owners.append(repair_placement(loads, identity).owner)
        for size in track(SLOTS, f"{model.name}: prefixes", transient=True):
            pairs = zip(windows, owners, strict=True)
            rows += rows_of(model, size, [solve(window, owner, model, size) for window, owner in pairs])
    print_table(rows)
    write_results(RESULTS / f"{BENCH}.json", rows, RunContext.current(cpu_name(), "numpy", "numba", "ortools"))


if __name__ == "__main__":
    main()
