"""Totals that the device adds: the reference's words, with and without a gate, and while a graph is captured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA GPU of the Hopper generation", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from megaflux_kernels.totals_map import Total  # noqa: E402

from megaflux_serve.config import MegaFluxConfig  # noqa: E402
from megaflux_serve.executors.megakernel import MegakernelExecutor  # noqa: E402
from megaflux_serve.layer import ReplicatedMoE  # noqa: E402
from megaflux_serve.metrics.meter import Meter  # noqa: E402
from megaflux_serve.metrics.snapshot import Worker, read_snapshots  # noqa: E402
from megaflux_serve.planning.gate import GateCosts, apply_gate  # noqa: E402
from megaflux_serve.planning.planner import plan_replicas  # noqa: E402
from megaflux_serve.planning.totals import LayerTotals  # noqa: E402
from megaflux_serve.routing import RoutingBatch  # noqa: E402
from tests.kernels.layer_cases import DeviceCase  # noqa: E402

pytestmark = pytest.mark.gpu

CASE = DeviceCase(32, 4, 2, 512, 256, 4, 300)
GATES = (None, GateCosts(block_ns=1000, replica_ns=2500, plan_ns=500, hidden_permille=0))
TIMES = ("planner_time", "layer_time")
CLOCKS = (Total.PLANNER_NS, Total.LAYER_NS, Total.STARTED, Total.FINISHED)


def meter_of(executor: MegakernelExecutor, *layers: ReplicatedMoE) -> Meter:
    meter = Meter(Worker("vllm", "0", "case", 0, executor.num_ranks, "megakernel", True, False), executor)
    for layer in layers:
        meter.watch(layer, CASE.top_k)
    return meter


def assert_equals(totals: np.ndarray, expected: LayerTotals) -> dict[str, np.ndarray]:
    """All regions but times are the reference's; returns the regions."""
    regions, wanted = expected.map.split(totals.copy()), expected.map.split(expected.words)
    for name in wanted:
        if name not in TIMES:
            clocks = list(CLOCKS) if name == "sums" else []
            assert np.array_equal(np.delete(regions[name], clocks), np.delete(wanted[name], clocks)), name
    return regions


@pytest.mark.parametrize("gate", GATES, ids=["no gate", "gate"])
def test_words_are_those_of_the_reference(gate):
    executor = MegakernelExecutor(CASE.num_ranks, None, CASE.max_tokens, timeout_s=5)
    layer = CASE.layer(executor, MegaFluxConfig(replica_slots=CASE.num_slots, gate=gate))
    meter, expected, resident = meter_of(executor, layer), LayerTotals(4, 32), layer.layout.no_replicas()
    sizes = [None, None, [0, 0, 0, 0], [1, 0, 0, 0], [300, 0, 7, 1], None, None, None, None]
    for turn, tokens in enumerate(sizes):
        batches = CASE.batches(turn, tokens)
        layer.forward(batches)
        plan = plan_replicas(CASE.counts(batches), layer.layout, layer.config.planner_options, resident)
        plan = plan if gate is None else apply_gate(plan, gate, resident)
        resident = plan.replica_experts
        expected.add(plan)
    torch.cuda.synchronize()
    (totals,) = meter.snapshot().totals
    regions = assert_equals(totals, expected)
    sums = regions["sums"]
    assert sums[Total.REPLICATED] > 0
    assert (sums[Total.REFUSED] > 0) == (gate is not None)
    assert regions["planner_time"].sum() == len(sizes)
    assert regions["layer_time"].sum() == len(sizes) - 2  # the empty batch has no end, the last one is added later
    assert 1e3 < sums[Total.PLANNER_NS] / len(sizes) < 1e8
    assert sums[Total.LAYER_NS] / (len(sizes) - 2) > 1e4
    for rank in range(1, CASE.num_ranks):  # every rank adds the same plan
        assert_equals(layer.on_device.totals[rank].cpu().numpy(), expected)


def test_a_graph_adds_at_every_replay_and_copies_go_on_while_it_is_captured(tmp_path):
    case = replace(CASE, num_ranks=1, num_slots=0)
    executor = MegakernelExecutor(1, None, case.max_tokens, timeout_s=5)
    layers = [case.layer(executor, MegaFluxConfig()) for _ in range(3)]
    meter = meter_of(executor, *layers)
    live = case.batch(0, 0, 100)
    for layer in layers:
        layer.forward_rank(live)
    torch.cuda.synchronize()
    thread = meter.publish_every(0.0005, tmp_path)
    graphs = []
    for _ in range(5):  # in the strict mode, in which other threads' calls can fail a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for layer in layers:
                layer.forward_rank(live)
        graphs.append(graph)
    expected = LayerTotals(1, 32)
    expected.add(plan_replicas(case.counts([live]), layers[0].layout))
    for turn in range(1, 21):
        batch: RoutingBatch = case.batch(turn, 0, 100)
        for name in ("hidden", "topk_ids", "topk_weights"):
            getattr(live, name).copy_(getattr(batch, name))
        graphs[turn % 5].replay()
        expected.add(plan_replicas(case.counts([batch]), layers[0].layout))
    torch.cuda.synchronize()
    assert thread.is_alive()  # it ends with the first call that fails
    meter.stop()
    snapshot = meter.snapshot()
    for totals in snapshot.totals:
        assert_equals(totals, expected)
    assert read_snapshots(tmp_path)[0].worker == snapshot.worker
