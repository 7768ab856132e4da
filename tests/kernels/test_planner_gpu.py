"""The device planner on a GPU: equal to the reference, twice; stable over batches; bounded when a peer is missing."""

from __future__ import annotations

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA GPU of the Hopper generation", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from megaflux_kernels.layout import SearchShape, ShapeError, Wait  # noqa: E402
from megaflux_kernels.planner_buffers import launch_planner  # noqa: E402
from megaflux_kernels.planner_map import PlannerShape  # noqa: E402
from megaflux_kernels.worklist import LayerShape  # noqa: E402

from benchmarks.bench_planner_equality import differing_batch  # noqa: E402
from benchmarks.planner_cases import expected_tables, first_difference, groups  # noqa: E402
from benchmarks.planner_rig import make_rig, plan_group, planner_shape  # noqa: E402
from megaflux_serve.planning import planner  # noqa: E402
from megaflux_serve.routing import expert_counts  # noqa: E402
from megaflux_serve.slots import SlotLayout  # noqa: E402

pytestmark = pytest.mark.gpu

EXPERTS, RANKS, SLOTS, TOP_K, TOKENS = 32, 4, 2, 4, 1500


def random_ids(rng, num_tokens: int, skew: float) -> np.ndarray:
    scores = rng.random((num_tokens, EXPERTS)) + skew * np.linspace(0, 1, EXPERTS)
    return np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)


@pytest.fixture
def rig():
    layer = LayerShape(RANKS, EXPERTS, SLOTS, 512, 384, TOP_K, TOKENS)
    return make_rig(planner_shape(SearchShape(EXPERTS, RANKS, SLOTS), TOP_K, TOKENS, RANKS), layer=layer)


@pytest.mark.parametrize("shape", [(8, 2, 1), (64, 8, 2), (256, 8, 8), (144, 72, 2)])
def test_plans_of_given_counts_equal_the_reference_and_a_second_run(shape):
    for group in groups(shape, 10, seed=3):
        plans, held = plan_group(group)
        again, _ = plan_group(group)
        layout = SearchShape(*shape).plan
        for case in range(len(plans)):
            expected = expected_tables(group.plan(case), case % shape[1], case + 1)
            assert first_difference(expected, layout.split(plans[case])) is None
            assert first_difference(expected, layout.split(again[case])) is None
            assert np.array_equal(held[case], expected["replica_experts"])


def test_batches_with_changing_plans_zero_rows_and_kept_copies_equal_the_reference(rig):
    rng, layout = np.random.default_rng(5), SlotLayout(EXPERTS, RANKS, SLOTS)
    held = layout.no_replicas()
    sizes = [(TOKENS,) * 4, (0, 0, 0, 0), (0, 1, TOKENS, 700), (TOKENS, 0, 0, 0), (31, 32, 33, 1)]
    for launch, tokens in enumerate(sizes, start=1):
        ids = [random_ids(rng, num, skew=0.5 * launch) for num in tokens]
        rig.load(ids)
        rig.launch()
        rig.assert_no_failure()
        plan = planner.plan_replicas(np.stack([expert_counts(i, EXPERTS) for i in ids]), layout, resident=held)
        held = plan.replica_experts
        assert differing_batch(rig, plan, ids, rig.tables[0].layer, launch) is None


def test_a_chunk_of_more_tokens_than_one_pass_holds_is_routed_in_passes():
    experts, ranks, top_k, tokens, chunks = 8, 2, 2, 9000, 2
    shape = PlannerShape(SearchShape(experts, ranks, 1), top_k, tokens, chunks)
    assert tokens > chunks * shape.pass_tokens
    layer = LayerShape(ranks, experts, 1, 512, 384, top_k, tokens)
    rig, rng = make_rig(shape, layer=layer), np.random.default_rng(9)
    ids = [np.argsort(rng.random((num, experts)), axis=1)[:, :top_k].astype(np.int32) for num in (tokens, tokens - 1)]
    rig.load(ids)
    rig.launch()
    rig.assert_no_failure()
    counts = np.stack([expert_counts(i, experts) for i in ids])
    plan = planner.plan_replicas(counts, SlotLayout(experts, ranks, 1))
    assert differing_batch(rig, plan, ids, layer, 1) is None


def test_a_graph_replays_with_new_inputs_and_launch_numbers(rig):
    rng, layout = np.random.default_rng(6), SlotLayout(EXPERTS, RANKS, SLOTS)
    rig.load([random_ids(rng, TOKENS, 0.0)] * RANKS)
    rig.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.launch()
    for launch in (2, 3, 4):
        ids = [random_ids(rng, int(rng.integers(1, TOKENS)), 2.0) for _ in range(RANKS)]
        rig.load(ids)
        rig.resident.fill_(-1)
        graph.replay()
        rig.assert_no_failure()
        plan = planner.plan_replicas(np.stack([expert_counts(i, EXPERTS) for i in ids]), layout)
        assert differing_batch(rig, plan, ids, rig.tables[0].layer, launch) is None


def test_a_peer_that_never_launches_ends_the_wait_and_is_named(rig):
    rig.load([random_ids(np.random.default_rng(7), TOKENS, 0.0)] * RANKS)
    start = time.monotonic()
    launch_planner(
        rig.ranks[1:2], rig.topk_ids[1:2], rig.num_tokens[1:2], rig.resident[1:2].contiguous(), timeout_s=0.2
    )
    failure = rig.ranks[1].failure()
    assert time.monotonic() - start < 5
    assert (failure.wait, failure.rank in (0, 2, 3), failure.slot, failure.epoch) == (Wait.COUNTS, True, 1, 1)


def test_wrong_buffers_are_refused_before_anything_is_launched(rig):
    good = (rig.topk_ids, rig.num_tokens, rig.resident)
    bad = {
        "topk_ids": (rig.topk_ids.long(), *good[1:]),
        "num_tokens": (good[0], rig.num_tokens[:2].contiguous(), good[2]),
        "resident": (*good[:2], rig.resident.cpu()),
        "ranks": (rig.topk_ids[:2], rig.num_tokens[:2], rig.resident[:2]),
    }
    for name, tensors in bad.items():
        with pytest.raises(ShapeError, match=f"^{name} = "):
            launch_planner(rig.ranks[::2] if name == "ranks" else rig.ranks, *tensors)


def test_memory_of_another_number_of_ranks_is_refused(rig):
    from megaflux_kernels.planner_buffers import PlannerBuffers

    shape = PlannerShape(SearchShape(EXPERTS, 2, SLOTS), TOP_K, TOKENS, 4)
    with pytest.raises(ShapeError, match="the 2 ranks compiled for"):
        PlannerBuffers(shape, rig.ranks[0].memory)
