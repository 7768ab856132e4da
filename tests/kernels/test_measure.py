"""The gate's costs from measured times: what went into the times comes out again, and the gate decides by it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from megaflux_serve.cli.measure import LayerTimes, MeasuredShape, gate_costs
from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.planning.gate import GateCosts, apply_gate
from megaflux_serve.planning.plan import ReplicaPlan, fixed_plan
from megaflux_serve.planning.planner import plan_replicas
from megaflux_serve.planning.workload import scale_counts, split_by_source, zipf_shares
from megaflux_serve.slots import SlotLayout


@pytest.fixture(scope="module")
def plans() -> tuple[ReplicaPlan, ReplicaPlan]:
    """Fixed and replicated, of a batch whose hottest experts are on rank 0."""
    layout = SlotLayout(32, 2, 4)
    counts = split_by_source(scale_counts(zipf_shares(32, 3.0), 4096, 4), 2)
    plan = plan_replicas(counts, layout)
    assert len(plan.transfers)
    return fixed_plan(counts, layout, plan.block_rows), plan


def times_of(costs: GateCosts, plans: tuple[ReplicaPlan, ReplicaPlan], base: float = 50_000) -> LayerTimes:
    """Times of layers that cost exactly this, beside a constant."""
    fixed, plan = plans
    exposed, separate = costs.exposed_ns(plan), GateCosts(0, costs.replica_ns, 0, 0).exposed_ns(plan)
    resident = base + plan.max_load * costs.block_ns + costs.plan_ns
    return LayerTimes(
        base + fixed.max_load * costs.block_ns, resident + separate, resident + exposed, resident, costs.plan_ns
    )


@pytest.mark.parametrize("hidden", [0, 640, 1000])
def test_what_went_into_the_times_comes_out(plans: tuple[ReplicaPlan, ReplicaPlan], hidden: int) -> None:
    costs = GateCosts(2_000, 30_000, 9_000, hidden)
    found = gate_costs(times_of(costs, plans), plans[0].max_load, plans[1])
    assert (found.block_ns, found.replica_ns, found.plan_ns) == (2_000, 30_000, 9_000)
    assert abs(found.hidden_permille - hidden) <= 1


@pytest.mark.parametrize(("replica_ns", "pays"), [(1_000, True), (9_000_000, False)])
def test_the_gate_carries_out_what_was_faster(
    plans: tuple[ReplicaPlan, ReplicaPlan], replica_ns: int, pays: bool
) -> None:
    times = times_of(GateCosts(2_000, replica_ns, 9_000, 300), plans)
    assert (times.pipelined < times.fixed) is pays
    gated = apply_gate(plans[1], gate_costs(times, plans[0].max_load, plans[1]))
    assert (gated.num_replicas > 0) is pays


def test_a_transfer_within_noise_is_hidden_by_nothing(plans: tuple[ReplicaPlan, ReplicaPlan]) -> None:
    times = LayerTimes(fixed=3e6, staged=2.01e6, pipelined=2e6, resident=2e6, plan=0)
    assert gate_costs(times, plans[0].max_load, plans[1]).hidden_permille == 0


def test_a_shape_that_no_rank_can_serve_is_refused_before_one_is_started() -> None:
    with pytest.raises(UnsupportedError, match="hidden = 100"):
        MeasuredShape(8, 100, 64, 2, 1, 16).check(2)
    with pytest.raises(ConfigError, match="replica_slots = 5"):
        MeasuredShape(8, 128, 64, 2, 5, 16).check(2)


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 8, 1024), (2, 2, 1024), (256, 8, 64)])
def test_a_batch_that_needs_no_replicas_is_refused_before_a_rank_is_started(
    experts: int, top_k: int, tokens: int
) -> None:
    with pytest.raises(UnsupportedError, match=f"a batch of {tokens} tokens a rank, {top_k} of {experts} experts each"):
        MeasuredShape(experts, 128, 64, top_k, 1, tokens).check(2)


def test_a_batch_that_needs_replicas_is_measured() -> None:
    for experts, top_k, tokens in ((128, 8, 1024), (8, 2, 1024)):
        MeasuredShape(experts, 128, 64, top_k, 1, tokens).check(2)


def test_the_batch_of_the_measurement_relieves_a_rank() -> None:
    layout = SlotLayout(8, 2, 1)
    counts = split_by_source(scale_counts(zipf_shares(8, 3.0), 2 * 1024, 2), 2)
    plan = plan_replicas(counts, layout)
    assert np.argmax(plan.fixed_loads) == 0
    assert plan.max_load < plan.fixed_loads.max()
    assert len(plan.transfers)
