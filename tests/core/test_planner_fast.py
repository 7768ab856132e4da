"""The compiled planner equals the specification exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from megaflux_serve.errors import InputError
from megaflux_serve.planning import fast_planner, planner
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.planner import PlannerOptions
from megaflux_serve.planning.workload import permute, scale_counts, split_by_source, zipf_shares
from megaflux_serve.routing import CountArray
from megaflux_serve.slots import IntArray, SlotLayout
from tests.core.planner_cases import assert_plan_invariants, cases, deterministic

NUM_TIED_CASES = 4000


def assert_equal_plans(left: ReplicaPlan, right: ReplicaPlan) -> None:
    assert (left.candidate, left.gated) == (right.candidate, right.gated)
    for name in ("counts", "blocks", "replica_experts", "transfers"):
        a, b = getattr(left, name), getattr(right, name)
        assert (name, a.dtype, a.shape) == (name, b.dtype, b.shape)
        assert np.array_equal(a, b), name


@settings(deterministic, max_examples=150)
@given(cases())
def test_the_compiled_planner_equals_the_specification(
    case: tuple[CountArray, SlotLayout, PlannerOptions, IntArray | None],
) -> None:
    fast = fast_planner.plan_replicas(*case)
    assert_equal_plans(fast, planner.plan_replicas(*case))
    assert_plan_invariants(fast, *case)


@pytest.mark.parametrize(("num_experts", "num_ranks", "slots"), [(64, 8, 2), (128, 8, 4), (144, 72, 1), (256, 2, 16)])
def test_they_are_equal_at_the_sizes_of_real_models(num_experts: int, num_ranks: int, slots: int) -> None:
    random = np.random.Generator(np.random.PCG64(num_experts))
    layout = SlotLayout(num_experts, num_ranks, slots)
    resident = None
    for step, penalty in enumerate((0, 0, 12)):
        shares = random.permutation(np.arange(1.0, num_experts + 1) ** -1.1)
        counts = random.multinomial(4096 * 8, shares / shares.sum(), size=num_ranks)
        options = PlannerOptions(reduction_penalty=penalty, transfer_cost_blocks=3 * step)
        fast = fast_planner.plan_replicas(counts, layout, options, resident)
        assert fast.num_replicas > 0
        assert_equal_plans(fast, planner.plan_replicas(counts, layout, options, resident))
        resident = fast.replica_experts


def tied_case(random: np.random.Generator) -> tuple[CountArray, SlotLayout, PlannerOptions, IntArray]:
    """A case in which the tie-breaks decide: few distinct block counts, several hot ranks, many residents."""
    num_ranks, experts_per_rank = int(random.integers(3, 7)), int(random.integers(1, 6))
    home = random.permutation(np.repeat(np.arange(num_ranks, dtype=np.int32), experts_per_rank))
    layout = SlotLayout(home.size, num_ranks, int(random.integers(1, 6)), home)
    blocks = random.choice(random.integers(0, 10, size=2), home.size)
    hot = random.random(num_ranks) < 0.4
    blocks = np.where(hot[home], blocks * random.integers(2, 9), blocks)
    counts = np.zeros((num_ranks, home.size), dtype=np.int64)
    counts[0] = blocks
    resident = layout.no_replicas()
    for rank in range(num_ranks):
        foreign = random.permutation(np.flatnonzero(home != rank))[: layout.num_replica_slots]
        resident[rank, : foreign.size] = np.where(random.random(foreign.size) < 0.6, foreign, -1)
    options = PlannerOptions(1, int(random.choice([0, 0, 1, 2, 5, 9])), int(random.choice([0, 0, 1, 3])))
    return counts, layout, options, resident


def test_they_are_equal_on_thousands_of_cases_full_of_ties() -> None:
    random = np.random.Generator(np.random.PCG64(7))
    for _ in range(NUM_TIED_CASES):
        case = tied_case(random)
        assert_equal_plans(fast_planner.plan_replicas(*case), planner.plan_replicas(*case))


def test_a_batch_that_comes_again_copies_nothing() -> None:
    layout, copied = SlotLayout(128, 8, 2), np.zeros(4)
    for seed in range(30):
        counts = permute(scale_counts(zipf_shares(128, 3), 8 * 1024, 8), seed)
        resident = layout.no_replicas()
        for batch in range(copied.size):
            plan = fast_planner.plan_replicas(split_by_source(counts, 8), layout, resident=resident)
            resident, copied[batch] = plan.replica_experts, copied[batch] + len(plan.transfers)
    assert copied[0] > 0
    assert copied[1:].sum() == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_copies_in_place_cost_no_balance(slots: int) -> None:
    """On these batches, whose shares drift: two plans with one maximum may be refined to different ones."""
    layout, random, kept, copied = SlotLayout(64, 8, slots), np.random.default_rng(3), 0, 0
    for _ in range(8):
        logits, resident = np.log(zipf_shares(64, 4))[random.permutation(64)], layout.no_replicas()
        for _ in range(12):
            logits += 0.1 * random.standard_normal(64)
            counts = random.multinomial(65_536, np.exp(logits) / np.exp(logits).sum(), size=8)
            plan = fast_planner.plan_replicas(counts, layout, resident=resident)
            assert plan.max_load <= fast_planner.plan_replicas(counts, layout).max_load
            resident = plan.replica_experts
            copied, kept = copied + len(plan.transfers), kept + plan.num_replicas - len(plan.transfers)
    assert kept > 2 * copied > 0


def test_rows_near_the_limit_of_32_bits_are_planned_exactly() -> None:
    counts = np.array([[2**31 - 101, 0, 7, 3], [50, 40, 0, 0]], dtype=np.int64)
    for block_rows in (1, 128):
        case = counts, SlotLayout(4, 2, 2), PlannerOptions(block_rows)
        assert_equal_plans(fast_planner.plan_replicas(*case), planner.plan_replicas(*case))
    with pytest.raises(InputError, match="at most 2147483647 blocks"):
        fast_planner.plan_replicas(counts + 1000, SlotLayout(4, 2, 2), PlannerOptions(1))


def test_bad_input_is_refused_as_by_the_specification() -> None:
    with pytest.raises(InputError, match="counts: is -3 at rank 0, expert 1"):
        fast_planner.plan_replicas([[0, -3], [0, 0]], SlotLayout(2, 2, 1))
    with pytest.raises(InputError, match="resident: rank 1"):
        fast_planner.plan_replicas([[0, 0], [0, 0]], SlotLayout(2, 2, 1), resident=[[1], [1]])
