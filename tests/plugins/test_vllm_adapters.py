"""The adapters of the vLLM plugin, without an engine: what each translates, and that the hooks took."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

import megaflux_vllm
from megaflux_vllm import backend_name, cpu_router, hooks, layer, method, ranks, versions
from megaflux_vllm.ranks import RowShard, home_ranks
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.kernel import KernelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import InputError, MegafluxError, UnsupportedError
from megaflux_serve.executors import DeviceExecutor, DeviceLayer, Executor, MemoryUse, ReferenceExecutor
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertSlots, ExpertWeights
from tests.oracles.moe_float64 import moe_float64
from tests.plugins.vllm_configs import moe_config

deterministic = settings(derandomize=True, deadline=None, max_examples=50)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    megaflux_vllm.register()


def test_registering_again_changes_nothing() -> None:
    def state() -> tuple[Any, ...]:
        return dict(op_registry_oot), EngineArgs.create_engine_config, KernelConfig.__annotations__["moe_backend"]

    before = state()
    megaflux_vllm.register()
    assert state() == before


def test_other_backends_keep_their_names_and_wrong_ones_are_refused() -> None:
    assert KernelConfig(moe_backend="triton").moe_backend == "triton"
    assert KernelConfig(moe_backend="MegaFlux").moe_backend == backend_name.BACKEND
    with pytest.raises(ValueError, match="'megaflux'"):
        KernelConfig(moe_backend="nonsense")


def test_a_hook_that_another_plugin_replaced_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op_registry_oot, layer.ROUTED_EXPERTS, torch.nn.Module)
    with pytest.raises(UnsupportedError, match="the layer of routed experts"):
        megaflux_vllm.register()


def test_refusals_do_not_load_the_compiler_of_the_planner() -> None:
    """vLLM 0.32 on a CPU cannot start a worker in a process that has loaded llvmlite."""
    command = "import sys, megaflux_vllm.checks; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.25.1", False), ("0.26.0", True), ("0.27.1+cpu", True), ("0.33.0", True), ("0.34.0rc1", False), ("1.0", False)],
)
def test_releases_outside_the_tested_range_do_not_get_the_backend(version: str, supported: bool) -> None:
    assert versions.is_supported(version) is supported
    assert "0.26.0, 0.27.1, 0.28.0, 0.30.0, 0.32.0, 0.33.0" in str(versions.refusal(version))


def test_a_release_that_is_not_supported_is_left_alone_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "engine_version", lambda: "0.34.0")
    monkeypatch.setattr(hooks, "install", lambda: pytest.fail("hooked an unknown release"))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM's own handler would keep it from caplog
    megaflux_vllm.register()
    assert "--moe-backend megaflux on vLLM 0.34.0: its layer interface has not been tested" in caplog.text


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_cpu_router_gives_softmax_weights_of_the_largest_experts(renormalize: bool, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 16, generator=generator)
    bias = torch.randn(16, generator=generator) if biased else None
    weights, ids = torch.empty(9, 3), torch.empty(9, 3, dtype=torch.int32)
    cpu_router.topk_softmax(weights, ids, torch.empty(0), logits, renormalize, bias)

    exact = np.exp(logits.double().numpy())
    exact /= exact.sum(axis=1, keepdims=True)
    scores = exact if bias is None else exact + bias.double().numpy()
    expected = np.argsort(-scores, axis=1)[:, :3]
    picked = np.take_along_axis(exact, expected, axis=1)
    if renormalize:
        picked /= picked.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(ids.numpy(), expected)
    np.testing.assert_allclose(weights.numpy(), picked, rtol=1e-5)


@deterministic
@given(num_rows=st.integers(0, 40), num_parts=st.integers(1, 8))
def test_tensor_parallel_ranks_bring_every_row_once_and_in_order(num_rows: int, num_parts: int) -> None:
    rows = torch.arange(num_rows * 2).view(num_rows, 2)
    parts = [RowShard(num_parts, part).take(rows) for part in range(num_parts)]
    assert torch.equal(torch.cat(parts), rows)
    assert max(part.shape[0] for part in parts) == RowShard(num_parts, 0).rows_a_part(num_rows)


@deterministic
@given(num_rows=st.integers(0, 12), num_parts=st.integers(2, 5))
def test_gathering_parts_gives_all_rows(num_rows: int, num_parts: int) -> None:
    rows = torch.arange(num_rows * 3, dtype=torch.float32).view(num_rows, 3)
    shards = [RowShard(num_parts, part) for part in range(num_parts)]
    padded: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.distributed.tensor_model_parallel_all_gather", lambda x, dim: padded.append(x) or x)
        for shard in shards:
            shard.gather(shard.take(rows), num_rows)
        patch.setattr("vllm.distributed.tensor_model_parallel_all_gather", lambda x, dim: torch.cat(padded, dim))
        for shard in shards:
            assert torch.equal(shard.gather(shard.take(rows), num_rows), rows)


class Group:
    """vLLM's expert-parallel group, as far as the plugin looks at it."""

    cpu_group, device_group = None, object()

    def __init__(self, world_size: int, rank_in_group: int = 0) -> None:
        self.world_size, self.rank_in_group = world_size, rank_in_group


def gathered_homes(monkeypatch: pytest.MonkeyPatch, maps: list[torch.Tensor]) -> list[int]:
    """``home_ranks`` where the ranks hold these expert maps."""

    def all_gather(into: list[torch.Tensor], own: torch.Tensor, group: None) -> None:
        for tensor, held in zip(into, maps, strict=True):
            tensor.copy_(held)

    monkeypatch.setattr("vllm.distributed.get_ep_group", lambda: Group(len(maps)))
    monkeypatch.setattr(ranks.dist, "all_gather", all_gather)
    return home_ranks(maps[0], maps[0].numel()).tolist()


@pytest.mark.parametrize(
    ("strategy", "homes"), [("linear", [0, 0, 0, 1, 1, 1, 2, 2, 2]), ("round_robin", [0, 1, 2, 0, 1, 2, 0, 1, 2])]
)
def test_home_ranks_are_those_that_vllm_placed(
    monkeypatch: pytest.MonkeyPatch, strategy: str, homes: list[int]
) -> None:
    maps = [determine_expert_map(3, rank, 9, strategy)[1] for rank in range(3)]
    assert gathered_homes(monkeypatch, maps) == homes
    assert home_ranks(None, 4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("maps", "problem"),
    [
        ([[0, 1, -1, -1], [-1, 0, 1, -1]], "expert 1 is on 2 ranks"),
        ([[0, 1, -1, -1], [-1, -1, 0, -1]], "expert 3 is on 0 ranks"),
        ([[1, 0, -1, -1], [-1, -1, 0, 1]], "local indices that grow"),
    ],
)
def test_a_placement_without_one_home_an_expert_is_refused(
    monkeypatch: pytest.MonkeyPatch, maps: list[list[int]], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        gathered_homes(monkeypatch, [torch.tensor(row, dtype=torch.int32) for row in maps])


def test_the_stock_method_does_not_stand_in_for_the_backend() -> None:
    with pytest.raises(UnsupportedError, match="a class of its own for routed experts"):
        UnquantizedFusedMoEMethod(moe_config(moe_backend="megaflux"))
    with set_current_vllm_config(VllmConfig()):
        assert isinstance(UnquantizedFusedMoEMethod(moe_config(moe_backend="auto")), UnquantizedFusedMoEMethod)


def context_of(group: Group, **options: Any) -> ranks.VllmRankContext:
    """The context that layers of this group and these options share."""
    config = VllmConfig(additional_config={"megaflux": options})
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(config):
        patch.setattr("vllm.distributed.get_ep_group", lambda: group)
        patch.setattr(ranks, "worker_meter", lambda *arguments: None)  # wants a model's name
        return ranks.rank_context()


def test_layers_of_a_process_share_executor_and_workspace_and_rank_0_logs(tmp_path: Path) -> None:
    group = Group(1)
    context = context_of(group, plan_log=str(tmp_path))
    assert context_of(group) is context
    assert isinstance(context.executor, ReferenceExecutor)
    assert len(context.observers) == 1
    assert context_of(Group(1, rank_in_group=1), plan_log=str(tmp_path)).observers == []


@pytest.mark.parametrize(("executor", "num_ranks"), [("reference", 2), ("megakernel", 1)])
def test_an_executor_that_cannot_run_here_is_refused_when_the_first_layer_is_built(
    executor: str, num_ranks: int
) -> None:
    with pytest.raises(MegafluxError, match=f"executor = '{executor}'"):
        context_of(Group(num_ranks), executor=executor)


class Layer(torch.nn.Module):
    """vLLM's layer of routed experts, as far as the method looks at it."""

    expert_map = None


def loaded_layer(
    monkeypatch: pytest.MonkeyPatch, executor: Executor | DeviceExecutor, **more: Any
) -> tuple[method.MegaFluxMoEMethod, Layer]:
    """A layer of 8 experts on one rank, its weights loaded."""
    options = MegaFluxConfig(block_rows=4, **more)
    context = ranks.VllmRankContext.of(options, executor, 0, None, logging.getLogger("vllm.megaflux"))
    monkeypatch.setattr(method, "rank_context", lambda: context)
    monkeypatch.setattr(RowShard, "of", lambda moe: RowShard(1, 0))
    with set_current_vllm_config(VllmConfig()):
        quant_method = method.MegaFluxMoEMethod("layer 0", moe_config(num_experts=8, num_logical_experts=8))
    module, generator = Layer(), torch.Generator().manual_seed(0)
    quant_method.create_weights(module, 8, 32, 16, torch.float32, weight_loader=None)
    for weight in module.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    quant_method.process_weights_after_loading(module)
    return quant_method, module


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> tuple[method.MegaFluxMoEMethod, Layer]:
    """The layer on the reference executor."""
    return loaded_layer(monkeypatch, ReferenceExecutor(1))


class OwnMemory(DeviceExecutor, DeviceLayer):
    """A device executor, as far as where weights live."""

    kind, num_ranks, local_ranks, totals = "megakernel", 1, range(1), None

    def home_weights(self, layout: SlotLayout, hidden: int, intermediate: int) -> list[ExpertWeights]:
        own = layout.experts_per_rank
        home = ExpertWeights(torch.zeros(own, 2 * intermediate, hidden), torch.zeros(own, hidden, intermediate))
        self.slots = [ExpertSlots(home, home.empty_like(0))]
        return [home]

    def layer(self, layout: SlotLayout, config: MegaFluxConfig, slots: Sequence[ExpertSlots]) -> DeviceLayer:
        assert slots[0].home.w13.data_ptr() == self.slots[0].home.w13.data_ptr()
        return self

    def prepare(self, top_k: int) -> None:
        self.top_k = top_k

    def note_failures(self) -> None:
        pass

    def raise_failure(self) -> None:
        pass

    def timeouts(self) -> list[str]:
        return []

    def memory_use(self) -> MemoryUse:
        return MemoryUse(weight_bytes=3 << 29, replica_bytes=1 << 28, workspace_bytes=1 << 30)

    def forward(self, batches: Sequence[RoutingBatch]) -> list[torch.Tensor]:
        return [batch.hidden for batch in batches]

    def last_plan(self) -> ReplicaPlan:
        raise NotImplementedError

    def forget_replicas(self) -> None:
        pass


def test_parameters_are_views_of_the_memory_that_the_executor_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = OwnMemory()
    quant_method, module = loaded_layer(monkeypatch, executor)
    home = executor.slots[0].home
    assert module.w13_weight.data_ptr() == home.w13.data_ptr()
    module.w2_weight.data.fill_(3.0)  # as vLLM's loaders write
    assert (home.w2 == 3.0).all()
    assert executor.top_k == 2  # known before the first batch
    assert quant_method.replicated_moe.slots[0].home is home


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged; vLLM's own handler would keep it from caplog."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm")
    return caplog


def test_the_log_says_once_what_the_layers_take(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    quant_method, module = loaded_layer(monkeypatch, OwnMemory(), min_tokens=2)
    for _ in range(2):
        quant_method.apply(module, torch.zeros(2, 32), torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int32))
    (line,) = [record.message for record in log.records if record.message.startswith("megaflux: executor")]
    assert "executor megakernel, 1 ranks, 1 layers of 8 experts, 8 home and 0 replica slots a rank and layer" in line
    assert ", the engine's own kernels for batches of less than 2 rows; a rank takes" in line
    assert "1.50 GiB for home weights, 0.25 GiB for replica slots and 1.00 GiB for batches" in line


def test_apply_computes_the_layer_and_ignores_padding(
    monkeypatch: pytest.MonkeyPatch, served: tuple[method.MegaFluxMoEMethod, Layer]
) -> None:
    monkeypatch.setattr(method, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(
        method, "get_forward_context", lambda: SimpleNamespace(is_padding=torch.ones(7), dp_metadata=None)
    )
    quant_method, module = served
    generator = torch.Generator().manual_seed(1)
    x, logits = torch.randn(7, 32, generator=generator), torch.randn(7, 8, generator=generator)
    weights, ids = logits.softmax(-1).topk(2)
    ids[5:] = -1
    output = quant_method.apply(module, x, weights, ids.to(torch.int32))
    exact = moe_float64(*(t[:5] for t in (x, ids, weights)), module.w13_weight.data, module.w2_weight.data)
    np.testing.assert_allclose(output[:5].numpy(), exact, rtol=1e-4, atol=1e-5)
    assert quant_method.moe_kernel is not None
    assert not quant_method.moe_kernel.output_is_reduced()


@pytest.mark.parametrize(("rows_of_ranks", "handed"), [([3, 1], True), ([3, 4], False), (None, True)])
def test_batches_below_min_tokens_on_every_rank_go_to_vllm_with_the_same_weights_and_routes(
    monkeypatch: pytest.MonkeyPatch, rows_of_ranks: list[int] | None, handed: bool
) -> None:
    calls: list[dict[str, Any]] = []

    def fused_experts(x: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append({"tensors": tensors} | options)
        return x

    fake = SimpleNamespace(fused_experts=fused_experts)  # vLLM's needs a GPU
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe.fused_moe", fake)
    gathered = SimpleNamespace(dispatch=lambda *a: a[:3], combine=lambda out, cut: out)
    monkeypatch.setattr("vllm.distributed.get_ep_group", lambda: gathered)
    monkeypatch.setattr("vllm.distributed.tensor_model_parallel_all_reduce", lambda out: out)
    across = None if rows_of_ranks is None else SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(rows_of_ranks))
    monkeypatch.setattr("vllm.forward_context.is_forward_context_available", lambda: True)
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: SimpleNamespace(dp_metadata=across))

    executor = OwnMemory()
    quant_method, module = loaded_layer(monkeypatch, executor, min_tokens=4)
    module.moe_config, module.activation = quant_method.moe, "silu"
    ids = torch.tensor([[0, 1], [2, 3], [-1, -1]], dtype=torch.int32)
    quant_method.apply(module, torch.zeros(3, 32), torch.ones(3, 2), ids)
    assert len(calls) == (1 if handed else 0)
    for call in calls:
        w13, w2, weights, routed = call["tensors"]
        assert w13 is module.w13_weight
        assert w2 is module.w2_weight
        assert torch.equal(routed[:2], ids[:2])
        assert torch.equal(weights, torch.ones(3, 2))
        assert (call["global_num_experts"], call["expert_map"], call["activation"]) == (8, None, "silu")


def test_an_update_that_writes_unseen_is_told_to_every_layer(
    monkeypatch: pytest.MonkeyPatch, served: tuple[method.MegaFluxMoEMethod, Layer]
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    def update_weights(self: Worker, value: float) -> None:  # as vLLM's transfer of sparse patches writes
        module.w13_weight.data.view(-1).index_copy_(0, torch.tensor([0]), torch.tensor([value]))

    quant_method, module = served
    moe = quant_method.replicated_moe
    monkeypatch.setattr(Worker, "update_weights", update_weights)
    with monkeypatch.context() as patch:
        patch.setattr(ranks.VllmRankContext, "of", lambda *arguments: quant_method.context)
        context_of(Group(1))
    quant_method.notice_writes(module)
    moe.is_stale = False
    Worker.update_weights(object.__new__(Worker), 3.0)
    assert module.w13_weight.flatten()[0] == 3.0
    assert moe.is_stale


def test_every_way_of_updating_weights_is_noticed(served: tuple[method.MegaFluxMoEMethod, Layer]) -> None:
    quant_method, module = served
    moe = quant_method.replicated_moe
    quant_method.notice_writes(module)
    address, moe.is_stale = moe.slots[0].home.w13.data_ptr(), False
    quant_method.notice_writes(module)
    assert not moe.is_stale

    quant_method.process_weights_after_loading(module)  # a reload
    assert moe.is_stale
    moe.is_stale = False
    with torch.no_grad():
        module.w2_weight.copy_(module.w2_weight * 2)  # a trainer that writes in place
    quant_method.notice_writes(module)
    assert moe.is_stale
    assert moe.slots[0].home.w13.data_ptr() == address

    module.w13_weight = torch.nn.Parameter(module.w13_weight.clone(), requires_grad=False)
    with pytest.raises(UnsupportedError, match="layer 0: its weight tensors were replaced"):
        quant_method.apply(module, torch.zeros(1, 32), torch.ones(1, 2), torch.tensor([[0, 1]], dtype=torch.int32))
