"""The slot numbering: bijections between logical experts and slots, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflux_serve.errors import ConfigError
from megaflux_serve.slots import SlotLayout


@st.composite
def layouts_with_replicas(draw: st.DrawFn) -> tuple[SlotLayout, np.ndarray]:
    num_ranks, per_rank, num_slots = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    home = draw(st.permutations([r for r in range(num_ranks) for _ in range(per_rank)]))
    layout = SlotLayout(num_ranks * per_rank, num_ranks, num_slots, np.array(home))
    replicas = layout.no_replicas()
    for rank in range(num_ranks):
        away = [e for e in range(layout.num_experts) if layout.home_rank[e] != rank]
        held = draw(st.lists(st.sampled_from(away), unique=True, max_size=num_slots)) if away else []
        replicas[rank, : len(held)] = held
    return layout, replicas


@given(layouts_with_replicas())
def test_slot_tables_are_inverse_to_each_other(case: tuple[SlotLayout, np.ndarray]) -> None:
    layout, replicas = case
    experts, indices = layout.slot_to_expert(replicas), layout.expert_to_index(replicas)
    for rank in range(layout.num_ranks):
        for index in range(layout.slots_per_rank):
            if experts[rank, index] >= 0:
                assert indices[experts[rank, index], rank] == index
    assert (indices >= 0).sum() == (experts >= 0).sum() == layout.num_experts + (replicas >= 0).sum()


@given(layouts_with_replicas())
def test_home_slots_come_first_in_increasing_expert_id(case: tuple[SlotLayout, np.ndarray]) -> None:
    layout, replicas = case
    for rank in range(layout.num_ranks):
        owned = [e for e in range(layout.num_experts) if layout.home_rank[e] == rank]
        assert layout.home_experts(rank).tolist() == owned
        assert layout.slot_to_expert(replicas)[rank, : layout.experts_per_rank].tolist() == owned


def test_the_default_home_map_is_contiguous() -> None:
    assert SlotLayout(8, 4, 0).home_rank.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_layouts_are_equal_where_all_their_numbers_and_homes_are() -> None:
    layout, homes = SlotLayout(4, 2, 1), np.array([0, 1, 0, 1])
    assert {layout: "buffers"}[SlotLayout(4, 2, 1, np.array([0, 0, 1, 1]))] == "buffers"
    others = SlotLayout(4, 2, 2), SlotLayout(4, 1, 1), SlotLayout(6, 2, 1), SlotLayout(4, 2, 1, homes), "layout"
    assert [layout == other for other in others] == [False] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, 0), r"num_ranks = 4 is not allowed; allowed: a divisor of the 10 experts"),
        ((8, 0, 0), r"num_ranks = 0 is not allowed"),
        ((0, 1, 0), r"num_experts = 0 is not allowed"),
        ((8, 4, -1), r"replica_slots = -1 is not allowed"),
        ((4, 2, 0, np.array([0, 0, 0, 1])), r"home_rank = .* exactly 2 experts on every rank"),
        ((4, 2, 0, np.array([0, 0, 1, 2])), r"home_rank = .* ranks 0 to 1"),
        ((4, 2, 0, np.array([0, 0, 1, -1])), r"home_rank = .* ranks 0 to 1"),
        ((4, 2, 0, np.array([0, 1])), r"home_rank = \(2,\) is not allowed; allowed: shape \(4,\)"),
    ],
)
def test_an_impossible_layout_is_refused_by_name(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlotLayout(*arguments)
