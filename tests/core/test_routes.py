"""Blocks mapped to routed assignments: the rules of appendix A against lists of tuples, and their consequences."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from numpy.typing import NDArray

from megaflux_serve.planning.plan import ReplicaPlan, fixed_plan
from megaflux_serve.planning.routes import map_blocks, pool_tokens, rank_pool, source_routes
from megaflux_serve.slots import SlotLayout
from tests.core.moe_cases import routed_plans

Routed = tuple[ReplicaPlan, list[NDArray[np.int64]]]


def slow_routes(
    plan: ReplicaPlan, ids: list[NDArray[np.int64]]
) -> dict[tuple[int, int, int], tuple[int, int, int, int]]:
    """{(source, token, position): (rank, slot, block position, row)} by the text of the paper, in plain lists."""
    layout = plan.layout
    blocks = []  # (rank, slot, number, rows)
    for expert in range(layout.num_experts):
        rows = [
            (source, token, position)
            for source in range(layout.num_ranks)
            for token, position in product(range(len(ids[source])), range(ids[source].shape[1]))
            if ids[source][token, position] == expert
        ]
        cut = [rows[at : at + plan.block_rows] for at in range(0, len(rows), plan.block_rows)]
        ranks = [rank for rank in range(layout.num_ranks) for _ in range(plan.blocks[expert, rank])]
        for number, (rank, block) in enumerate(zip(ranks, cut, strict=True)):
            if rank == layout.home_rank[expert]:
                slot = list(layout.home_experts(rank)).index(expert)
            else:
                slot = layout.experts_per_rank + list(plan.replica_experts[rank]).index(expert)
            blocks.append((rank, slot, number, block))
    routes = {}
    for rank in range(layout.num_ranks):
        pool = sorted((slot, number, block) for at, slot, number, block in blocks if at == rank)
        for position, (slot, _, block) in enumerate(pool):
            for row, assignment in enumerate(block):
                routes[assignment] = (rank, slot, position, row)
    return routes


@settings(max_examples=150, derandomize=True, deadline=None)
@given(routed_plans())
def test_every_assignment_goes_where_the_paper_says(routed: Routed) -> None:
    plan, ids = routed
    blocks, expected = map_blocks(plan), slow_routes(plan, ids)
    assert len(expected) == plan.counts.sum()
    for source, own in enumerate(ids):
        routes = source_routes(plan, blocks, source, own)
        for token, position in np.ndindex(*own.shape):
            at = (token, position)
            found = routes.rank[at], routes.slot[at], routes.position[at], routes.row[at]
            assert found == expected[source, token, position]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(routed_plans())
def test_a_pool_knows_the_source_of_each_of_its_rows(routed: Routed) -> None:
    plan, ids = routed
    blocks, expected = map_blocks(plan), slow_routes(plan, ids)
    seen = {}
    for rank in range(plan.layout.num_ranks):
        pool = rank_pool(plan, blocks, rank)
        assert pool.num_rows.sum() == pool.pool_row.size == plan.rows()[:, rank].sum()
        held = plan.layout.slot_to_expert(plan.replica_experts)[rank]
        assert np.array_equal(held[pool.slot], pool.expert)
        token, position = pool_tokens(plan, pool, ids)
        for source, t, p, pool_row in zip(pool.source, token, position, pool.pool_row, strict=True):
            block, row = divmod(int(pool_row), plan.block_rows)
            seen[int(source), int(t), int(p)] = (rank, pool.slot[block], block, row)
    assert seen == expected


@settings(max_examples=100, derandomize=True, deadline=None)
@given(routed_plans())
def test_blocks_hold_the_same_rows_whatever_is_replicated(routed: Routed) -> None:
    plan, ids = routed

    def contents(of: ReplicaPlan) -> set[tuple[int, tuple[tuple[int, int, int], ...]]]:
        blocks, found = map_blocks(of), set()
        for rank in range(of.layout.num_ranks):
            pool = rank_pool(of, blocks, rank)
            rows = list(zip(pool.source.tolist(), *(a.tolist() for a in pool_tokens(of, pool, ids)), strict=True))
            ends = np.cumsum(pool.num_rows).tolist()
            for expert, start, end in zip(pool.expert.tolist(), [0, *ends], ends, strict=False):
                found.add((expert, tuple(rows[start:end])))
        return found

    assert contents(plan) == contents(fixed_plan(plan.counts, plan.layout, plan.block_rows))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(routed_plans())
def test_rows_leave_a_source_in_the_order_in_which_the_pool_holds_them(routed: Routed) -> None:
    """The staged executor sends rows without indices: both sides must sort alike."""
    plan, ids = routed
    blocks = map_blocks(plan)
    routes = [source_routes(plan, blocks, source, own) for source, own in enumerate(ids)]
    for rank in range(plan.layout.num_ranks):
        pool = rank_pool(plan, blocks, rank)
        for source, own in enumerate(routes):
            sent = np.sort(own.pool_row(plan.block_rows)[own.rank == rank])
            assert np.array_equal(sent, pool.pool_row[pool.source == source])


def test_two_ranks_by_hand() -> None:
    """E = 2, P = 2, block_rows 2; expert 0 has 5 rows: two blocks stay at home, the partial one goes to rank 1."""
    layout = SlotLayout(2, 2, 1)
    ids = [np.array([[0], [1], [0]]), np.array([[0], [0], [0]])]
    counts = np.array([[2, 1], [3, 0]])
    plan = ReplicaPlan(
        layout,
        2,
        counts,
        blocks=np.array([[2, 1], [0, 1]], np.int32),
        replica_experts=np.array([[-1], [0]], np.int32),
        transfers=np.array([[0, 1, 0]], np.int32),
        candidate=0,
    )
    blocks = map_blocks(plan)
    assert blocks.expert.tolist() == [0, 0, 0, 1]
    assert blocks.rank.tolist() == [0, 0, 1, 1]
    assert blocks.slot.tolist() == [0, 0, 1, 0]
    assert blocks.position.tolist() == [0, 1, 1, 0]
    assert blocks.num_rows.tolist() == [2, 2, 1, 1]
    second = source_routes(plan, blocks, 1, ids[1])
    assert second.rank.ravel().tolist() == [0, 0, 1]
    assert second.position.ravel().tolist() == [1, 1, 1]
    assert second.row.ravel().tolist() == [0, 1, 0]
    pool = rank_pool(plan, blocks, 1)
    assert pool.pool_row.tolist() == [0, 2]
    assert pool.source.tolist() == [0, 1]
    assert pool.nth.tolist() == [0, 2]
