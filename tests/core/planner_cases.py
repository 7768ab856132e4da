"""Planner inputs that the planner's tests share: hypothesis strategies and the invariants of every plan."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megaflux_serve.planning.plan import ReplicaPlan, blocks_per_expert
from megaflux_serve.planning.planner import PlannerOptions
from megaflux_serve.routing import CountArray
from megaflux_serve.slots import IntArray, SlotLayout

deterministic = settings(
    derandomize=True, deadline=None, max_examples=150, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def layouts(draw: Any) -> SlotLayout:
    """Up to 6 ranks with up to 5 experts each, 0 to 4 replica slots, contiguous or shuffled homes."""
    num_ranks = draw(st.integers(1, 6))
    experts_per_rank = draw(st.integers(1, 5))
    home = np.repeat(np.arange(num_ranks), experts_per_rank)
    if draw(st.booleans()):
        home = np.array(draw(st.permutations(home.tolist())))
    return SlotLayout(home.size, num_ranks, draw(st.integers(0, 4)), home)


@st.composite
def histograms(draw: Any, layout: SlotLayout) -> CountArray:
    """[P, E] rows: sparse, heavy-tailed, one expert with everything, one hot rank, or nothing at all."""
    num_ranks, num_experts = layout.num_ranks, layout.num_experts
    cell = st.one_of(st.just(0), st.integers(0, 9), st.sampled_from([127, 128, 129, 1000, 5000]))
    per_expert = np.array(draw(st.lists(cell, min_size=num_experts, max_size=num_experts)), dtype=np.int64)
    shape = draw(st.sampled_from(["as drawn", "one expert", "one rank", "empty"]))
    if shape == "one expert":
        per_expert[np.arange(num_experts) != draw(st.integers(0, num_experts - 1))] = 0
    elif shape == "one rank":
        per_expert = np.where(layout.home_rank == draw(st.integers(0, num_ranks - 1)), 20 * per_expert, per_expert)
    elif shape == "empty":
        per_expert[:] = 0
    counts = np.zeros((num_ranks, num_experts), dtype=np.int64)
    source = draw(st.integers(0, num_ranks - 1))
    counts[:] = per_expert // num_ranks
    counts[source] += per_expert % num_ranks
    return counts


@st.composite
def residents(draw: Any, layout: SlotLayout) -> IntArray | None:
    """Resident copies that obey their contract, with empty slots among them; or none."""
    if draw(st.booleans()):
        return None
    table = layout.no_replicas()
    for rank in range(layout.num_ranks):
        foreign = np.flatnonzero(layout.home_rank != rank).tolist()
        order = draw(st.permutations(foreign))[: layout.num_replica_slots]
        for slot, expert in enumerate(order):
            table[rank, slot] = expert if draw(st.booleans()) else -1
    return table


@st.composite
def cases(draw: Any) -> tuple[CountArray, SlotLayout, PlannerOptions, IntArray | None]:
    """Every argument of ``plan_replicas``."""
    layout = draw(layouts())
    options = PlannerOptions(
        block_rows=draw(st.sampled_from([1, 7, 128])),
        reduction_penalty=draw(st.sampled_from([0, 0, 1, 3, 12])),
        transfer_cost_blocks=draw(st.sampled_from([0, 0, 1, 5])),
    )
    return draw(histograms(layout)), layout, options, draw(residents(layout))


def assert_plan_invariants(
    plan: ReplicaPlan, counts: CountArray, layout: SlotLayout, options: PlannerOptions, resident: IntArray | None
) -> None:
    """What holds for every plan of these arguments, whoever made it."""
    held = layout.no_replicas() if resident is None else resident
    away = plan.blocks.copy()
    away[np.arange(layout.num_experts), layout.home_rank] = 0

    # Every block once, every row once, no row that was not routed.
    assert (plan.blocks >= 0).all()
    assert plan.blocks.sum(axis=1).tolist() == (-(-counts.sum(axis=0) // options.block_rows)).tolist()
    assert plan.rows().sum(axis=1).tolist() == counts.sum(axis=0).tolist()
    assert (plan.rows() <= plan.blocks.astype(np.int64) * options.block_rows).all()
    assert ((plan.rows() > 0) == (plan.blocks > 0)).all()

    # The slot budget, and a slot for every replica.
    assert ((away > 0).sum(axis=0) <= layout.num_replica_slots).all()
    for rank in range(layout.num_ranks):
        used = set(np.flatnonzero(away[:, rank]).tolist())
        before, after = held[rank].tolist(), plan.replica_experts[rank].tolist()
        assert used <= set(after)
        # Residents in use keep their slot; an unused one leaves only for a new replica.
        assert all(after[slot] == e for slot, e in enumerate(before) if e in used)
        assert all(after[slot] == e or after[slot] in used for slot, e in enumerate(before) if e >= 0)
        # Transfers are exactly the replicas in use that were not resident, and say where each went.
        moved = [(int(e), int(slot)) for e, r, slot in plan.transfers if r == rank]
        assert {e for e, _ in moved} == used - set(before)
        assert len(moved) == len(used - set(before))
        assert all(after[slot] == e for e, slot in moved)
        # A resident copy is overwritten only when no slot is empty any more.
        overwritten = any(before[slot] >= 0 for _, slot in moved)
        assert not (overwritten and -1 in after)
    assert plan.transfers.tolist() == sorted(plan.transfers.tolist(), key=lambda t: (t[1], t[2]))

    # Never worse than the fixed placement: in load, or in the augmented load when reduction is charged.
    fixed = plan.fixed_loads
    if options.reduction_penalty == 0:
        assert plan.max_load <= int(fixed.max())
    else:
        remote = np.zeros(layout.num_ranks, dtype=np.int64)
        np.add.at(remote, layout.home_rank, (away > 0).sum(axis=1))
        cost = int((plan.loads + options.reduction_penalty * remote).max())
        assert cost < int(fixed.max()) or plan.num_replicas == 0
    assert (plan.candidate == -1) == (plan.num_replicas == 0)
    assert blocks_per_expert(counts, options.block_rows).tolist() == plan.blocks.sum(axis=1).tolist()
    plan.check()
