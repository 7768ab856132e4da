from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflux_serve.errors import ConfigError, InputError, UnsupportedError
from megaflux_serve.routepack import anneal, rows
from megaflux_serve.routepack.anneal import Tables, run_chain
from megaflux_serve.routepack.baselines import (
    dp_local_ffd,
    global_ffd,
    karmarkar_karp,
    slime_schedule,
    verl_karmarkar_karp,
)
from megaflux_serve.routepack.demand import Demand
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.placement import Placement
from megaflux_serve.routepack.population import SearchOptions, resample, search
from megaflux_serve.routepack.rows import cell_bound, choose_rows, first_fit_decreasing
from megaflux_serve.routepack.score import Problem, score
from megaflux_serve.routepack.seeds import build_seeds, choose_seeds, pair_cells
from megaflux_serve.routepack.topology import Topology
from tests.core.routepack_cases import COST, check_schedule, window, windows
from tests.oracles.routepack_score import score as slow_score

EXACT = settings(derandomize=True, deadline=None, max_examples=25)
SHORT = SearchOptions(proposals=4_000, candidates=3)


def problem_of(demand: Demand, topology: Topology) -> Problem:
    owner = Placement.identity(demand.num_layers, demand.num_experts, topology.num_ranks).owner
    return Problem.of(demand.rank_demand(owner, topology.num_ranks), demand.lengths, topology, COST)


def random_layout(topology: Topology, num_trajectories: int, num_rows: int, seed: int) -> Layout:
    """Any assignment without empty cells; the capacity may be broken, which scoring does not mind."""
    rng = np.random.default_rng(seed)
    num_cells = num_rows * topology.num_slots
    cells = np.concatenate([np.arange(num_cells), rng.integers(0, num_cells, size=num_trajectories - num_cells)])
    return Layout(rng.permutation(cells).astype(np.int32), num_rows, topology.num_slots)


@EXACT
@given(windows(), st.integers(0, 99), st.sampled_from([0.0, 1.5]), st.booleans())
def test_the_score_equals_a_slow_independent_scorer(
    case: tuple[Demand, Topology], seed: int, weight: float, bubble: bool
) -> None:
    demand, topology = case
    cost = replace(COST, communication=weight, pipeline_bubble=bubble)
    owner = Placement.identity(demand.num_layers, demand.num_experts, topology.num_ranks).owner
    ranks = demand.rank_demand(owner, topology.num_ranks)
    copies = np.minimum(ranks, demand.lengths[:, None, None]).astype(np.int32)
    layout = random_layout(topology, demand.num_trajectories, 2, seed)
    expected = slow_score(
        layout.cells(),
        demand.counts.tolist(),
        owner.tolist(),
        demand.lengths.tolist(),
        [(stage.linear, stage.quadratic) for stage in cost.stages],
        num_ranks=topology.num_ranks,
        num_slots=topology.num_slots,
        num_shards=topology.num_shards,
        capacity=topology.capacity,
        bubble=topology.pipeline_stages - 1 if bubble else 0,
        communication=weight,
        copies=copies.tolist(),
    )
    assert score(Problem.of(ranks, demand.lengths, topology, cost, copies), layout) == pytest.approx(
        expected, rel=1e-12
    )


@EXACT
@given(windows(), st.integers(0, 99))
def test_a_chain_keeps_every_constraint_and_its_best_is_never_worse_than_its_start(
    case: tuple[Demand, Topology], seed: int
) -> None:
    demand, topology = case
    problem = problem_of(demand, topology)
    start = global_ffd(demand.lengths, topology, choose_rows(demand.lengths, topology))
    result = run_chain(Tables.of(problem), start, 3_000, 2.0, 0.01, 0.0, seed)
    for cells in (result.last, result.best):
        check_schedule(Layout(cells, start.num_rows, start.num_slots), demand, topology)
    best = score(problem, Layout(result.best, start.num_rows, start.num_slots))
    # With two shards the chain's energy is not the primary score alone, so its best may trade a little of it.
    if topology.num_shards == 1:
        assert best.primary <= score(problem, start).primary * (1 + 1e-12)


@pytest.mark.parametrize(("num_ranks", "num_shards"), [(4, 1), (4, 2), (16, 1)])
def test_what_a_chain_keeps_up_to_date_is_what_a_new_start_counts(num_ranks: int, num_shards: int) -> None:
    demand, topology = window(40), Topology(num_ranks, 4, 300, num_shards)
    tables = Tables.of(problem_of(demand, topology))
    layout = global_ffd(demand.lengths, topology, choose_rows(demand.lengths, topology))
    state = anneal._start(tables, layout.cell, layout.num_cells)
    found = anneal._chain(tables, state, 5_000, 2.0, 0.1, 0.0, np.uint64(1), anneal.QUANTILES, 40)
    assert found[2] > 500
    fresh = anneal._start(tables, anneal._layout_of(state), layout.num_cells)
    assert np.array_equal(state.load, fresh.load)
    assert np.array_equal(state.expert, fresh.expert)
    assert np.array_equal(state.slow_cost, fresh.slow_cost)
    assert np.array_equal(state.seat[state.slowest], fresh.slowest)
    assert state.joint == pytest.approx(fresh.joint, rel=1e-12)
    assert state.shard_sum == pytest.approx(fresh.shard_sum, rel=1e-12)


@EXACT
@given(windows())
def test_the_search_returns_a_legal_layout_no_worse_than_its_best_seed(case: tuple[Demand, Topology]) -> None:
    demand, topology = case
    problem = problem_of(demand, topology)
    ffd = global_ffd(demand.lengths, topology, choose_rows(demand.lengths, topology))
    seeds = choose_seeds(problem, build_seeds(problem, ffd, 4, 0), 2)
    for seed in seeds:
        check_schedule(seed, demand, topology)
    found = search(problem, seeds, SHORT)
    check_schedule(found.layout, demand, topology)
    assert found.score == score(problem, found.layout)
    assert found.score <= min(score(problem, seed) for seed in [ffd.canonical(topology.num_shards), *seeds])


def test_a_seed_gives_one_result_for_any_number_of_workers() -> None:
    demand, topology = window(40), Topology(4, 4, 300, 2)
    problem = problem_of(demand, topology)
    ffd = global_ffd(demand.lengths, topology, choose_rows(demand.lengths, topology))
    seeds = build_seeds(problem, ffd, 3, 0)
    options = replace(SHORT, members=4, levels=3, min_parents=2)
    results = [search(problem, seeds, replace(options, workers=workers)) for workers in (1, 2, 4)]
    assert all(np.array_equal(result.layout.cell, results[0].layout.cell) for result in results)
    assert all(result.history == results[0].history for result in results)
    other = search(problem, seeds, replace(options, seed=1))
    assert not np.array_equal(other.layout.cell, results[0].layout.cell)


def test_a_timed_search_can_be_repeated_by_its_numbers_of_proposals() -> None:
    demand, topology = window(40), Topology(4, 4, 300)
    problem = problem_of(demand, topology)
    seeds = build_seeds(problem, global_ffd(demand.lengths, topology, choose_rows(demand.lengths, topology)), 3, 0)
    timed = search(problem, seeds, SearchOptions(budget_s=0.2))
    again = search(problem, seeds, SearchOptions(proposals=timed.proposals))
    assert sum(timed.proposals) > 0
    assert np.array_equal(timed.layout.cell, again.layout.cell)


@EXACT
@given(windows(), st.integers(0, 99))
def test_canonical_layouts_differ_in_names_only(case: tuple[Demand, Topology], seed: int) -> None:
    demand, topology = case
    problem = problem_of(demand, topology)
    layout = random_layout(topology, demand.num_trajectories, 3, seed)
    canonical = layout.canonical(topology.num_shards)
    assert score(problem, canonical) == pytest.approx(score(problem, layout), rel=1e-12)
    # Renaming rows, and slots within a shard, leads to the same canonical layout.
    rng = np.random.default_rng(seed)
    shards, per_shard = topology.num_shards, topology.slots_per_shard
    slots = np.concatenate([g * per_shard + rng.permutation(per_shard) for g in range(shards)])
    row, slot = np.divmod(layout.cell, topology.num_slots)
    renamed = rng.permutation(3)[row] * topology.num_slots + slots[slot]
    other = Layout(renamed.astype(np.int32), 3, topology.num_slots).canonical(shards)
    assert np.array_equal(other.cell, canonical.cell)


@EXACT
@given(windows(smallest=32))
def test_every_baseline_is_a_legal_schedule(case: tuple[Demand, Topology]) -> None:
    demand, topology = case
    lengths = demand.lengths
    even = demand.select(range(demand.num_trajectories // 4 * 4))
    check_schedule(global_ffd(lengths, topology, choose_rows(lengths, topology)), demand, topology)
    check_schedule(slime_schedule(lengths, topology), demand, topology)
    check_schedule(verl_karmarkar_karp(even.lengths, topology), even, topology)
    check_schedule(dp_local_ffd(lengths, topology), demand, topology)


def test_dp_local_ffd_by_hand() -> None:
    # Two slots, capacity 10: slot 0 gets trajectories 0 to 7, slot 1 gets 8 to 15.
    lengths = np.array([9, 8, 2, 1, 1, 1, 1, 1, 5, 5, 5, 5, 1, 1, 1, 1])
    rows = dp_local_ffd(lengths, Topology(2, 2, 10)).rows()
    first, second = ([[int(lengths[i]) for i in row[slot]] for row in rows] for slot in (0, 1))
    # 9 | 8, 2 joins 8 (room), ones go to the cell with fewer trajectories that has room; then a third cell opens.
    assert first == [[9, 1], [8, 2], [1, 1, 1, 1]]
    assert second == [[5, 5], [5, 5], [1, 1, 1, 1]]


def test_dp_local_ffd_leaves_no_slot_empty_in_a_small_window() -> None:
    rows = dp_local_ffd(np.array([9, 8, 7, 6, 5, 4, 3]), Topology(2, 3, 20)).rows()
    assert rows == [[[0, 1, 6], [2, 3], [4, 5]]]  # groups of two, since groups of eight would be one


def test_slime_packs_in_order_of_arrival_and_splits_the_fullest() -> None:
    lengths = np.array([6, 3, 6, 4, 6])
    rows = slime_schedule(lengths, Topology(2, 2, 10)).rows()
    # First fit: [6, 3], [6, 4], [6]; two slots need a fourth micro-batch, and [6, 4] holds the most tokens.
    assert rows == [[[0, 1], [2]], [[4], [3]]]


def test_karmarkar_karp_on_the_textbook_example() -> None:
    # 8, 7, 6, 5, 4 differ to 2: {8, 6} and {7, 5, 4}; equal parts of {1, 2, 9, 10} pair the ends.
    lengths = np.array([8, 7, 6, 5, 4])
    sums = sorted(int(lengths[part].sum()) for part in karmarkar_karp(list(range(5)), lengths, 2, equal_size=False))
    assert sums == [14, 16]
    lengths = np.array([1, 2, 9, 10])
    assert karmarkar_karp([0, 1, 2, 3], lengths, 2, equal_size=True) == [[1, 2], [0, 3]]


def test_the_cell_bound_sees_what_the_capacity_bound_cannot() -> None:
    # Three of 6 need a cell each of 10; 18 tokens alone would fit two.
    assert cell_bound(np.array([6, 6, 6]), 10) == 3
    # Beside them only 4 + 4 + 4 is free: 5 does not fit, and two of 5 share a cell.
    assert cell_bound(np.array([6, 6, 6, 5, 5]), 10) == 4
    assert cell_bound(np.array([5, 5, 5, 5]), 10) == 2
    # One token more than two cells hold.
    assert cell_bound(np.array([10, 10, 1]), 10) == 3


@EXACT
@given(st.lists(st.integers(1, 30), min_size=4, max_size=40))
def test_the_row_choice_lies_between_its_bound_and_first_fit(values: list[int]) -> None:
    lengths = np.array(values, dtype=np.int64)
    topology = Topology(2, 2, 30)
    by_ffd = -(-(int(first_fit_decreasing(lengths, 30).max()) + 1) // 2)
    try:
        choice = choose_rows(lengths, topology)
    except InputError:
        assert lengths.size % 2  # a last half row cannot be filled
        return
    assert choice.lower_bound <= choice.num_rows <= by_ffd
    tokens = np.bincount(choice.bins, weights=lengths, minlength=choice.num_rows * 2)
    assert tokens.size <= choice.num_rows * 2
    assert tokens.max() <= 30


def test_the_stronger_packing_saves_a_row_that_first_fit_decreasing_needs() -> None:
    # First fit decreasing fills 70 + 25 and 40 + 20 + 15 + 10 + 10 and strands a 10; 70 + 20 + 10 leaves just 100.
    lengths = np.array([70, 40, 25, 20, 15, 10, 10, 10])
    assert first_fit_decreasing(lengths, 100).max() + 1 == 3
    choice = choose_rows(lengths, Topology(2, 2, 100))
    assert (choice.num_rows, choice.certified) == (1, True)


def slow_fill(lengths: list[int], capacity: int, num_bins: int) -> list[int]:
    """Bins filled one after another: the longest left, then the single one or pair of all that leaves least."""
    bins = [-1] * len(lengths)
    for b in range(num_bins):
        room, chosen = (
            capacity,
            [max((i for i in range(len(bins)) if bins[i] < 0), key=lengths.__getitem__, default=-1)],
        )
        while chosen and chosen != [-1]:
            for i in chosen:
                bins[i] = b
                room -= lengths[i]
            left = [i for i in range(len(bins)) if bins[i] < 0]
            every = [[i] for i in left] + [[i, j] for i in left for j in left if i < j]
            fitting = [some for some in every if sum(lengths[i] for i in some) <= room]
            chosen = max(fitting, key=lambda some: sum(lengths[i] for i in some), default=[])
    return bins


def test_the_stronger_packing_fills_a_bin_with_the_best_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 7, 16, 16, 24):
        lengths = rng.integers(1, 10**6, size=size)  # no two subsets alike
        found = rows._fill_bins(lengths, lengths.astype(np.float64), 10**6, 5)
        assert found.tolist() == slow_fill(lengths.tolist(), 10**6, 5)


def test_pairing_separates_cells_that_load_the_same_rank() -> None:
    # Two experts on two ranks; trajectories 0 and 1 use rank 0 only, 2 and 3 rank 1 only.
    counts = np.zeros((4, 1, 2), dtype=np.int64)
    counts[:2, 0, 0] = counts[2:, 0, 1] = 10
    demand, topology = Demand.of(counts, [10] * 4), Topology(2, 2, 10)
    problem = problem_of(demand, topology)
    layout = pair_cells(problem, [[0], [1], [2], [3]])
    assert all({min(row[0][0], row[1][0]) < 2, max(row[0][0], row[1][0]) >= 2} == {True} for row in layout.rows())


def test_resampling_keeps_the_asked_number_of_parents_and_favours_heavy_paths() -> None:
    rng = np.random.default_rng(0)
    weights = np.array([0.0, 50.0, 49.0, -3.0])
    for parents in (1, 2, 3, 4):
        drawn = resample(weights, parents, rng)
        assert len(drawn) == 4
        assert len(set(drawn)) >= parents
        assert drawn[0] == 1
    assert resample(weights * 100, 1, rng) == [1, 1, 1, 1]
    assert sorted(resample(np.zeros(4), 4, rng)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("members", 0),
        ("levels", 0),
        ("min_parents", 3),
        ("budget_s", 0.0),
        ("cold", 1.0),
        ("candidates", 1),
        ("seed", -1),
        ("proposals", (1, 2)),
        ("proposals", -1),
    ],
)
def test_a_search_option_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SearchOptions(**{field: value})


def test_a_trajectory_longer_than_a_cell_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"trajectory 1 has 11 tokens.*10"):
        choose_rows(np.array([3, 11, 4, 4]), Topology(2, 2, 10))


def test_more_cells_than_trajectories_are_refused() -> None:
    with pytest.raises(InputError, match="3 trajectories cannot fill 1 rows of 4 cells"):
        choose_rows(np.array([3, 3, 3]), Topology(2, 4, 10))


def test_work_beyond_32_bits_is_refused() -> None:
    demand = window(8)
    with pytest.raises(UnsupportedError, match="32 bits"):
        problem_of(demand, Topology(4, 4, 2**30))
