"""ReplicatedMoE on an executor that plans by itself: what the layer still does, and what it must not do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import InputError, UnsupportedError
from megaflux_serve.executors import DeviceExecutor, DeviceLayer, MemoryUse, ReferenceExecutor, select_executor
from megaflux_serve.layer import LayerReport, ReplicatedMoE
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertSlots, ExpertWeights, Workspace
from tests.core.moe_cases import MoECase, make_case

CONFIG = MegaFluxConfig(replica_slots=1, block_rows=4)


class ReferenceOnDevice(DeviceLayer):
    """Plans like the reference, and notes what the layer asks for."""

    def __init__(self, layout: SlotLayout, config: MegaFluxConfig, slots: Sequence[ExpertSlots]) -> None:
        workspace, home = Workspace(layout.num_replica_slots), [own.home for own in slots]
        self.inner = ReplicatedMoE("inner", layout, config, ReferenceExecutor(layout.num_ranks), workspace, home)
        self.inner.slots = self.slots = [ExpertSlots(own.home, own.replicas) for own in slots]  # its own, not the given
        self.plans: list[ReplicaPlan] = []
        self.inner.observers.append(lambda report: self.plans.append(report.plan))
        self.asked: list[str] = []
        self.totals = None

    def prepare(self, top_k: int) -> None:
        self.asked.append(f"prepare {top_k}")

    def forward(self, batches: Sequence[RoutingBatch]) -> list[Tensor]:
        return self.inner.forward(batches)

    def last_plan(self) -> ReplicaPlan:
        self.asked.append("last_plan")
        return self.plans[-1]

    def forget_replicas(self) -> None:
        self.asked.append("forget_replicas")


class OnDevice(DeviceExecutor):
    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.local_ranks = num_ranks, range(num_ranks)

    def home_weights(self, layout: SlotLayout, hidden: int, intermediate: int) -> list[ExpertWeights]:
        raise NotImplementedError

    def note_failures(self) -> None:
        pass

    def raise_failure(self) -> None:
        raise NotImplementedError

    def timeouts(self) -> list[str]:
        raise NotImplementedError

    def memory_use(self) -> MemoryUse:
        raise NotImplementedError

    def layer(self, layout: SlotLayout, config: MegaFluxConfig, slots: Sequence[ExpertSlots]) -> DeviceLayer:
        return ReferenceOnDevice(layout, config, slots)


def device_layer(case: MoECase, reports: list[LayerReport] | None = None) -> tuple[ReplicatedMoE, ReferenceOnDevice]:
    home = [case.home(rank) for rank in range(case.layout.num_ranks)]
    observers = [] if reports is None else [reports.append]
    layer = ReplicatedMoE("moe", case.layout, CONFIG, OnDevice(case.layout.num_ranks), Workspace(1), home, observers)
    assert isinstance(layer.on_device, ReferenceOnDevice)
    return layer, layer.on_device


def test_the_layer_returns_what_the_device_computed_and_asks_for_no_plan() -> None:
    case = make_case([9, 5])
    layer, inner = device_layer(case)
    expected = case.reference_layer(CONFIG).forward(case.batches)
    assert all(torch.equal(a, b) for a, b in zip(layer.forward(case.batches), expected, strict=True))
    assert inner.asked == []
    assert all(own is found for own, found in zip(layer.slots, inner.slots, strict=True))
    assert [slots.replicas.num_experts for slots in layer.slots] == [1] * case.layout.num_ranks


@pytest.mark.parametrize("tokens", [[9, 5], [14]], ids=["two ranks", "one rank"])
def test_an_observer_is_told_the_plan_of_every_batch(tokens: list[int]) -> None:
    case, reports = make_case(tokens), []
    layer, inner = device_layer(case, reports)
    layer.forward(case.batches)
    layer.forward(case.batches)
    assert [(report.layer, report.step, report.tokens) for report in reports] == [("moe", 0, 14), ("moe", 1, 14)]
    assert [report.plan for report in reports] == inner.plans


def test_batches_without_observers_count_as_steps() -> None:
    case, reports = make_case([9, 5]), []
    layer, _ = device_layer(case)
    layer.forward(case.batches)
    layer.observers.append(reports.append)
    layer.forward(case.batches)
    assert [report.step for report in reports] == [1]


def test_shapes_are_checked_before_the_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([9, 5])
    layer, inner = device_layer(case)
    monkeypatch.setattr(inner, "forward", lambda batches: pytest.fail("the device was asked"))
    narrow = replace(case.batches[0], hidden=case.batches[0].hidden[:, :-1])
    with pytest.raises(InputError, match="hidden"):
        layer.forward([narrow, case.batches[1]])
    with pytest.raises(InputError, match="topk_ids"):
        layer.forward([replace(case.batches[0], topk_ids=case.batches[0].topk_ids[:, 0]), case.batches[1]])


def test_new_weights_make_the_device_forget_its_replicas() -> None:
    layer, inner = device_layer(make_case([9, 5]))
    layer.weights_updated()
    assert inner.asked == ["forget_replicas"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"megakernel.*no NVIDIA GPU.*use staged, reference or auto"):
        select_executor(MegaFluxConfig(executor="megakernel"), num_ranks=2)
