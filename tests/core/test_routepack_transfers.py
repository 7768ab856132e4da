"""Which experts move between two placements, and that steps never lose one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflux_serve.errors import CapacityError, ConfigError, InputError
from megaflux_serve.routepack import TransferPlan
from megaflux_serve.routepack.placement import Placement

BYTES = 10


@st.composite
def plans(draw: st.DrawFn) -> TransferPlan:
    """Two placements of a few layers, which may be equal in some."""
    ranks, per_rank, layers = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    permutation = st.permutations(range(ranks * per_rank))
    before = [draw(permutation) for _ in range(layers)]
    after = [draw(st.one_of(st.just(row), permutation)) for row in before]
    return TransferPlan(Placement.of(before, ranks), Placement.of(after, ranks))


def whole_layers(plan: TransferPlan) -> int:
    """The least staging that one layer at a time needs."""
    return max(1, int(plan.traffic().staged.max())) * BYTES


@given(plans(), st.integers(0, 3))
def test_steps_bring_every_expert_to_its_slot_and_leave_layers_whole(plan: TransferPlan, more: int) -> None:
    held = plan.before.experts.copy()
    for step in plan.steps(BYTES, whole_layers(plan) + more * BYTES):
        layer, expert, old, new = step.T
        assert (held[layer, old] == expert).all()  # nothing that a step reads was overwritten by an earlier one
        held[layer, new] = expert
        is_before = (held == plan.before.experts).all(axis=1)
        is_after = (held == plan.after.experts).all(axis=1)
        assert (is_before | is_after).all()
        assert is_after[np.unique(layer)].all()
    assert (held == plan.after.experts).all()


@given(plans(), st.integers(0, 3))
def test_no_rank_stages_more_than_it_may(plan: TransferPlan, more: int) -> None:
    limit = whole_layers(plan) + more * BYTES
    for step in plan.steps(BYTES, limit):
        assert np.bincount(plan.ranks(step)[1]).max() * BYTES <= limit


@given(plans())
def test_a_layer_that_does_not_fit_is_refused_with_what_it_needs(plan: TransferPlan) -> None:
    if len(plan.moves) == 0:
        assert plan.steps(BYTES, 0) == plan.steps(BYTES) == []
        return
    needed = whole_layers(plan)
    for step, same in zip(plan.steps(BYTES), plan.steps(BYTES, needed), strict=True):
        assert np.array_equal(step, same)
    with pytest.raises(CapacityError, match=f"staging_bytes = {needed - 1}: layer .* allowed: at least {needed}"):
        plan.steps(BYTES, needed - 1)


@given(plans())
def test_traffic_counts_every_move_once(plan: TransferPlan) -> None:
    traffic = plan.traffic()
    assert traffic.sent.sum() == traffic.received.sum()
    assert traffic.sent.sum() + traffic.local.sum() == len(plan.moves)
    assert len(plan.moves) == plan.after.moved_from(plan.before).sum()
    assert (traffic.staged <= plan.before.experts_per_rank).all()


@given(plans())
def test_the_expert_in_a_slot_is_the_inverse_of_the_slot_of_an_expert(plan: TransferPlan) -> None:
    placement = plan.after
    found = np.take_along_axis(placement.slots, placement.experts, axis=1)
    assert (found == np.arange(placement.slots.shape[1])).all()


def test_placements_that_do_not_fit_together_are_refused() -> None:
    before = Placement.identity(2, 8, 4)
    for other in (Placement.identity(3, 8, 4), Placement.identity(2, 8, 2), Placement.identity(2, 4, 4)):
        with pytest.raises(
            InputError, match=r"after: has .*; allowed: 4 ranks, layers and experts \(2, 8\), as before"
        ):
            TransferPlan(before, other)
    with pytest.raises(ConfigError, match="expert_bytes = 0"):
        TransferPlan(before, before).steps(0, 1)
