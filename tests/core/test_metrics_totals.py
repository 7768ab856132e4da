"""LayerTotals: every word against figures that are computed another way."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from megaflux_kernels.totals_map import Total, TotalsMap

from megaflux_serve.planning.fast_planner import plan_replicas
from megaflux_serve.planning.gate import GateCosts, apply_gate
from megaflux_serve.planning.plan import ReplicaPlan, fixed_plan
from megaflux_serve.planning.planner import PlannerOptions
from megaflux_serve.planning.totals import RATIO_BOUNDS, TIME_BOUNDS, LayerTotals, imbalance_permille, kappa_permille
from megaflux_serve.slots import SlotLayout

LAYOUT = SlotLayout(8, 2, 2)


def plans() -> list[ReplicaPlan]:
    """Batches of two ranks: copied replicas, resident ones, refused ones, none needed, no rows."""
    rng = np.random.default_rng(0)
    skewed = rng.integers(0, 50, (2, 8)) + np.array([2000, 900, 0, 0, 0, 0, 0, 0])
    options = PlannerOptions(block_rows=16)
    first = plan_replicas(skewed, LAYOUT, options)
    second = plan_replicas(skewed, LAYOUT, options, first.replica_experts)
    refused = apply_gate(plan_replicas(skewed, LAYOUT, options), GateCosts(1, 10**9, 0, 0))
    even = plan_replicas(np.full((2, 8), 16), LAYOUT, options)
    return [first, second, refused, even, fixed_plan(np.zeros((2, 8), np.int64), LAYOUT, 16)]


def test_sums_are_those_of_the_plans() -> None:
    batches, totals = plans(), LayerTotals(2, 8)
    for plan in batches:
        totals.add(plan)
    regions = totals.map.split(totals.words)
    expected = {
        Total.BATCHES: 5,
        Total.ROWS: sum(plan.counts.sum() for plan in batches),
        Total.BLOCKS: sum(plan.blocks.sum() for plan in batches),
        Total.BUSIEST: sum(plan.blocks.sum(axis=0).max() for plan in batches),
        Total.FIXED_BUSIEST: sum(max(plan.blocks[:4].sum(), plan.blocks[4:].sum()) for plan in batches),
        Total.BALANCED: sum(int(np.ceil(plan.blocks.sum() / 2)) for plan in batches),
        Total.MOVED: sum(plan.blocks[:4, 1].sum() + plan.blocks[4:, 0].sum() for plan in batches),
        Total.REPLICAS: sum(np.count_nonzero(p.blocks[:4, 1]) + np.count_nonzero(p.blocks[4:, 0]) for p in batches),
        Total.TRANSFERS: sum(len(plan.transfers) for plan in batches),
        Total.REPLICATED: 2,
        Total.REFUSED: 1,
    }
    assert {total: regions["sums"][total] for total in expected} == expected
    assert expected[Total.REPLICAS] > expected[Total.TRANSFERS] > 0  # the second batch finds its replicas there
    assert np.array_equal(regions["loads"], sum(plan.blocks.sum(axis=0) for plan in batches))
    assert regions["fixed_loads"].sum() == regions["loads"].sum()
    assert np.array_equal(regions["expert_rows"], sum(plan.counts.sum(axis=0) for plan in batches))


def test_a_value_on_a_bound_counts_as_within_it() -> None:
    totals = LayerTotals(2, 8)
    for time in (0, TIME_BOUNDS[0], TIME_BOUNDS[0] + 1, TIME_BOUNDS[-1], TIME_BOUNDS[-1] + 1):
        totals.add_times(time, None)
    regions = totals.map.split(totals.words)
    assert regions["planner_time"].tolist() == [2, 1, *[0] * (len(TIME_BOUNDS) - 3), 1, 1]
    assert regions["layer_time"].sum() == 0
    assert regions["sums"][Total.PLANNER_NS] == 2 * TIME_BOUNDS[0] + 2 * TIME_BOUNDS[-1] + 2


def test_every_batch_has_one_place_in_each_histogram_and_sums_agree_with_places() -> None:
    totals = LayerTotals(2, 8)
    for plan in plans():
        totals.add(plan)
        totals.add_times(1000, 2000)
    regions = totals.map.split(totals.words)
    for name in ("imbalance", "fixed_imbalance", "kappa", "planner_time", "layer_time"):
        assert regions[name].sum() == 5
    sums, bounds = regions["sums"], (1000, *RATIO_BOUNDS)
    for name, total in (("imbalance", Total.IMBALANCE), ("kappa", Total.KAPPA)):
        lowest = sum(int(count) * bound for count, bound in zip(regions[name], bounds, strict=True))
        highest = sum(int(count) * bound for count, bound in zip(regions[name], (*RATIO_BOUNDS, 8001), strict=True))
        assert lowest <= sums[total] <= highest


@given(st.integers(0, 2**31 // 200), st.integers(1, 2**31 - 1), st.integers(1, 72))
def test_imbalance_is_rounded_down_and_empty_batches_are_balanced(load: int, blocks: int, ranks: int) -> None:
    assert imbalance_permille(load, blocks, ranks) == int(Fraction(1000 * load * ranks, blocks))
    assert imbalance_permille(0, 0, ranks) == 1000


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=64))
def test_kappa_is_rounded_down(rows: list[int]) -> None:
    value, total = kappa_permille(np.array(rows)), sum(rows)
    exact = Fraction(1000 * len(rows) * sum(row * row for row in rows), total * total) if total else Fraction(1000)
    assert abs(value - exact) <= 1
    assert value >= 999  # float64 can fall below the least possible, 1000, by a bit


def test_regions_lie_one_behind_the_other() -> None:
    totals = TotalsMap(2, 8, (1, 2), (3,))
    at = 0
    for first, size in totals.words.values():
        assert first == at
        at += size
    assert totals.num_words == at
    assert totals.words["sums"] == (0, int(Total.SIZE))
