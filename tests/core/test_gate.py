"""The gate's arithmetic is exact, and the figures about a plan are those of the paper."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflux_serve.errors import ConfigError
from megaflux_serve.planning import (
    FIXED,
    GateCosts,
    PlannerOptions,
    ReplicaPlan,
    apply_gate,
    block_eta,
    estimate_costs,
    eta,
    fixed_rank_rows,
    plan_replicas,
    rank_rows,
)
from megaflux_serve.routing import CountArray
from megaflux_serve.slots import IntArray, SlotLayout
from tests.core.planner_cases import assert_plan_invariants, cases, deterministic

nanoseconds = st.sampled_from([0, 1, 3, 999, 14_300, 252_000, 10**9])


def skewed_plan(resident: object = None) -> ReplicaPlan:
    """Expert 0's 12 one-row blocks on three ranks: 4 blocks each by two transfers from rank 0."""
    counts = np.zeros((3, 3), dtype=np.int64)
    counts[0, 0] = 12
    return plan_replicas(counts, SlotLayout(3, 3, 1), PlannerOptions(block_rows=1), resident)  # type: ignore[arg-type]


@deterministic
@given(cases(), nanoseconds, nanoseconds, nanoseconds, st.integers(0, 1000))
def test_a_plan_is_gated_exactly_when_it_saves_no_more_than_it_costs(
    case: tuple[CountArray, SlotLayout, PlannerOptions, IntArray | None],
    block_ns: int,
    replica_ns: int,
    plan_ns: int,
    hidden_permille: int,
) -> None:
    plan, resident = plan_replicas(*case), case[3]
    costs = GateCosts(block_ns, replica_ns, plan_ns, hidden_permille)
    gated = apply_gate(plan, costs, resident)
    received = [sum(r == rank for _, r, _ in plan.transfers) for rank in range(plan.layout.num_ranks)]
    sent = [
        sum(plan.layout.home_rank[e] == rank for e, _, _ in plan.transfers) for rank in range(plan.layout.num_ranks)
    ]
    exposed = Fraction(max(received + sent) * replica_ns * (1000 - hidden_permille), 1000).__floor__()
    assert costs.exposed_ns(plan) == exposed
    saving = (int(plan.fixed_loads.max()) - plan.max_load) * block_ns
    if plan.num_replicas == 0:
        assert gated is plan
    elif saving > plan_ns + exposed:
        assert gated is plan
        assert not plan.gated
    else:
        assert gated.gated
        assert gated.candidate == FIXED
        assert gated.num_replicas == 0
        assert gated.loads.tolist() == plan.fixed_loads.tolist()
        held = plan.layout.no_replicas() if resident is None else resident
        assert gated.replica_experts.tolist() == held.tolist()
        assert len(gated.transfers) == 0
        counts, layout, options, _ = case
        assert_plan_invariants(gated, counts, layout, PlannerOptions(options.block_rows), resident)


def test_the_busier_direction_of_the_busiest_rank_is_exposed() -> None:
    # Rank 0 sends two replicas while ranks 1 and 2 receive one each: 2 * 7 * 0.5 = 7 ns; 12 - 4 blocks are saved.
    plan = skewed_plan()
    costs = GateCosts(block_ns=1, replica_ns=7, plan_ns=0, hidden_permille=500)
    assert costs.exposed_ns(plan) == 7
    assert GateCosts(block_ns=3, replica_ns=7, plan_ns=5, hidden_permille=500).layer_ns(plan) == 4 * 3 + 5 + 7
    assert GateCosts(block_ns=3, replica_ns=7, plan_ns=5, hidden_permille=1000).layer_ns(plan) == 4 * 3 + 5
    assert apply_gate(plan, costs) is plan
    assert apply_gate(plan, GateCosts(1, 7, 1, 500)).gated
    # The other way about: ranks 0 and 1 send one replica each, and rank 2 receives both.
    counts = np.array([[2, 2, 2, 2, 2, 2, 0, 0, 0], [0] * 9, [0] * 9])
    plan = plan_replicas(counts, SlotLayout(9, 3, 2), PlannerOptions(block_rows=1))
    assert plan.transfers.tolist() == [[0, 2, 0], [3, 2, 1]]
    assert costs.exposed_ns(plan) == 7


def test_a_resident_replica_exposes_nothing_and_stays_when_the_plan_is_gated() -> None:
    resident = [[-1], [0], [0]]
    plan = skewed_plan(resident)
    assert GateCosts(1, 10**9, 0, 0).exposed_ns(plan) == 0
    assert apply_gate(plan, GateCosts(1, 10**9, 7, 0), resident) is plan
    gated = apply_gate(plan, GateCosts(1, 10**9, 8, 0), resident)
    assert gated.gated
    assert gated.replica_experts.tolist() == resident


def test_estimated_costs_are_operations_and_bytes_over_rates() -> None:
    costs = estimate_costs(7168, 2048, tflop_per_s=788, link_gb_per_s=350, plan_ns=30_000, hidden_permille=560)
    assert costs == GateCosts(block_ns=14_307, replica_ns=251_658, plan_ns=30_000, hidden_permille=560)
    with pytest.raises(ConfigError, match="link_gb_per_s = 0 is not allowed; allowed: a positive number"):
        estimate_costs(7168, 2048, 788, 0)


@pytest.mark.parametrize("field", ["block_ns", "replica_ns", "plan_ns", "hidden_permille"])
def test_coefficients_out_of_range_are_refused_by_name(field: str) -> None:
    good = {"block_ns": 1, "replica_ns": 1, "plan_ns": 1, "hidden_permille": 1}
    for value in (-1, 10**9 + 1):
        with pytest.raises(ConfigError, match=f"{field} = {value} is not allowed"):
            GateCosts(**{**good, field: value})


def test_eta_is_the_fraction_of_excess_rows_removed() -> None:
    # 300 + 20 rows on ranks 0 and 1, mean 160. Blocks 3 + 1: one of rank 0's three moves to rank 1, which then has the
    # partial one of 44 rows, so rank 0 keeps 256 rows: excess 140 becomes 96.
    counts = np.array([[300, 20], [0, 0]])
    plan = plan_replicas(counts, SlotLayout(2, 2, 1))
    assert fixed_rank_rows(plan).tolist() == [300, 20]
    assert rank_rows(plan).tolist() == [256, 64]
    assert eta(plan) == pytest.approx(1 - 96 / 140)
    assert block_eta(plan) == 1


def test_eta_has_no_value_without_excess() -> None:
    for counts in ([[5, 5], [0, 0]], [[0, 0], [0, 0]]):
        plan = plan_replicas(counts, SlotLayout(2, 2, 1))
        assert eta(plan) is None
        assert block_eta(plan) is None


@deterministic
@given(cases())
def test_rows_are_conserved_and_eta_is_at_most_one(
    case: tuple[CountArray, SlotLayout, PlannerOptions, IntArray | None],
) -> None:
    plan = plan_replicas(*case)
    assert rank_rows(plan).sum() == fixed_rank_rows(plan).sum() == case[0].sum()
    value = eta(plan)
    assert value is None or value <= 1
