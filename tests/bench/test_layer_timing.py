"""What the layer benchmarks make of their times, and the clock and power beside them; nothing here needs a GPU."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("torch")

from megaflux_kernels.worklist import BLOCK_ROWS, LayerShape

from benchmarks import bench_layer_forward, layer_timing
from benchmarks.harness.gpu_meter import GpuMeter
from benchmarks.layer_timing import Sustained
from benchmarks.layer_workloads import SHAPES, roofline_ms, routes
from megaflux_serve.planning.plan import fixed_plan
from megaflux_serve.planning.planner import plan_replicas
from megaflux_serve.routing import expert_counts
from megaflux_serve.slots import SlotLayout

SHAPE = LayerShape(2, 64, 4, 2048, 1024, 8, 512)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layer_timing, bench_layer_forward):
        monkeypatch.setattr(module.dist, "get_rank", lambda: 0)


@pytest.mark.parametrize("routing", ["balanced", "zipf-3", "zipf-6-one-rank"])
@pytest.mark.parametrize("name", SHAPES)
def test_routes_are_distinct_experts_of_every_token(name: str, routing: str) -> None:
    experts, hidden, intermediate, top_k, slots = SHAPES[name]
    ids, home = routes(LayerShape(2, experts, slots, hidden, intermediate, top_k, 256), 256, routing)
    assert [of_rank.shape for of_rank in ids] == [(256, top_k)] * 2
    assert all(len(set(token)) == top_k for of_rank in ids for token in of_rank.tolist())
    assert (home is not None) == routing.endswith("-one-rank")
    if home is not None:
        counts = sum(expert_counts(of_rank, experts) for of_rank in ids)
        assert counts[home == 0].sum() > 0.6 * counts.sum() or counts[home == 1].sum() > 0.6 * counts.sum()


def test_rows_say_speed_up_hidden_share_and_roofline(alone: None) -> None:
    topk, home = routes(SHAPE, 512, "zipf-3-one-rank")
    counts = np.stack([expert_counts(ids, 64) for ids in topk])
    layout = SlotLayout(64, 2, 4, home)
    fixed, plan = fixed_plan(counts, layout, BLOCK_ROWS), plan_replicas(counts, layout)
    times = {"fixed": 3.0, "staged": 2.5, "pipelined": 2.2, "resident": 2.0, "all-gather + quack": 4.0}
    timed = {("burst", name): Sustained(ms, ()) for name, ms in times.items()}
    timed["sustained", "fixed"] = Sustained(3.2, ((1400.0, 690.0), (1500.0, 700.0)))
    case = {"shape": "olmoe", "tokens_per_rank": 512, "routing": "zipf-3-one-rank", "ranks": 2}
    rows = bench_layer_forward.result_rows(case, SHAPE, topk, (fixed, plan), timed)
    found = {(row.case["protocol"], row.case["variant"], row.metric): row.value for row in rows}
    assert found["burst", "pipelined", "speedup_over_fixed"] == pytest.approx(3.0 / 2.2)
    assert found["burst", "pipelined", "ideal_speedup"] == pytest.approx(fixed.max_load / plan.max_load)
    assert found["burst", "pipelined", "hidden_pct"] == pytest.approx(60)
    assert found["burst", "fixed", "roofline_fraction"] == pytest.approx(roofline_ms(SHAPE, fixed, topk) / 3.0)
    assert found["burst", "all-gather + quack", "latency_ms"] == 4.0
    assert found["sustained", "fixed", "sm_clock_mhz"] == 1450
    assert found["sustained", "fixed", "power_w"] == 695
    assert ("sustained", "pipelined", "latency_ms") not in found


def fake_nvml(power: list[float]) -> SimpleNamespace:
    """As much of pynvml as is used; power in milliwatts."""
    reading = iter(power)
    return SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        NVML_FI_DEV_POWER_INSTANT=186,
        NVML_CLOCK_SM=1,
        NVML_SUCCESS=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda device, clock: 1500,
        nvmlDeviceGetFieldValues=lambda device, fields: [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=next(reading, power[-1])))
        ],
    )


def test_a_meter_gives_the_means_of_the_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([100_000] * 3 + [600_000]))
    meter = GpuMeter("0000")
    meter.start()
    time.sleep(0.2)
    state = meter.stop(0.1)
    assert (state.sm_clock_mhz, state.power_w) == (1500, 600)
    assert state.samples >= 3


def test_a_meter_without_samples_or_without_nvml_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fake_nvml([0])
    broken.nvmlDeviceGetFieldValues = lambda device, fields: [SimpleNamespace(nvmlReturn=3)]
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    with pytest.raises(RuntimeError, match="NVML: 3"):
        GpuMeter("0000")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([1000]))
    meter = GpuMeter("0000")
    meter.start()
    with pytest.raises(RuntimeError, match="no sample"):
        meter.stop(0.0)
