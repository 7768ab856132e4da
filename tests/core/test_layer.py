"""ReplicatedMoE: what stays from batch to batch, what observers see, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import InputError, UnsupportedError
from megaflux_serve.executors import ReferenceExecutor
from megaflux_serve.layer import LayerReport, ReplicatedMoE
from megaflux_serve.plan_log import PlanLog
from megaflux_serve.planning.gate import GateCosts
from megaflux_serve.workspace import ExpertWeights, Workspace
from tests.core.moe_cases import MoECase, make_case

CONFIG = MegaFluxConfig(block_rows=4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def case() -> MoECase:
    """Two ranks; rank 0 owns the popular experts."""
    return make_case([60, 20])


def assert_equals_fixed(case: MoECase, outputs: list[torch.Tensor]) -> None:
    expected = case.without_replicas().reference_layer(CONFIG).forward(case.batches)
    assert all(torch.equal(output, wanted) for output, wanted in zip(outputs, expected, strict=True))


def test_the_second_identical_batch_copies_no_weights(case: MoECase) -> None:
    reports: list[LayerReport] = []
    layer = case.reference_layer(CONFIG, [reports.append])
    for _ in range(2):
        assert_equals_fixed(case, layer.forward(case.batches))
    first, second = (report.plan for report in reports)
    assert first.max_load < first.fixed_loads.max()
    assert len(first.transfers) == first.num_replicas > 0
    assert len(second.transfers) == 0
    assert second.num_replicas > 0


def test_updated_weights_drop_resident_replicas(case: MoECase) -> None:
    reports: list[LayerReport] = []
    layer = case.reference_layer(CONFIG, [reports.append])
    layer.forward(case.batches)
    for slots in layer.slots:  # as an engine does it: in place, at the same addresses
        slots.home.w13.mul_(0.5)
        slots.home.w2.mul_(3.0)
    layer.weights_updated()
    assert_equals_fixed(replace(case, w13=case.w13 * 0.5, w2=case.w2 * 3.0), layer.forward(case.batches))
    assert len(reports[1].plan.transfers) == reports[1].plan.num_replicas > 0
    layer.forward(case.batches)
    assert reports[2].plan.num_replicas > len(reports[2].plan.transfers) == 0, "one update is forgotten once"


def test_without_sticky_layers_share_replica_slots_and_every_batch_copies(case: MoECase) -> None:
    config = MegaFluxConfig(block_rows=4, sticky=False)
    workspace, reports = Workspace(case.layout.num_replica_slots, sticky=False), []
    other = make_case([60, 20], seed=1)
    layers = [
        ReplicatedMoE(
            f"layer {i}",
            each.layout,
            config,
            ReferenceExecutor(2),
            workspace,
            [each.home(0), each.home(1)],
            [reports.append],
        )
        for i, each in enumerate((case, other))
    ]
    for rank in (0, 1):
        assert layers[0].slots[rank].replicas is layers[1].slots[rank].replicas
    assert layers[0].slots[0].replicas is not layers[0].slots[1].replicas
    for _ in range(2):
        assert_equals_fixed(case, layers[0].forward(case.batches))
        assert_equals_fixed(other, layers[1].forward(other.batches))
    assert all(len(report.plan.transfers) == report.plan.num_replicas > 0 for report in reports)


def test_a_gated_plan_computes_at_home_and_keeps_resident_replicas(case: MoECase) -> None:
    reports: list[LayerReport] = []
    layer = case.reference_layer(CONFIG, [reports.append])
    layer.forward(case.batches)
    resident = layer.resident
    layer.config = MegaFluxConfig(
        block_rows=4, gate=GateCosts(block_ns=1, replica_ns=0, plan_ns=10**9, hidden_permille=0)
    )
    assert_equals_fixed(case, layer.forward(case.batches))
    gated = reports[1].plan
    assert (gated.gated, gated.num_replicas, len(gated.transfers)) == (True, 0, 0)
    assert layer.resident.tolist() == resident.tolist()
    layer.config = MegaFluxConfig(block_rows=4, gate=GateCosts(block_ns=1, replica_ns=0, plan_ns=0, hidden_permille=0))
    assert_equals_fixed(case, layer.forward(case.batches))
    assert not reports[2].plan.gated
    assert reports[2].plan.num_replicas > 0 == len(reports[2].plan.transfers)


def test_a_batch_that_fails_leaves_no_replica_trusted(case: MoECase) -> None:
    class Failing(ReferenceExecutor):
        def execute(self, *arguments: Any) -> list[torch.Tensor]:
            raise RuntimeError("link down")

    layer = case.reference_layer(CONFIG)
    layer.forward(case.batches)
    assert (layer.resident >= 0).any()
    layer.executor = Failing(2)
    with pytest.raises(RuntimeError, match="link down"):
        layer.forward(case.batches)
    assert (layer.resident == -1).all()


@pytest.mark.parametrize(("tokens", "slots"), [([30], 2), ([30, 10], 0)], ids=["one rank", "no slots"])
def test_nothing_to_replicate_is_the_fixed_placement(tokens: list[int], slots: int) -> None:
    case, reports = make_case(tokens, replica_slots=slots), []
    layer = case.reference_layer(CONFIG, [reports.append])
    assert_equals_fixed(case, layer.forward(case.batches))
    assert reports[0].plan.num_replicas == 0
    assert reports[0].plan.loads.tolist() == reports[0].plan.fixed_loads.tolist()


def test_a_single_slot_is_used() -> None:
    case, reports = make_case([60, 20], replica_slots=1), []
    layer = case.reference_layer(CONFIG, [reports.append])
    assert_equals_fixed(case, layer.forward(case.batches))
    assert reports[0].plan.num_replicas > 0


def test_home_weights_are_used_where_the_engine_keeps_them(case: MoECase) -> None:
    home = [case.home(0), case.home(1)]
    layer = ReplicatedMoE("moe", case.layout, CONFIG, ReferenceExecutor(2), Workspace(2), home)
    before = [(slots.home.w13.data_ptr(), slots.replicas.w13.data_ptr()) for slots in layer.slots]
    layer.forward(case.batches)
    layer.weights_updated()
    layer.forward(case.batches)
    assert [(slots.home.w13.data_ptr(), slots.replicas.w13.data_ptr()) for slots in layer.slots] == before
    assert [slots.home.w13.data_ptr() for slots in layer.slots] == [weights.w13.data_ptr() for weights in home]


def test_weights_that_were_replaced_instead_of_written_are_refused() -> None:
    case = make_case([9])
    layer, home = case.reference_layer(CONFIG), case.home(0)
    w13, w2 = layer.slots[0].home.w13, layer.slots[0].home.w2
    layer.check_home(w13, w2)
    for replaced in ((home.w13.clone(), w2), (w13, home.w2.clone())):
        with pytest.raises(UnsupportedError, match="moe: its weight tensors were replaced by others"):
            layer.check_home(*replaced)


def test_forward_rank_serves_a_process_with_one_rank() -> None:
    case = make_case([9])
    assert_equals_fixed(case, [case.reference_layer(CONFIG).forward_rank(case.batches[0])])


def test_observers_learn_layer_step_tokens_and_plan(case: MoECase) -> None:
    reports: list[LayerReport] = []
    layer = case.reference_layer(CONFIG, [reports.append])
    layer.forward(case.batches)
    layer.forward(make_case([0, 0]).batches)
    assert [(report.layer, report.step, report.tokens) for report in reports] == [("moe", 0, 80), ("moe", 1, 0)]
    assert reports[0].plan.counts.tolist() == case.counts().tolist()


def test_the_plan_log_has_one_line_a_layer_and_batch(case: MoECase, tmp_path: Path) -> None:
    reports: list[LayerReport] = []
    with PlanLog(tmp_path / "new" / "folder") as log:
        layer = case.reference_layer(CONFIG, [log, reports.append])
        layer.forward(case.batches)
        assert len(log.path.read_text().splitlines()) == 1, "a line must be on disk before the next batch"
        layer.forward(case.batches)
    first, second = map(json.loads, log.path.read_text().splitlines())
    plan, totals = reports[0].plan, case.counts().sum(axis=0)
    assert first == {
        "layer": "moe",
        "step": 0,
        "tokens": 80,
        "kappa": pytest.approx(8 * (totals**2).sum() / totals.sum() ** 2),
        "fixed_loads": plan.fixed_loads.tolist(),
        "loads": plan.loads.tolist(),
        "replicas": plan.num_replicas,
        "blocks_moved": plan.blocks_moved,
        "transfers": plan.num_replicas,
        "gated": False,
    }
    assert (second["step"], second["transfers"]) == (1, 0)
    with PlanLog(tmp_path / "new" / "folder") as log:  # a second server run adds to the file
        case.reference_layer(CONFIG, [log]).forward(case.batches)
    assert len(log.path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(60, 23)}, r"hidden: is torch.float32 \[60, 23\]; allowed: torch.float32 \[60, 24\]"),
        ({"hidden": torch.zeros(60, 24).bfloat16()}, r"hidden: is torch.bfloat16 .*allowed: torch.float32"),
        ({"topk_ids": torch.tensor([[0, 8]])}, r"topk_ids: holds expert id 8; allowed: ids 0 to 7"),
        ({"topk_ids": torch.tensor([[3, 3]])}, r"topk_ids: token 0 names an expert twice"),
        ({"topk_ids": torch.zeros(60, 2)}, r"topk_ids: has dtype float32; allowed: an integer dtype"),
        ({"topk_weights": torch.ones(60, 2).double()}, r"topk_weights: is torch.float64 .*torch.float32 \[60, 2\]"),
        ({"topk_weights": torch.ones(60, 3)}, r"topk_weights: is torch.float32 \[60, 3\]; allowed: .*\[60, 2\]"),
    ],
)
def test_a_batch_that_breaks_its_contract_is_refused(case: MoECase, change: dict[str, Any], message: str) -> None:
    layer = case.reference_layer(CONFIG)
    with pytest.raises(InputError, match=message):
        layer.forward([replace(case.batches[0], **change), case.batches[1]])


def test_weights_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(InputError, match=r"w13: has shape \[4, 3, 8\]"):
        ExpertWeights(torch.zeros(4, 3, 8), torch.zeros(4, 8, 1))
    with pytest.raises(InputError, match=r"w2: has shape \[4, 8, 3\]; allowed: \[4, 8, 2\]"):
        ExpertWeights(torch.zeros(4, 4, 8), torch.zeros(4, 8, 3))
    with pytest.raises(InputError, match=r"w2: is torch.bfloat16 on cpu; allowed: torch.float32 on cpu"):
        ExpertWeights(torch.zeros(4, 4, 8), torch.zeros(4, 8, 2).bfloat16())
    with pytest.raises(InputError, match=r"w13: has strides .*contiguous"):
        ExpertWeights(torch.zeros(8, 4, 4).transpose(0, 2), torch.zeros(4, 8, 2))


def test_a_layer_that_does_not_fit_its_executor_is_refused(case: MoECase) -> None:
    home, workspace = [case.home(0), case.home(1)], Workspace(2)
    with pytest.raises(InputError, match=r"layout: has 2 ranks; allowed: the executor's 4"):
        ReplicatedMoE("moe", case.layout, CONFIG, ReferenceExecutor(4), workspace, home)
    with pytest.raises(InputError, match=r"home: holds 1 ranks; allowed: the 2 local ranks"):
        ReplicatedMoE("moe", case.layout, CONFIG, ReferenceExecutor(2), workspace, home[:1])
    with pytest.raises(InputError, match=r"home: holds 3 experts; allowed: 4 a rank"):
        ReplicatedMoE("moe", case.layout, CONFIG, ReferenceExecutor(2), workspace, [home[0], home[1].empty_like(3)])
