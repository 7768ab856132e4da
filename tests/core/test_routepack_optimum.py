from itertools import product

import numpy as np
import pytest

from megaflux_serve.routepack.baselines import global_ffd
from megaflux_serve.routepack.demand import Demand
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.placement import Placement
from megaflux_serve.routepack.population import SearchOptions, search
from megaflux_serve.routepack.rows import choose_rows
from megaflux_serve.routepack.score import Problem, score
from megaflux_serve.routepack.seeds import build_seeds
from megaflux_serve.routepack.topology import Topology
from tests.core.routepack_cases import COST, window
from tests.oracles.routepack_optimum import optimum

pytest.importorskip("ortools", reason="certified optima need ortools")

from megaflux_serve.routepack.optimum import pack_exactly, solve_schedule


def problem_of(demand: Demand, topology: Topology) -> Problem:
    owner = Placement.identity(demand.num_layers, demand.num_experts, topology.num_ranks).owner
    return Problem.of(demand.rank_demand(owner, topology.num_ranks), demand.lengths, topology, COST)


@pytest.mark.parametrize("shards", [1, 2])
def test_the_certified_optimum_is_the_best_of_all_layouts(shards: int) -> None:
    demand, topology = window(7, num_layers=2, seed=shards), Topology(2, 2, 300, shards)
    problem = problem_of(demand, topology)
    legal = []
    for cells in product(range(4), repeat=7):
        layout = Layout(np.array(cells, dtype=np.int32), 2, 2)
        if len(set(cells)) == 4 and layout.tokens(demand.lengths).max() <= 300:
            legal.append(score(problem, layout).primary)
    hint = global_ffd(demand.lengths, topology, choose_rows(demand.lengths, topology))
    hint = Layout(hint.cell, 2, 2) if hint.num_rows == 2 else Layout(np.array([0, 1, 2, 3, 3, 2, 1], np.int32), 2, 2)
    found = solve_schedule(problem, hint, seconds=30)
    assert found.certified
    if shards == 1:
        stages = [(stage.linear, stage.quadratic) for stage in COST.stages]
        assert optimum(demand.lengths, problem.work.astype(np.int64), stages, 300, 2) == pytest.approx(min(legal))
    assert found.primary == pytest.approx(min(legal), rel=1e-6)
    assert found.bound <= found.primary


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_optimum_of_small_windows(seed: int) -> None:
    demand, topology = window(11, num_layers=2, seed=seed), Topology(4, 2, 160)
    problem = problem_of(demand, topology)
    ffd = global_ffd(demand.lengths, topology, choose_rows(demand.lengths, topology))
    found = search(problem, build_seeds(problem, ffd, 4, 0), SearchOptions.for_size(11, proposals=200_000))
    stages = [(stage.linear, stage.quadratic) for stage in COST.stages]
    best = optimum(demand.lengths, problem.work.astype(np.int64), stages, topology.capacity, ffd.num_rows)
    assert best * (1 - 1e-9) <= found.score.primary <= best * 1.001


def test_exact_packing_decides_both_ways() -> None:
    lengths = np.array([6, 6, 6, 5, 5])
    assert pack_exactly(lengths, 10, 3, seconds=10) == (None, True)
    bins, certain = pack_exactly(lengths, 10, 4, seconds=10)
    assert certain
    assert bins is not None
    assert np.bincount(bins, weights=lengths).max() <= 10
