"""Seeds: different feasible layouts to start the search from (RoutePack section 4.1, appendix E.1).

Decides where chains start. Knows no temperatures. The first two seeds are always global FFD and the same cells paired
anew; the others perturb the length order, fill cells best fit at random, and pair the cells. Where appendix E.1 is
silent: perturbation shuffles runs of ``SHUFFLE_WINDOW`` neighbours in the decreasing order, and best fit takes one of
the ``BEST_FIT_CHOICES`` fullest cells with room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.routepack.compiled import compiled, compiled_part
from megaflux_serve.routepack.demand import FloatArray, Int32Array, Int64Array
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.rows import balance_bins
from megaflux_serve.routepack.score import Problem, Score, row_costs, score, unit_loads

SHUFFLE_WINDOW = 16
BEST_FIT_CHOICES = 3
NUM_PROJECTIONS = 8
DIVERSITY = 0.05
"""Relative score that a seed may lose for being wholly different from those already chosen."""


def build_seeds(problem: Problem, ffd: Layout, num_candidates: int, seed: int) -> list[Layout]:
    """FFD, its pairing, and up to ``num_candidates`` - 2 perturbed layouts with the same rows, all canonical.

    A perturbed packing that finds no room in those rows is dropped.
    """
    rng = np.random.default_rng((seed, 0))
    layouts = [ffd, pair_cells(problem, ffd.cells())]
    for _ in range(num_candidates - 2):
        bins = random_best_fit(problem.lengths, problem.topology.capacity, ffd.num_cells, rng)
        if bins is not None:
            layouts.append(pair_cells(problem, balance_bins(bins, problem.lengths, ffd.num_cells)))
    return [layout.canonical(problem.topology.num_shards) for layout in layouts]


def random_best_fit(lengths: Int64Array, capacity: int, num_bins: int, rng: np.random.Generator) -> Int32Array | None:
    """int32 [N], a random packing into ``num_bins`` bins, or None where a trajectory found no room."""
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, order.size, SHUFFLE_WINDOW):
        rng.shuffle(order[start : start + SHUFFLE_WINDOW])
    bins = np.full(lengths.size, -1, dtype=np.int32)
    room = np.full(num_bins, capacity, dtype=np.int64)
    for i in order:
        fitting = np.flatnonzero(room >= lengths[i])
        if not fitting.size:
            return None
        fullest = fitting[np.argsort(room[fitting], kind="stable")[:BEST_FIT_CHOICES]]
        bins[i] = rng.choice(fullest)
        room[bins[i]] -= lengths[i]
    return bins


def pair_cells(problem: Problem, cells: list[list[int]]) -> Layout:
    """Group cells into row-shards by what they add to the busiest ranks.

    Row-shards are filled one after another: the dearest free cell opens it, then always the cell joins that adds least
    to J_{r,g} beyond its even share. Row-shards then go to the shards in turn, the dearest to the cheapest shard.
    """
    topology, slots = problem.topology, problem.topology.num_slots
    bin_of = np.empty(problem.lengths.size, dtype=np.int32)
    for index, members in enumerate(cells):
        bin_of[members] = index
    sums = np.zeros((len(cells), 2))
    np.add.at(sums, bin_of, np.stack([problem.lengths, problem.lengths**2], axis=1).astype(np.float64))
    stages = sums @ problem.stage_weights.T
    work = unit_loads(problem.work, bin_of, len(cells)).astype(np.int32)
    units = _pair(work, stages, problem.row_scale, topology.num_ranks, topology.slots_per_shard)
    num_units = len(cells) // topology.slots_per_shard
    order: NDArray[np.intp] = np.argsort(units, kind="stable").reshape(num_units, topology.slots_per_shard)
    if topology.num_shards > 1:
        flat = Layout.of_cells([cells[c] for c in order.reshape(-1)], slots, bin_of.size)
        order = order[_deal_to_shards(row_costs(problem, flat).joint.reshape(-1), topology.num_shards)]
    return Layout.of_cells([cells[c] for c in order.reshape(-1)], slots, bin_of.size)


def _deal_to_shards(joint: FloatArray, num_shards: int) -> Int64Array:
    """The order of row-shards that gives each shard R of them with nearly equal sums: dearest first to the cheapest."""
    rows = joint.size // num_shards
    members: list[list[int]] = [[] for _ in range(num_shards)]
    sums = [0.0] * num_shards
    for unit in np.argsort(-joint, kind="stable").tolist():
        g = min((g for g in range(num_shards) if len(members[g]) < rows), key=sums.__getitem__)
        members[g].append(unit)
        sums[g] += float(joint[unit])
    return np.array(members, dtype=np.int64).T.reshape(-1)


@compiled_part
def _peak(load: Int32Array, extra: Int32Array, busiest: Int32Array) -> int:
    """Sum over layers of the busiest rank of ``load + extra``, int32 [P', X]; ``busiest`` int32 [X] is scratch."""
    busiest[:] = 0
    for p in range(load.shape[0]):
        for x in range(load.shape[1]):
            value = np.int32(load[p, x] + extra[p, x])
            busiest[x] = value if value > busiest[x] else busiest[x]
    return int(busiest.sum())


@compiled
def _pair(work: Int32Array, stages: FloatArray, scale: float, num_ranks: int, per_unit: int) -> Int64Array:
    """int64 [K]: the row-shard of every cell; work int32 [K, P', X], stages float64 [K, S]."""
    num_cells = stages.shape[0]
    share = np.zeros(num_cells)
    for c in range(num_cells):
        share[c] = work[c].sum() * scale / num_ranks + stages[c].sum() / per_unit
    unit_of = np.full(num_cells, -1, np.int64)
    busiest = np.zeros(work.shape[2], np.int32)
    for unit in range(num_cells // per_unit):
        load = np.zeros((work.shape[1], work.shape[2]), np.int32)
        stage = np.zeros(stages.shape[1])
        for member in range(per_unit):
            chosen, least = -1, np.inf
            for c in range(num_cells):
                if unit_of[c] >= 0:
                    continue
                added = -share[c]
                if member:
                    added += _peak(load, work[c], busiest) * scale
                    for s in range(stage.size):
                        added += max(stage[s], stages[c, s])
                if added < least:
                    chosen, least = c, added
            unit_of[chosen] = unit
            load += work[chosen]
            stage = np.maximum(stage, stages[chosen])
    return unit_of


@dataclass(frozen=True)
class _Shape:
    """What the distance of two layouts is read from."""

    cells: NDArray[np.bool_]
    rows: NDArray[np.bool_]
    projected: FloatArray


def choose_seeds(problem: Problem, candidates: list[Layout], count: int) -> list[Layout]:
    """The best candidate, then those that trade score for distance from the ones already chosen.

    Returns ``count`` layouts, or every candidate where there are fewer.
    """
    scores = [score(problem, layout) for layout in candidates]
    shapes = [_shape(problem, layout) for layout in candidates]
    best = min(range(len(candidates)), key=scores.__getitem__)
    chosen, rest = [best], [i for i in range(len(candidates)) if i != best]
    while rest and len(chosen) < count:
        value = [_value(scores[i], scores[best], min(_distance(shapes[i], shapes[j]) for j in chosen)) for i in rest]
        chosen.append(rest.pop(int(np.argmax(value))))
    return [candidates[i] for i in chosen]


def _value(candidate: Score, best: Score, distance: float) -> float:
    return DIVERSITY * distance - (candidate.primary / best.primary - 1)


def _shape(problem: Problem, layout: Layout) -> _Shape:
    """Co-assignment by cell and by row, and sorted projections of the normalised row features: tokens, squared tokens
    and every rank's work."""
    rows = layout.cell // np.int32(layout.num_slots)
    per_trajectory = np.column_stack([problem.lengths, problem.lengths**2, problem.work.sum(axis=2)]).astype(np.float64)
    features = np.zeros((layout.num_rows, per_trajectory.shape[1]))
    np.add.at(features, rows, per_trajectory)
    features /= np.maximum(features.max(axis=0), 1)
    directions = np.random.default_rng(0).normal(size=(features.shape[1], NUM_PROJECTIONS))
    return _Shape(
        layout.cell[:, None] == layout.cell[None], rows[:, None] == rows[None], np.sort(features @ directions, axis=0)
    )


def _distance(one: _Shape, other: _Shape) -> float:
    """Mean of three terms in 0 to about 1: cells and rows not shared (Jaccard), and the sliced Wasserstein distance."""
    cells = 1 - (one.cells & other.cells).sum() / (one.cells | other.cells).sum()
    rows = 1 - (one.rows & other.rows).sum() / (one.rows | other.rows).sum()
    return float(cells + rows + np.abs(one.projected - other.projected).mean()) / 3
