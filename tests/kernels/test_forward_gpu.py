"""The forward megakernel on a GPU: virtual ranks against float64, against fixed placement, and against itself.

All P ranks share the GPU, each with its share of the SMs; the same kernel runs one rank a process elsewhere.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA GPU of the Hopper generation", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from megaflux_kernels.layout import Wait  # noqa: E402
from megaflux_kernels.worklist import LayerShape, Tiling  # noqa: E402

from benchmarks.layer_rig import Rig, draw_routes, virtual_rig  # noqa: E402

pytestmark = pytest.mark.gpu

LIMIT = 0.005  # relative L2; BF16 results round at 0.0024

SHAPES = {
    "one rank": LayerShape(1, 8, 0, 512, 256, 2, 300),
    "two ranks, top-8": LayerShape(2, 16, 2, 1024, 768, 8, 555),
    "clipped tiles": LayerShape(2, 8, 2, 320, 192, 4, 300),
    "rows in two pieces": LayerShape(2, 8, 2, 4096, 512, 2, 300),
    "rows in four pieces": LayerShape(2, 8, 1, 7168, 256, 2, 200),
    "eight ranks": LayerShape(8, 32, 2, 1024, 768, 8, 128),
    "gpt-oss widths": LayerShape(4, 32, 1, 2880, 2880, 4, 130),
}


def all_results(rig: Rig, tokens: list[int]) -> list[torch.Tensor]:
    torch.cuda.synchronize()
    assert rig.failures() == []
    return [rank.results[: tokens[rank.rank]].clone() for rank in rig.ranks]


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        different = (a.view(torch.int16) != b.view(torch.int16)).nonzero()
        assert len(different) == 0, f"{len(different)} of {a.numel()} values differ, first at {different[0].tolist()}"


@pytest.mark.parametrize(("name", "lag"), [*((name, Tiling.lag) for name in SHAPES), ("two ranks, top-8", 0)])
def test_results_and_combine_agree_with_float64(name, lag):
    shape = SHAPES[name]
    rig = virtual_rig(shape, tiling=Tiling(lag=lag))
    tokens = [shape.max_tokens - 7 * rank for rank in range(shape.num_ranks)]
    for seed, skew in ((1, 0.0), (2, 2.0)):
        topk = draw_routes(shape, tokens, seed, skew)
        for replicate in (False, True):
            rig.load(rig.tables(topk, rig.plan(topk, replicate)))
            rig.poison()
            rig.launch(tokens)
            torch.cuda.synchronize()
            assert rig.failures() == []
            for errors in rig.errors(topk):
                assert max(errors) < LIMIT, f"results, out: {errors}; pool, act: {rig.stage_errors(topk)}"


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.num_replica_slots])
def test_replicated_and_staged_results_equal_fixed_placement_bit_for_bit(name):
    shape = SHAPES[name]
    rig = virtual_rig(shape, seed=3)
    tokens = [shape.max_tokens] * shape.num_ranks
    topk = draw_routes(shape, tokens, seed=4, skew=1.0, hot=[0, 1])
    replicated = rig.plan(topk, True)
    assert replicated.num_replicas > 0
    seen = []
    for plan, staged in ((rig.plan(topk, False), False), (replicated, False), (replicated, True)):
        rig.load(rig.tables(topk, plan))
        rig.poison()
        rig.launch(tokens, staged=staged)
        seen.append(all_results(rig, tokens))
    assert not any(torch.isnan(results).any() for results in seen[0])
    assert_equal(seen[0], seen[1])
    assert_equal(seen[0], seen[2])


BATCHES = {
    "no tokens anywhere": ([0, 0], ()),
    "an idle rank": ([0, 77], ()),
    "one token": ([1, 0], ()),
    "every token to one expert": ([300, 300], (5,)),
    "unequal ranks": ([300, 3], (0, 1)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_unusual_batches(name):
    tokens, hot = BATCHES[name]
    shape = LayerShape(2, 8, 2, 512, 256, 1 if len(hot) == 1 else 2, 300)
    rig = virtual_rig(shape, seed=5)
    topk = draw_routes(shape, tokens, seed=6, hot=hot)
    for replicate in (False, True):
        rig.load(rig.tables(topk, rig.plan(topk, replicate)))
        rig.poison()
        rig.launch(tokens)
        torch.cuda.synchronize()
        assert rig.failures() == []
        for errors in rig.errors(topk):
            assert max(errors) < LIMIT, f"results, out: {errors}"


@pytest.mark.parametrize("name", ["two ranks, top-8", "eight ranks"])
def test_launches_with_changing_plans_repeat_their_results(name):
    shape = SHAPES[name]
    rig = virtual_rig(shape, seed=7)
    batches = []
    for seed in range(4):
        tokens = [shape.max_tokens - 11 * ((rank + seed) % 5) for rank in range(shape.num_ranks)]
        topk = draw_routes(shape, tokens, seed, skew=seed / 2)
        batches.append((tokens, rig.tables(topk, rig.plan(topk, seed % 2 == 1))))
    torch.cuda.synchronize()
    first: list[list[torch.Tensor]] = []
    differ: list[torch.Tensor] = []
    for turn in range(40):
        tokens, tables = batches[turn % 4]
        rig.load(tables)
        for i, stream in enumerate(rig.streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(np.random.default_rng(100 * turn + i).integers(50_000)))
        rig.launch(tokens)
        if turn < 4:
            first.append([])
        for i, stream in enumerate(rig.streams):
            with torch.cuda.stream(stream):
                out = rig.out[i][: tokens[i]]
                if turn < 4:
                    first[turn].append(out.clone())
                else:
                    differ.append((out != first[turn % 4][i]).any())
    torch.cuda.synchronize()
    assert rig.failures() == []
    assert not any(bool(flag) for flag in differ)


def test_a_captured_graph_replays_and_serves_other_tables():
    shape = LayerShape(1, 8, 0, 512, 256, 2, 300)
    rig = virtual_rig(shape, seed=8)
    batches = []
    for seed in range(2):
        topk = draw_routes(shape, [300], seed, skew=seed)
        batches.append(rig.tables(topk, rig.plan(topk, False)))
    expected = []
    for tables in batches:
        rig.load(tables)
        rig.launch([300])
        torch.cuda.synchronize()
        expected.append(rig.out[0].clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=rig.streams[0]):
        rig.launch([300])
    for turn in range(6):
        rig.load(batches[turn % 2])
        torch.cuda.synchronize()
        rig.out[0].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(rig.out[0], expected[turn % 2])
    assert rig.failures() == []


def test_other_ranks_may_write_origins_of_rows_until_they_start():
    shape = SHAPES["two ranks, top-8"]
    rig = virtual_rig(shape, seed=10)
    tokens = [3, 2]  # fewer tasks than CTAs: many a CTA begins with FC2
    topk = draw_routes(shape, tokens, seed=2)
    tables = rig.tables(topk, rig.plan(topk, False))
    rig.load(tables)
    rig.poison()
    live, late = rig.ranks[0].row_source, tables[0]["row_source"]
    live.fill_(-1)
    torch.cuda.synchronize()

    def launch(i: int) -> None:
        with torch.cuda.stream(rig.streams[i]):
            rig.ranks[i].next_launch()
            rig.layers[i].forward()
            rig.ranks[i].combine(rig.topk_weights[i][: tokens[i]], rig.out[i][: tokens[i]])

    launch(0)  # waits for the other rank
    writer = torch.cuda.Stream()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(2_000_000)
        live[: len(late)].copy_(late)
    writer.synchronize()
    launch(1)
    torch.cuda.synchronize()
    assert rig.failures() == []
    for errors in rig.errors(topk):
        assert max(errors) < LIMIT


def test_a_peer_that_never_starts_ends_the_launch_with_an_error_that_names_it():
    shape = SHAPES["two ranks, top-8"]
    rig = virtual_rig(shape, seed=9, timeout_s=0.3)
    tokens = [300, 300]
    topk = draw_routes(shape, tokens, seed=1)
    rig.load(rig.tables(topk, rig.plan(topk, True)))
    torch.cuda.synchronize()
    start = time.monotonic()
    with torch.cuda.stream(rig.streams[0]):
        rig.ranks[0].next_launch()
        rig.layers[0].forward()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5
    failure = rig.ranks[0].failure()
    assert failure is not None
    assert (failure.wait, failure.rank, failure.epoch) == (Wait.FORWARD_START, 1, 1)
