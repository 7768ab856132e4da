"""Certified answers for small windows, by CP-SAT: the fixed-row schedule of section 4.3, and bin packing for R_min.

Decides nothing for a plan; it judges the search. Needs the optional package ``ortools``. Costs are whole numbers of
table entries, dense costs rounded down, so that a bound of the model bounds the exact score too. Symmetries are cut by
the canonical form of ``Layout.canonical``: in order of decreasing length, trajectory i lies in one of the first i + 1
rows and in one of the first i + 1 cells of its row-shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaflux_serve.errors import UnsupportedError
from megaflux_serve.routepack.demand import Int32Array, Int64Array
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.score import Problem, score


@dataclass(frozen=True)
class Optimum:
    """What the solver knows when it stops.

    Attributes:
        layout: its best layout, or None where it found none in time.
        primary: exact primary score of that layout, or infinity.
        bound: no layout with these rows has a smaller primary score.
        certified: True when the solver proved its layout optimal; ``bound`` then is below ``primary`` by rounding only.
    """

    layout: Layout | None
    primary: float
    bound: float
    certified: bool


def solve_schedule(problem: Problem, hint: Layout, seconds: float, workers: int = 1) -> Optimum:
    """Minimise max_g U_g over all layouts with the rows of ``hint``.

    Args:
        problem: the window under its placement, without the pipeline term.
        hint: a legal layout; guides the search, is no incumbent.
        seconds: time limit, presolve included.
        workers: solver threads.

    Raises:
        UnsupportedError: ortools is missing, or the problem has a pipeline term.
    """
    if problem.bubble:
        raise UnsupportedError("pipeline_bubble", "is not modelled by the exact solver", "leave it out")
    cp = _cp_model()
    topology, lengths = problem.topology, problem.lengths
    order = np.argsort(-lengths, kind="stable")
    start = Layout(hint.cell[order], hint.num_rows, hint.num_slots).canonical(topology.num_shards)
    num_cells, per_shard = hint.num_cells, topology.slots_per_shard
    model = cp.CpModel()
    inside: dict[tuple[int, int], Any] = {}
    for i in range(order.size):
        for c in range(num_cells):
            if c // hint.num_slots <= i and c % per_shard <= i:
                inside[i, c] = model.new_bool_var("")
                model.add_hint(inside[i, c], bool(start.cell[i] == c))
        model.add_exactly_one(inside[i, c] for c in range(num_cells) if (i, c) in inside)
    members = [[i for i in range(order.size) if (i, c) in inside] for c in range(num_cells)]
    for c in range(num_cells):
        model.add_at_least_one(inside[i, c] for i in members[c])
        model.add(sum(int(lengths[order[i]]) * inside[i, c] for i in members[c]) <= topology.capacity)

    scale = 1 / problem.row_scale  # table entries in one unit of cost
    shards: list[list[Any]] = [[] for _ in range(topology.num_shards)]
    most = 0
    for unit in range(num_cells // per_shard):
        cells = range(unit * per_shard, (unit + 1) * per_shard)
        terms = shards[unit % topology.num_shards]
        for tokens, squares in problem.stage_weights:
            costs = np.floor(scale * (tokens * lengths + squares * lengths**2)).astype(np.int64)[order]
            slowest = model.new_int_var(0, int(costs.sum()), "")
            most += int(costs.sum())
            terms.append(slowest)
            for c in cells:
                model.add(slowest >= sum(int(costs[i]) * inside[i, c] for i in members[c]))
        present = {i: sum(inside[i, c] for c in cells if (i, c) in inside) for i in range(order.size)}
        for layer in range(problem.work.shape[2]):
            table = problem.work[order, : topology.num_ranks, layer]
            if not table.any():
                continue
            busiest = model.new_int_var(0, int(table.sum(axis=0).max()), "")
            most += int(table.sum(axis=0).max())
            terms.append(busiest)
            for p in range(topology.num_ranks):
                model.add(busiest >= sum(int(table[i, p]) * x for i, x in present.items()))
    objective = model.new_int_var(0, most, "")
    for terms in shards:
        model.add(objective >= sum(terms))
    model.minimize(objective)

    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    bound = solver.best_objective_bound / scale
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return Optimum(None, math.inf, bound, False)
    cell = np.empty(order.size, dtype=np.int32)
    for (i, c), variable in inside.items():
        if solver.boolean_value(variable):
            cell[order[i]] = c
    layout = Layout(cell, hint.num_rows, hint.num_slots).canonical(topology.num_shards)
    layout.check(lengths, topology)
    return Optimum(layout, score(problem, layout).primary, bound, status == cp.OPTIMAL)


def pack_exactly(lengths: Int64Array, capacity: int, num_bins: int, seconds: float) -> tuple[Int32Array | None, bool]:
    """Decide whether a window fits ``num_bins`` bins.

    Args:
        lengths: int64 [N].
        capacity: C.
        num_bins: bins.
        seconds: time limit.

    Returns:
        A packing int32 [N] or None, and whether the answer is certain.

    Raises:
        UnsupportedError: ortools is missing.
    """
    cp = _cp_model()
    model = cp.CpModel()
    order = np.argsort(-lengths, kind="stable")
    inside = {(i, b): model.new_bool_var("") for i in range(order.size) for b in range(min(num_bins, i + 1))}
    for i in range(order.size):
        model.add_exactly_one(inside[i, b] for b in range(min(num_bins, i + 1)))
    for b in range(num_bins):
        model.add(sum(int(lengths[order[i]]) * inside[i, b] for i in range(b, order.size)) <= capacity)
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return None, bool(status == cp.INFEASIBLE)
    bins = np.empty(order.size, dtype=np.int32)
    for (i, b), variable in inside.items():
        if solver.boolean_value(variable):
            bins[order[i]] = b
    return bins, True


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UnsupportedError(
            "optimum", "the package ortools is missing", "install it: pip install ortools"
        ) from error
    return cp_model
