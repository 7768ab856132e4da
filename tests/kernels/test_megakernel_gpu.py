"""The whole layer on a GPU, planned on the device: against float64, fixed placement and the reference planner.

All P ranks are virtual ranks of one GPU; ``test_megakernel_real_ranks.py`` runs several processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA GPU of the Hopper generation", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from megaflux_kernels.layout import STALE  # noqa: E402

from megaflux_serve.config import MegaFluxConfig  # noqa: E402
from megaflux_serve.errors import CapacityError, PeerTimeoutError, UnsupportedError  # noqa: E402
from megaflux_serve.executors import kernels  # noqa: E402
from megaflux_serve.executors.megakernel import MegakernelExecutor  # noqa: E402
from megaflux_serve.layer import LayerReport  # noqa: E402
from megaflux_serve.planning.planner import plan_replicas  # noqa: E402
from megaflux_serve.workspace import Workspace  # noqa: E402
from tests.kernels.layer_cases import LIMIT, DeviceCase, assert_same_bits  # noqa: E402

pytestmark = pytest.mark.gpu

CASES = {  # E, P, s, H, I, k, tokens of the largest batch
    "one rank": DeviceCase(8, 1, 0, 512, 256, 2, 300),
    "two ranks, top-8": DeviceCase(16, 2, 2, 1024, 768, 8, 300),
    "eight ranks": DeviceCase(32, 8, 2, 1024, 768, 8, 128),
    "gpt-oss widths": DeviceCase(32, 4, 1, 2880, 2880, 4, 130),
    "odd widths, top-3": DeviceCase(10, 2, 2, 320, 192, 3, 257),
}
MODELS = {
    "Qwen3-30B-A3B": DeviceCase(128, 2, 4, 2048, 768, 8, 400),
    "Mixtral-8x7B": DeviceCase(8, 2, 1, 4096, 14336, 2, 400),
    "DeepSeek-V3-like": DeviceCase(64, 2, 4, 7168, 2048, 8, 400),
    "OLMoE": DeviceCase(64, 2, 4, 2048, 1024, 8, 400),
}


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CASES)
def test_changing_batches_agree_with_float64_and_with_fixed_placement_bit_for_bit(name):
    case = CASES[name]
    executor = MegakernelExecutor(case.num_ranks, None, case.max_tokens, timeout_s=5)
    sticky, moving, fixed = (
        case.layer(executor, MegaFluxConfig(replica_slots=slots, sticky=stays))
        for slots, stays in ((case.num_slots, True), (case.num_slots, False), (0, False))
    )
    for turn in range(6):
        batches = case.batches(turn)
        outputs = fixed.forward(batches)
        if turn < 2:
            assert max(case.errors(batches, outputs)) < LIMIT
        for layer in (sticky, moving):
            assert_same_bits(layer.forward(batches), outputs)


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_models_agree_with_float64_and_with_fixed_placement_bit_for_bit(name):
    case = MODELS[name]
    executor = MegakernelExecutor(case.num_ranks, None, case.max_tokens, timeout_s=5)
    fixed, moving = (
        case.layer(executor, MegaFluxConfig(replica_slots=slots, sticky=False)) for slots in (0, case.num_slots)
    )
    batches = case.batches(1, [400, 311])
    outputs = moving.forward(batches)
    assert moving.on_device.last_plan().num_replicas > 0
    assert max(case.errors(batches, outputs)) < LIMIT
    assert_same_bits(fixed.forward(batches), outputs)


@pytest.mark.parametrize("transfer", ["pipelined", "staged"])
@pytest.mark.parametrize(("group_blocks", "lag"), [(2, 0), (2, 5), (4, 3)])
def test_streams_of_small_groups_and_a_short_lag_give_the_same_results(monkeypatch, group_blocks, lag, transfer):
    case = CASES["two ranks, top-8"]
    config = MegaFluxConfig(replica_slots=case.num_slots, sticky=False, transfer=transfer)
    usual = case.layer(MegakernelExecutor(2, None, case.max_tokens, timeout_s=5), MegaFluxConfig(replica_slots=0))

    def small_groups(*ranks_and_sms: int) -> kernels.ForwardConfig:
        chosen = shared_config(*ranks_and_sms)
        return replace(chosen, tiling=replace(chosen.tiling, group_blocks=group_blocks, lag=lag))

    shared_config = kernels.shared_config
    monkeypatch.setattr(kernels, "shared_config", small_groups)
    layer = case.layer(MegakernelExecutor(2, None, case.max_tokens, timeout_s=5), config)
    for turn in range(6):
        batches = case.batches(turn)
        assert_same_bits(layer.forward(batches), usual.forward(batches))
    assert layer.on_device.last_plan().num_replicas > 0


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_reference_planner_s(name):
    case, reports = CASES[name], []
    executor = MegakernelExecutor(case.num_ranks, None, case.max_tokens, timeout_s=5)
    layer = case.layer(executor, MegaFluxConfig(replica_slots=case.num_slots), [reports.append])
    resident = layer.layout.no_replicas()
    for turn in range(4):
        batches = case.batches(turn)
        layer.forward(batches)
        report: LayerReport = reports[-1]
        expected = plan_replicas(case.counts(batches), layer.layout, layer.config.planner_options, resident)
        for field in ("counts", "blocks", "replica_experts", "transfers"):
            assert np.array_equal(getattr(report.plan, field), getattr(expected, field)), field
        report.plan.check()
        resident = expected.replica_experts


@pytest.mark.parametrize("tokens", [[0, 0], [0, 77], [1, 0], [300, 3]])
def test_idle_ranks_and_single_tokens(tokens):
    case = CASES["two ranks, top-8"]
    executor = MegakernelExecutor(2, None, case.max_tokens, timeout_s=5)
    layer = case.layer(executor, MegaFluxConfig(replica_slots=2))
    for turn in range(2):
        batches = case.batches(turn, tokens)
        outputs = layer.forward(batches)
        assert max(case.errors(batches, outputs)) < LIMIT
        assert [len(output) for output in outputs] == tokens


@pytest.mark.parametrize("tokens", [[300, 300], [300, 0], [1, 1]])
@pytest.mark.parametrize("expert", [0, 5])
def test_every_row_to_one_expert(tokens, expert):
    case = DeviceCase(8, 2, 2, 512, 256, 1, 300)
    executor = MegakernelExecutor(2, None, case.max_tokens, timeout_s=5)
    fixed, moving = (case.layer(executor, MegaFluxConfig(replica_slots=slots, sticky=False)) for slots in (0, 2))
    batches = [replace(batch, topk_ids=torch.full_like(batch.topk_ids, expert)) for batch in case.batches(0, tokens)]
    outputs = moving.forward(batches)
    assert max(case.errors(batches, outputs)) < LIMIT
    assert_same_bits(fixed.forward(batches), outputs)


def test_nothing_waits_for_the_host_and_a_captured_graph_serves_other_batches():
    case = CASES["one rank"]
    executor = MegakernelExecutor(1, None, case.max_tokens, timeout_s=5)
    layer = case.layer(executor, MegaFluxConfig())
    batches = [case.batches(turn, [300]) for turn in range(3)]
    expected = [layer.forward(batch)[0].clone() for batch in batches]
    with no_synchronisation():
        layer.forward(batches[0])
    live = replace(batches[0][0], hidden=batches[0][0].hidden.clone(), topk_ids=batches[0][0].topk_ids.clone())
    live = replace(live, topk_weights=live.topk_weights.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer.forward_rank(live)
    for turn in (1, 2, 0):
        (source,) = batches[turn]
        for name in ("hidden", "topk_ids", "topk_weights"):
            getattr(live, name).copy_(getattr(source, name))
        graph.replay()
        assert_same_bits([output], [expected[turn]])


@pytest.mark.parametrize("sticky", [True, False])
def test_layers_of_one_shape_share_buffers_and_replica_slots_unless_replicas_stay(sticky):
    case = CASES["two ranks, top-8"]
    executor = MegakernelExecutor(2, None, case.max_tokens, timeout_s=5)
    config, workspace = MegaFluxConfig(replica_slots=2, sticky=sticky), Workspace(2, sticky)
    first, second = (case.layer(executor, config, workspace=workspace) for _ in range(2))
    second.slots[0].home.w2.mul_(2)
    second.slots[1].home.w2.mul_(2)
    batches = [case.batches(turn) for turn in range(3)]  # the last one wants a replica
    outputs = [(first.forward(turn), second.forward(turn)) for turn in batches]  # one behind the other, not waited for
    for of_first, of_second in outputs:
        assert_same_bits(of_second, [2 * output for output in of_first])
    assert second.on_device.last_plan().num_replicas > 0
    assert first.on_device._bound.shared is second.on_device._bound.shared
    sets = 2 if sticky else 1
    assert executor.memory_use().replica_bytes == sets * 2 * 2 * 6 * case.hidden * case.intermediate


def test_new_home_weights_reach_the_replicas():
    case = CASES["two ranks, top-8"]
    executor = MegakernelExecutor(2, None, case.max_tokens, timeout_s=5)
    layer = case.layer(executor, MegaFluxConfig(replica_slots=2))
    batches = case.batches(4)
    before = layer.forward(batches)
    assert layer.on_device.last_plan().num_replicas > 0
    for slots in layer.slots:
        slots.home.w2.mul_(2)
    layer.weights_updated()
    assert_same_bits(layer.forward(batches), [2 * output for output in before])


def test_one_rank_with_new_weights_makes_every_rank_forget():
    case, reports = CASES["two ranks, top-8"], []
    executor = MegakernelExecutor(2, None, case.max_tokens, timeout_s=5)
    layer = case.layer(executor, MegaFluxConfig(replica_slots=2), [reports.append])
    fixed = case.layer(executor, MegaFluxConfig(replica_slots=0))
    batches = case.batches(4)  # a replica of an expert of rank 0
    for _ in range(2):
        layer.forward(batches)
    held = reports[0].plan.transfers
    assert len(held) > 0
    assert len(reports[1].plan.transfers) == 0
    for one in (layer, fixed):
        one.slots[0].home.w2.mul_(2)  # replicas of rank 0's experts are on rank 1
    layer.on_device.resident[0].fill_(STALE)
    assert_same_bits(layer.forward(batches), fixed.forward(batches))
    assert np.array_equal(reports[2].plan.transfers, held)
    assert torch.equal(layer.on_device.resident[0], layer.on_device.resident[1])


def test_a_batch_larger_than_the_buffers_is_refused():
    case = CASES["one rank"]
    layer = case.layer(MegakernelExecutor(1, None, case.max_tokens), MegaFluxConfig())
    with pytest.raises(CapacityError, match=r"301 rows.*max_tokens = 300"):
        layer.forward(case.batches(0, [301]))


def test_a_shape_that_the_kernels_cannot_serve_is_refused_with_the_field():
    case = DeviceCase(8, 1, 0, 520, 256, 2, 300)
    with pytest.raises(UnsupportedError, match="hidden = 520"):
        case.layer(MegakernelExecutor(1, None, case.max_tokens), MegaFluxConfig())


def test_a_failed_wait_of_an_earlier_batch_is_raised_with_rank_and_phase():
    case = CASES["one rank"]
    layer = case.layer(MegakernelExecutor(1, None, case.max_tokens, timeout_s=5), MegaFluxConfig())
    batches = case.batches(0)
    layer.forward(batches)
    error = layer.on_device._bound.shared.forward[0].error
    error[:4] = torch.tensor([5, 0, 3, 1], dtype=torch.int32)  # as a wait for the rows of block 3 leaves it
    layer.forward(batches)
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeoutError, match="rank 0 did not answer within 5 s: phase rows, slot 3"):
        layer.forward(batches)
