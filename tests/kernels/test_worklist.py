"""The forward kernel's tables, executed in numpy by the kernel's rules, one task and one pull at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megaflux_kernels.layout import ShapeError
from megaflux_kernels.worklist import (
    BLOCK_ROWS,
    CLUSTER,
    SOURCE_SHIFT,
    Counters,
    ForwardWork,
    Kind,
    LayerShape,
    Tiling,
    WorkHeader,
    forward_work,
    task_stream,
    unpack_task,
    work_bounds,
)

from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.planner import plan_replicas
from megaflux_serve.planning.routes import map_blocks, source_routes
from megaflux_serve.routing import expert_counts
from megaflux_serve.slots import SlotLayout

SMALL = LayerShape(
    num_ranks=2, num_experts=8, num_replica_slots=2, hidden=512, intermediate=192, top_k=2, max_tokens=700
)
SHAPES = {
    "two ranks": (SMALL, Tiling(group_blocks=4, lag=20)),
    "eight ranks, top-8": (LayerShape(8, 32, 1, 4608, 320, 8, 200), Tiling(group_blocks=3, lag=0)),
    "one rank, top-1": (LayerShape(1, 4, 0, 128, 64, 1, 500), Tiling(lag=7)),
    "three ranks, every expert": (LayerShape(3, 6, 1, 192, 64, 6, 90), Tiling(group_blocks=1, lag=1000)),
}


def draw_topk(rng: np.random.Generator, shape: LayerShape, tokens: int, skew: float) -> np.ndarray:
    """int64 [tokens, k] distinct ids; ``skew`` spreads the experts' popularity."""
    score = rng.gumbel(size=(tokens, shape.num_experts)) + skew * rng.normal(size=shape.num_experts)
    return np.argsort(-score, axis=1)[:, : shape.top_k]


def all_work(
    shape: LayerShape, tiling: Tiling, topk: list[np.ndarray]
) -> tuple[ReplicaPlan, list[ForwardWork], list[np.ndarray]]:
    """Plan of one batch, and of every rank the tables and the blocks a slot."""
    layout = SlotLayout(shape.num_experts, shape.num_ranks, shape.num_replica_slots)
    plan = plan_replicas(np.stack([expert_counts(ids, shape.num_experts) for ids in topk]), layout)
    blocks = map_blocks(plan)
    routes = [source_routes(plan, blocks, rank, ids) for rank, ids in enumerate(topk)]
    work, per_slot = [], []
    for rank in range(shape.num_ranks):
        per_slot.append(np.bincount(blocks.slot[blocks.rank == rank], minlength=shape.slots))
        moved = [
            (layout.home_rank[e], layout.home_index[e], layout.experts_per_rank + slot, e)
            for e, to, slot in plan.transfers
            if to == rank
        ]
        work.append(
            forward_work(
                rank,
                1,
                shape,
                tiling,
                per_slot[-1],
                [r.rank for r in routes],
                [r.pool_row(BLOCK_ROWS) for r in routes],
                np.array(moved, dtype=np.int32).reshape(-1, 4),
            )
        )
    return plan, work, per_slot


def pull_rows(shape: LayerShape, work: ForwardWork) -> tuple[np.ndarray, np.ndarray, int]:
    """Walk the pool as the pull warps do: (source of every pool row written, rows ready a block, rows that crossed)."""
    num_blocks = int(work.header[WorkHeader.NUM_BLOCKS])
    written = np.full(num_blocks * BLOCK_ROWS, -1, dtype=np.int64)
    ready = np.zeros(num_blocks, dtype=np.int64)
    crossed = 0
    everywhere = work.places.tolist()
    for row, code in enumerate(work.row_source.tolist()):
        if code < 0:
            ready[row // BLOCK_ROWS] += shape.pieces_per_row
            continue
        source, token = code >> SOURCE_SHIFT, (code & ((1 << SOURCE_SHIFT) - 1)) // shape.top_k
        places = [place for place in everywhere[source][token] if place >= 0]
        if min(places) < row:
            continue
        crossed += 1
        assert (written[places] == -1).all(), "a pool row is written twice"
        written[places] = source << SOURCE_SHIFT | token
        for place in places:
            ready[place // BLOCK_ROWS] += shape.pieces_per_row
    return written, ready, crossed


def run_tasks(shape: LayerShape, tiling: Tiling, work: ForwardWork, block_slot: np.ndarray) -> None:
    """Claim the stream in order; every wait must be met by an earlier task, every tile computed once."""
    tiles = {Kind.FC1: tiling.fc1_tiles(shape), Kind.FC2: tiling.fc2_tiles(shape)}
    done = {kind: np.zeros((block_slot.size, n), dtype=int) for kind, n in tiles.items()}
    slots, arriving = block_slot.tolist(), set(work.transfers[:, 2].tolist())
    for word in work.tasks.tolist():
        kind, block, tile, slot, share, gated = unpack_task(word)
        assert gated == (slot in arriving)
        for c in range(CLUSTER):
            b, n = block + c * (not share), tile + c * share
            assert slots[b] == slot
            assert kind == Kind.FC1 or done[Kind.FC1][b].all(), "FC2 claimed before all of its block's FC1"
            if n < tiles[kind]:
                done[kind][b, n] += 1
            else:
                assert share, "only the second tile of a single block may lie beyond the end"
    assert all((count == 1).all() for count in done.values())


def check(shape: LayerShape, tiling: Tiling, topk: list[np.ndarray]) -> None:
    plan, work, per_slot = all_work(shape, tiling, topk)
    bounds = work_bounds(shape, tiling)
    computed: set[tuple[int, int]] = set()
    for rank, (w, blocks_per_slot) in enumerate(zip(work, per_slot, strict=True)):
        num_blocks = int(w.header[WorkHeader.NUM_BLOCKS])
        assert num_blocks == plan.loads[rank] <= bounds.max_blocks
        assert w.tasks.size == w.header[WorkHeader.NUM_TASKS] <= bounds.max_tasks
        assert len(w.transfers) == w.header[WorkHeader.NUM_TRANSFERS] <= bounds.max_transfers
        written, ready, crossed = pull_rows(shape, w)
        assert (ready == shape.rows_need).all()
        valid = w.row_source >= 0
        assert (written[~valid] == -1).all()
        source, assignment = w.row_source[valid] >> SOURCE_SHIFT, w.row_source[valid] & ((1 << SOURCE_SHIFT) - 1)
        assert np.array_equal(written[valid], source << SOURCE_SHIFT | assignment // shape.top_k)
        tokens = set(zip(source.tolist(), (assignment // shape.top_k).tolist(), strict=True))
        assert crossed == len(tokens), "a token crosses once for each destination rank"
        block_slot = np.repeat(np.arange(shape.slots), blocks_per_slot)
        table = plan.layout.slot_to_expert(plan.replica_experts)[rank]
        row_slot = np.repeat(block_slot, BLOCK_ROWS)[valid]
        for s, a, slot in zip(source.tolist(), assignment.tolist(), row_slot.tolist(), strict=True):
            assert topk[s].reshape(-1)[a] == table[slot]
            assert (s, a) not in computed
            computed.add((s, a))
        replica_slots = set(block_slot[block_slot >= shape.home_slots].tolist())
        assert {int(t[2]) for t in w.transfers} == replica_slots, (
            "without residents every replica in use is transferred"
        )
        for home, home_slot, slot, expert in w.transfers:
            assert (plan.layout.home_rank[expert], plan.layout.home_index[expert]) == (home, home_slot)
            assert table[slot] == expert
        run_tasks(shape, tiling, w, block_slot)
    assert len(computed) == sum(ids.size for ids in topk)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), skew=st.sampled_from([0.0, 1.0, 3.0]), empty=st.booleans())
def test_every_row_arrives_and_is_computed_once_and_no_task_waits_for_a_later_one(name, seed, skew, empty):
    shape, tiling = SHAPES[name]
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, shape.max_tokens + 1, size=shape.num_ranks)
    if empty:
        tokens[rng.integers(shape.num_ranks)] = 0
    check(shape, tiling, [draw_topk(rng, shape, int(n), skew) for n in tokens])


def test_a_launch_without_tokens_has_no_tasks_and_no_blocks():
    _, work, _ = all_work(SMALL, Tiling(), [np.empty((0, 2), dtype=np.int64)] * 2)
    assert all(w.header.tolist() == [0, 0, 0, 1, 0, 0, 0, 0] and w.tasks.size == 0 for w in work)


def test_bounds_hold_when_every_token_goes_to_one_rank():
    ids = np.tile(np.array([[0, 1]]), (SMALL.max_tokens, 1))
    shape = LayerShape(2, 8, 0, 512, 192, 2, SMALL.max_tokens)
    _, work, _ = all_work(shape, Tiling(), [ids, ids])
    bounds = work_bounds(shape)
    assert work[0].header[WorkHeader.NUM_BLOCKS] == 2 * (2 * SMALL.max_tokens // BLOCK_ROWS + 1) <= bounds.max_blocks
    assert bounds.max_blocks <= 2 * (2 * SMALL.max_tokens // BLOCK_ROWS + 1) + shape.slots
    assert work[0].tasks.size <= bounds.max_tasks


def test_the_stream_lags_fc2_behind_fc1_by_at_least_lag_words_where_there_are_as_many():
    tiling = Tiling(group_blocks=8, lag=50)
    stream = task_stream(np.array([17, 0, 5, 9]), (), SMALL, tiling)
    kinds = np.array([unpack_task(int(word))[0] for word in stream])
    fc1_before = np.cumsum(kinds == Kind.FC1)
    last_fc1, first_fc2 = {}, {}
    for i, word in enumerate(stream):
        kind, block, _, slot, _, _ = unpack_task(int(word))
        if kind == Kind.FC1:
            last_fc1[slot, block // 8] = fc1_before[i]
        else:
            first_fc2.setdefault((slot, block // 8), fc1_before[i])
    assert all(first_fc2[g] >= min(last_fc1[g] + tiling.lag, fc1_before[-1]) for g in first_fc2)


def test_rows_cross_in_equal_pieces_of_whole_16_byte_words():
    for hidden, pieces in ((64, 1), (2048, 1), (2880, 2), (4096, 2), (7168, 4), (6208, 4)):
        shape = LayerShape(1, 1, 0, hidden, 64, 1, 1)
        assert (shape.pieces_per_row, shape.piece_bytes * pieces) == (pieces, 2 * hidden)
        assert shape.piece_bytes % 16 == 0
        assert shape.w1_pieces * shape.piece_bytes == 4 * hidden * 64
        assert shape.w2_pieces * shape.piece_bytes == 2 * hidden * 64


def test_counters_of_blocks_and_slots_do_not_overlap():
    counters = Counters(max_blocks=10, num_replica_slots=3)
    assert (counters.act_ready, counters.rows_ready, counters.weights_ready, counters.size) == (4, 14, 24, 30)


@pytest.mark.parametrize(
    ("field", "value"), [("num_ranks", 0), ("hidden", 100), ("intermediate", 0), ("top_k", 17), ("max_tokens", 1 << 23)]
)
def test_a_shape_that_the_kernel_cannot_serve_is_refused_by_name(field, value):
    fields = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    with pytest.raises(ShapeError, match=field):
        LayerShape(**{**fields, field: value})
