"""The adapters of the SGLang plugin: what each translates, what is refused, and that the hooks took.

Without SGLang they run on a stand-in; ``make test-sglang`` runs this file where SGLang is installed: then its names,
flags and hooks are the real ones, and the stand-in's contract is held against them.
"""

from __future__ import annotations

import inspect
import json
import logging
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megaflux_sglang
import numpy as np
import pytest
import torch
from megaflux_kernels.totals_map import Total
from megaflux_sglang import backend, capture, checks, choice, failures, metrics, options, versions, weights

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, MegafluxError, UnsupportedError
from megaflux_serve.executors import DeviceExecutor, DeviceLayer
from megaflux_serve.metrics import registries, snapshot
from megaflux_serve.planning.gate import GateCosts
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertSlots, ExpertWeights
from tests.oracles.moe_float64 import moe_float64
from tests.plugins import sglang_stand_in as stand_in

REAL = find_spec("sglang") is not None
on_stand_in = pytest.mark.skipif(REAL, reason="SGLang is installed; its own layers are tested with servers")
on_sglang = pytest.mark.skipif(not REAL, reason="SGLang is not installed")
TINY_MOE = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"

running = SimpleNamespace(backend=None, server_args=None, group=stand_in.Group())
"""What the stand-in's server runs with."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    """The plugin, loaded as SGLang loads it."""
    if REAL:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        fakes = stand_in.modules(lambda: running.backend, lambda: running.server_args, lambda: running.group)
        for name, module in fakes.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(versions, "engine_version", lambda: "0.5.17")
        patch.setattr(versions, "_hooked", [])
        megaflux_sglang.register()
        stand_in.HookRegistry.apply_hooks()
        yield
    for name in ("method", "ranks"):
        sys.modules.pop(f"megaflux_sglang.{name}", None)  # they hold on to the stand-in


# ---- the backend's name ----------------------------------------------------------------------------------------------


def test_both_names_are_accepted_and_every_hook_is_in_place() -> None:
    assert backend.is_accepted()
    assert versions.missing_hooks() == []
    versions.check_hooks_took()


def test_registering_again_changes_nothing() -> None:
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    before = list(MoeA2ABackend), list(backend.a2a_choices()), list(versions._hooked)
    megaflux_sglang.register()
    assert (list(MoeA2ABackend), list(backend.a2a_choices()), list(versions._hooked)) == before


def test_sglang_takes_the_backend_for_one_of_deepeps_kind_and_still_refuses_other_names() -> None:
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    ours = MoeA2ABackend("megaflux")
    assert ours.is_deepep()
    assert ours != MoeA2ABackend("deepep")
    assert not MoeA2ABackend("none").is_deepep()
    with pytest.raises(ValueError, match="nonsense"):
        MoeA2ABackend("nonsense")


def test_a_hook_that_another_plugin_replaced_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = versions._hooked[0]
    place, _, name = target.rpartition(".")
    monkeypatch.setattr(pkgutil.resolve_name(place), name, lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"these hooks did not take: sglang\.srt"):
        versions.check_hooks_took()


def test_a_hook_that_another_plugin_wrapped_is_still_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = versions._hooked[0]
    place, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(place)
    outer = stand_in.wrapped(getattr(owner, name), lambda original, *args: original(*args), stand_in.HookType.AROUND)
    monkeypatch.setattr(owner, name, outer)
    versions.check_hooks_took()


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.5.10.post1", False), ("0.5.11", True), ("0.5.15.post1", True), ("0.5.23", True), ("0.5.24", False)],
)
def test_releases_outside_the_tested_range_do_not_get_the_backend(version: str, supported: bool) -> None:
    assert versions.is_supported(version) is supported
    assert "use a release from 0.5.11 to 0.5.23" in str(versions.refusal(version))


def test_a_release_that_is_not_supported_is_left_alone_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "engine_version", lambda: "0.6.0")
    monkeypatch.setattr(backend, "accept", lambda: pytest.fail("hooked an unknown release"))
    monkeypatch.setattr(logging.getLogger("sglang"), "propagate", True)
    megaflux_sglang.register()
    assert "the megaflux backend on SGLang 0.6.0: its layer interface has not been tested" in caplog.text


@on_sglang
@pytest.mark.parametrize(("path", "parameters"), stand_in.CONTRACT.items())
def test_the_stand_in_takes_what_sglang_takes(path: str, parameters: tuple[str, ...]) -> None:
    if versions.release(versions.engine_version()) != (0, 5, 17):
        pytest.skip("the stand-in stands for 0.5.17")
    real = list(inspect.signature(inspect.unwrap(pkgutil.resolve_name(path))).parameters)
    assert set(parameters) <= set(real), real


# ---- options ---------------------------------------------------------------------------------------------------------


def given(overrides: str = "{}") -> Any:
    """Server arguments with this ``--json-model-override-args``."""
    return SimpleNamespace(json_model_override_args=overrides)


def test_options_come_from_the_flag_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.megaflux_config(given()) == MegaFluxConfig()
    assert not options.is_given(given())
    flag = given('{"rope_theta": 1, "megaflux": {"replica_slots": 3}}')
    assert options.megaflux_config(flag).replica_slots == 3
    monkeypatch.setenv("MEGAFLUX_OPTIONS", '{"block_rows": 4}')
    assert options.is_given(given())
    assert options.megaflux_config(given()).block_rows == 4
    with pytest.raises(ConfigError, match="one place for options"):
        options.megaflux_config(flag)


def test_a_wrong_option_is_named_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--json-model-override-args megaflux\.replica_slots = -1"):
        options.megaflux_config(given('{"megaflux": {"replica_slots": -1}}'))
    with pytest.raises(ConfigError, match="--json-model-override-args megaflux = 5"):
        options.megaflux_config(given('{"megaflux": 5}'))
    monkeypatch.setenv("MEGAFLUX_OPTIONS", '{"slots": 2}')
    with pytest.raises(ConfigError, match="MEGAFLUX_OPTIONS slots = 2"):
        options.megaflux_config(given())
    monkeypatch.setenv("MEGAFLUX_OPTIONS", "{")
    with pytest.raises(ConfigError, match="a JSON object"):
        options.megaflux_config(given())


# ---- refusals --------------------------------------------------------------------------------------------------------


def model(**changes: Any) -> Any:
    """SGLang's configuration of a model that is served."""
    text = {"num_experts": 16, "hidden_size": 128, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    architecture = changes.pop("architecture", "Qwen3MoeForCausalLM")
    config = {"quantization": None, "dtype": torch.float32, "context_len": 1024}
    return SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]),
        hf_text_config=SimpleNamespace(**(text | {name: changes.pop(name) for name in text if name in changes})),
        **(config | changes),
    )


def server_args(served: Any = None, **changes: Any) -> Any:
    """Arguments of a server that is not refused, with changes."""
    configuration = served or model()
    values = {
        "moe_a2a_backend": "megaflux",
        "moe_runner_backend": "megaflux",
        "json_model_override_args": "{}",
        "tp_size": 2,
        "ep_size": 2,
        "dp_size": 1,
        "enable_dp_attention": False,
        "device": "cpu",
        "chunked_prefill_size": 2048,
        "max_prefill_tokens": 16384,
        "max_running_requests": None,
        "nnodes": 1,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "served_model_name": "tiny",
        "enable_metrics": False,
        "get_model_config": lambda: configuration,
        "_model_config": configuration,  # where SGLang looks first, from 0.5.19
    }
    return SimpleNamespace(**(values | changes))


def resolved_arguments(**fields: Any) -> Any:
    """SGLang's own arguments as its launcher resolves them."""
    from sglang.srt.server_args import ServerArgs

    record = ServerArgs(model_path=str(TINY_MOE), device="cpu", **fields)
    if versions.resolving_method() == "resolve_once":
        record.resolve_once()
    return versions.resolved(record)


def test_a_server_with_both_flags_and_a_known_model_is_served() -> None:
    checks.check_server_args(None, server_args())
    checks.check_server_args(None, server_args(moe_a2a_backend="none", moe_runner_backend="auto", ep_size=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_runner_backend": "auto"}, "--moe-runner-backend = 'auto' is not allowed; allowed: megaflux"),
        ({"moe_a2a_backend": "none"}, "--moe-a2a-backend = 'none'"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap: with"),
        ({"enable_single_batch_overlap": True}, "--enable-single-batch-overlap: with"),
        ({"enable_eplb": True}, "--enable-eplb: with .* SGLang would move experts"),
        ({"ep_num_redundant_experts": 2}, "--ep-num-redundant-experts 2: with .* use the option replica_slots"),
        ({"init_expert_location": "map.json"}, "--init-expert-location map.json"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"quantization": "fp8"}, "--quantization fp8"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"lora_paths": ["adapter"]}, "--lora-paths"),
        ({"enable_nvidia_megakernel": True}, "--enable-nvidia-megakernel"),
        ({"enable_amd_monokernel": True}, "--enable-amd-monokernel"),
        ({"enable_paged_experts": True}, "--enable-paged-experts"),
        ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode overlap"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_pdmux": True}, "--enable-pdmux: with .* two batches would be computed at once"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"offload_group_size": 2}, "--offload-group-size 2"),
        ({"tp_size": 1, "ep_size": 1}, "--tp-size = 1 is not allowed; allowed: 2 or more"),
        ({"ep_size": 1}, "--ep-size = 1 is not allowed; allowed: 2, as --tp-size"),
        ({"json_model_override_args": '{"megaflux": {"replica_slots": 9}}'}, r"megaflux\.replica_slots = 9"),
        ({"json_model_override_args": '{"megaflux": {"max_tokens": 100}}'}, "at least 2048"),
        ({"json_model_override_args": '{"megaflux": {"executor": "megakernel"}}'}, "--dtype = 'float32'"),
        ({"json_model_override_args": '{"megaflux": {"min_tokens": 64}}'}, r"megaflux\.min_tokens = 64"),
    ],
)
def test_flags_are_refused_by_name_before_a_scheduler_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MegafluxError, match=message):
        checks.check_server_args(None, server_args(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "MixtralForCausalLM"}, "model class MixtralForCausalLM: it is not known to leave"),
        ({"num_experts": None}, "model class Qwen3MoeForCausalLM"),
        ({"quantization": "fp8"}, "quantization fp8"),
        ({"dtype": torch.float16}, "--dtype = 'float16'"),
        ({"num_experts": 15}, "--tp-size = 2 is not allowed; allowed: a divisor of the model's 15 experts"),
    ],
)
def test_models_are_refused_by_what_is_not_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MegafluxError, match=message):
        checks.check_server_args(None, server_args(model(**changes)))


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 2048),  # one token of each of up to 4096 requests, over two ranks
        ({"chunked_prefill_size": 16384}, 8192),
        ({"chunked_prefill_size": 8192, "dp_size": 2, "enable_dp_attention": True}, 8192),
        ({"chunked_prefill_size": -1}, 8192),
        ({"max_running_requests": 16, "chunked_prefill_size": 63}, 32),
    ],
)
def test_the_largest_batch_of_a_rank_is_what_the_scheduler_may_give_it(changes: dict[str, Any], rows: int) -> None:
    assert choice.rows_a_rank(server_args(**changes)) == rows
    assert choice.settle(server_args(**changes), MegaFluxConfig()).max_tokens == rows


def test_auto_is_the_megakernel_only_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    large = model(dtype=torch.bfloat16, hidden_size=2048, moe_intermediate_size=768, num_experts=128)
    args = server_args(large)
    assert choice.settle(args, MegaFluxConfig()).executor == "staged"
    with pytest.raises(UnsupportedError, match="executor = 'megakernel': this machine has no NVIDIA GPU"):
        choice.settle(args, MegaFluxConfig(executor="megakernel"))
    assert choice.settle(server_args(large, tp_size=1, ep_size=1), MegaFluxConfig()).executor == "reference"
    monkeypatch.setattr(choice, "machine_obstacle", lambda server_args: None)
    monkeypatch.setenv("MEGAFLUX_CALIBRATION", "no file")
    settled = choice.settle(args, MegaFluxConfig())
    assert (settled.executor, settled.max_tokens, settled.min_tokens) == ("megakernel", 2048, 0)
    assert isinstance(settled.gate, GateCosts)
    assert choice.settle(args, MegaFluxConfig(gate=None)).gate is None
    assert choice.settle(args, MegaFluxConfig(block_rows=64)).executor == "staged"
    with pytest.raises(ConfigError, match="block_rows"):
        choice.settle(args, MegaFluxConfig(executor="megakernel", block_rows=64))
    with pytest.raises(ConfigError, match="--disable-cuda-graph"):
        choice.settle(server_args(large, device="cuda", disable_cuda_graph=False), MegaFluxConfig(executor="staged"))


@pytest.mark.parametrize(
    ("decode", "prefill", "captured"),
    [
        ("disabled", "disabled", False),
        ("full", "disabled", True),
        ("disabled", "breakable", True),
        ("full", "tc_piecewise", True),
    ],
)
def test_captured_graphs_are_read_from_sglangs_own_configuration(decode: str, prefill: str, captured: bool) -> None:
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    config = CudaGraphConfig(decode=PhaseConfig(backend=decode), prefill=PhaseConfig(backend=prefill))
    assert choice.uses_graphs(server_args(device="cuda", cuda_graph_config=config)) is captured
    assert not choice.uses_graphs(server_args(device="cpu", cuda_graph_config=config))


def test_sizes_of_a_model_have_several_names() -> None:
    assert choice.num_routed_experts(SimpleNamespace(n_routed_experts=256, num_experts=None)) == 256
    assert choice.num_routed_experts(SimpleNamespace(num_experts=128)) == 128
    assert choice.num_routed_experts(SimpleNamespace(intermediate_size=64)) == 0
    assert choice.expert_size(SimpleNamespace(moe_intermediate_size=768, intermediate_size=6144)) == 768
    assert choice.expert_size(SimpleNamespace(intermediate_size=1536)) == 1536


@pytest.mark.parametrize(
    ("changes", "release", "obstacle"),
    [
        ({}, "4.8.1", None),
        ({"base_gpu_id": 2}, "4.8.1", "NVIDIA B200 is not of the Hopper generation"),
        ({"base_gpu_id": 3}, "4.8.1", "its 2 ranks are not on one node"),
        ({"gpu_id_step": 3}, "4.8.1", None),
        ({"gpu_id_step": 2}, "4.8.1", "NVIDIA B200 is not of the Hopper generation"),
        ({"nnodes": 2}, "4.8.1", "its 2 ranks are not on one node"),
        ({"device": "cpu"}, "4.8.1", "this machine has no NVIDIA GPU"),
        ({}, "4.6.0", "nvidia-cutlass-dsl is 4.6.0, not 4.8.0 or 4.8.1"),  # that of SGLang 0.5.17
    ],
)
def test_the_machine_is_asked_about_the_gpus_that_sglang_takes(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], release: str, obstacle: str | None
) -> None:
    names = ["NVIDIA H200", "NVIDIA H200", "NVIDIA B200", "NVIDIA H200"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 if "H200" in names[device] else 10, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(choice.language, "installed", lambda: release)
    assert choice.machine_obstacle(server_args(**({"device": "cuda"} | changes))) == obstacle


@on_sglang
def test_every_flag_that_is_checked_is_one_of_sglangs_and_served_by_default() -> None:
    if versions.release(versions.engine_version()) < (0, 5, 17):
        pytest.skip("earlier releases have not all of the flags")
    from sglang.srt.server_args import ServerArgs

    defaults = {name: field.default for name, field in inspect.signature(ServerArgs).parameters.items()}
    tables = (checks.SERVED_ARGUMENTS, capture.KNOWN_ROUTES)
    for field, (served, *_) in (entry for table in tables for entry in table.items()):
        if versions.release(versions.engine_version()) < stand_in.FIRST_WITH.get(field, (0, 5, 17)):
            assert field not in defaults
        else:
            assert defaults[field] in served, field
    assert {"base_gpu_id", "gpu_id_step", "nnodes", "cuda_graph_config"} <= set(defaults)


@on_sglang
@pytest.mark.parametrize(
    ("flags", "captured"),
    [
        ({}, True),
        ({"disable_cuda_graph": True}, False),
        ({"disable_prefill_cuda_graph": True}, True),
        ({"disable_prefill_cuda_graph": True, "disable_decode_cuda_graph": True}, False),
    ],
)
def test_sglangs_flags_decide_whether_graphs_are_captured(flags: dict[str, Any], captured: bool) -> None:
    args = resolved_arguments(attention_backend="triton", **flags)
    given = SimpleNamespace(device="cuda", cuda_graph_config=args.cuda_graph_config)
    assert choice.uses_graphs(given) is captured


OURS: dict[str, Any] = {"moe_a2a_backend": "megaflux", "moe_runner_backend": "megaflux", "tp_size": 2, "ep_size": 2}
ON_CPU: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True}


@on_sglang
def test_sglang_itself_refuses_through_the_hook() -> None:
    resolved_arguments(**ON_CPU, **OURS)
    with pytest.raises(UnsupportedError, match="--enable-two-batch-overlap"):
        resolved_arguments(**ON_CPU, **OURS, enable_two_batch_overlap=True)
    with pytest.raises(UnsupportedError, match="--lora-paths"):  # turns adapters on when arguments are resolved
        resolved_arguments(**ON_CPU, **OURS, lora_paths=["adapter=folder"])
    with pytest.raises(ConfigError, match="--ep-size = 1"):
        resolved_arguments(**ON_CPU, **(OURS | {"ep_size": 1}))
    with pytest.raises(ConfigError, match="replica_slots = 99"):
        resolved_arguments(**ON_CPU, **OURS, json_model_override_args=json.dumps({"megaflux": {"replica_slots": 99}}))


@on_sglang
def test_the_launcher_turns_routes_on_and_names_a_folder_for_metrics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named: list[bool] = []
    monkeypatch.setattr(snapshot, "name_folder", lambda: named.append(True))
    assert not resolved_arguments(**ON_CPU, **OURS).enable_return_routed_experts
    assert named == []
    option = json.dumps({"megaflux": {"capture": str(tmp_path)}})
    args = resolved_arguments(**ON_CPU, **OURS, enable_metrics=True, json_model_override_args=option)
    assert args.enable_return_routed_experts
    assert named == [True]


@on_sglang
def test_rows_of_a_rank_are_those_of_its_attention_group() -> None:
    common = ON_CPU | OURS | {"chunked_prefill_size": 8192, "max_running_requests": 16}
    ways: list[dict[str, Any]] = [{"dp_size": 2, "enable_dp_attention": True}]
    if versions.release(versions.engine_version()) >= (0, 5, 22):
        ways.append({"attn_dp_size": 2})
    for way in ways:
        args = resolved_arguments(**common, **way)
        assert (args.chunked_prefill_size, choice.rows_a_rank(args)) == (4096, 4096)
    assert choice.rows_a_rank(resolved_arguments(**common)) == 4096  # one group's, scattered over two ranks


@on_sglang
def test_every_way_in_which_this_sglang_writes_weights_is_hooked() -> None:
    if versions.release(versions.engine_version()) < (0, 5, 16):
        pytest.skip("earlier releases have no class for them")
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    ways = {name for name in vars(WeightUpdater) if name.startswith(("update_weights_", "load_weights_", "end_weight"))}
    assert ways == {target.rpartition(".")[2] for target, *_ in weights.hooks()}


# ---- the layer, on the stand-in --------------------------------------------------------------------------------------


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A layer of 8 experts on one rank, built as a model builds it, its weights loaded."""
    return loaded_layer(monkeypatch)


def loaded_layer(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> torch.nn.Module:
    from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    args = server_args(tp_size=1, ep_size=1, json_model_override_args='{"megaflux": {"block_rows": 4}}')
    monkeypatch.setattr(running, "backend", MoeA2ABackend("megaflux"))
    monkeypatch.setattr(running, "server_args", args)
    monkeypatch.setattr(running, "group", stand_in.Group())
    shape: dict[str, Any] = {"num_experts": 8, "hidden_size": 32, "intermediate_size": 16, "layer_id": 0, "top_k": 2}
    made: torch.nn.Module = get_moe_impl_class(None)(**(shape | changes))
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    made.quant_method.process_weights_after_loading(made)
    return made


def routed(num_rows: int, padding: int = 0) -> tuple[torch.Tensor, Any]:
    """Rows and their routes as SGLang's router gives them; the last ``padding`` rows are marked."""
    generator = torch.Generator().manual_seed(1)
    x, logits = torch.randn(num_rows, 32, generator=generator), torch.randn(num_rows, 8, generator=generator)
    top = logits.softmax(-1).topk(2)
    ids = top.indices.to(torch.int32)
    ids[num_rows - padding :] = -1
    return x, SimpleNamespace(topk_weights=top.values, topk_ids=ids)


@on_stand_in
def test_a_model_without_the_backend_gets_sglangs_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    monkeypatch.setattr(running, "backend", MoeA2ABackend("none"))
    assert get_moe_impl_class(None) is stand_in.FusedMoE


@on_stand_in
@pytest.mark.parametrize(("num_rows", "padding"), [(7, 0), (7, 2), (3, 3), (0, 0)])
def test_the_layer_computes_its_rows_and_ignores_padding(layer: torch.nn.Module, num_rows: int, padding: int) -> None:
    x, topk = routed(num_rows, padding)
    output = layer(x, topk)
    assert output.shape == x.shape
    real = num_rows - padding
    arguments = (x[:real], topk.topk_ids[:real].long(), topk.topk_weights[:real])
    exact = moe_float64(*arguments, layer.w13_weight.data, layer.w2_weight.data)
    np.testing.assert_allclose(output[:real].numpy(), exact, rtol=1e-4, atol=1e-5)


@on_stand_in
def test_a_model_that_builds_its_experts_otherwise_is_refused(layer: torch.nn.Module) -> None:
    with pytest.raises(UnsupportedError, match="builds its experts as FusedMoE"):
        stand_in.FusedMoE(8, 32, 16, layer_id=1)


@on_stand_in
def test_a_layer_is_refused_by_what_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="layer 0: activation gelu is not served"):
        loaded_layer(monkeypatch, activation="gelu")
    with pytest.raises(UnsupportedError, match=r"dtype torch\.float16 is not served"):
        loaded_layer(monkeypatch, params_dtype=torch.float16)


@on_stand_in
def test_every_way_of_updating_weights_drops_replicas_even_if_it_fails(layer: torch.nn.Module) -> None:
    moe, updater = layer.quant_method.replicated_moe, stand_in.WeightUpdater()
    calls = {"disk": ("model", "auto"), "tensor": ([],), "distributed": ([], [], [], "group"), "ipc": (None,)}
    assert tuple(f"update_weights_from_{way}" for way in calls) == weights.METHODS
    for way, arguments in calls.items():
        moe.is_stale = False
        if way == "tensor":
            with pytest.raises(ValueError, match="a loader failed"):
                updater.update_weights_from_tensor(*arguments)
        else:
            assert getattr(updater, f"update_weights_from_{way}")(*arguments)[0]
        assert moe.is_stale, way

    moe.is_stale = False
    layer.quant_method.process_weights_after_loading(layer)
    assert moe.is_stale


@on_stand_in
def test_parameters_that_were_replaced_are_an_error(layer: torch.nn.Module) -> None:
    layer.w13_weight = torch.nn.Parameter(layer.w13_weight.clone(), requires_grad=False)
    with pytest.raises(UnsupportedError, match="its weight tensors were replaced"):
        layer(*routed(2))


class OwnMemory(DeviceExecutor, DeviceLayer):
    """A device executor, as far as where weights live and when it is asked for failures."""

    kind, num_ranks, local_ranks = "megakernel", 1, range(1)
    prepared = 0
    failure: Exception | None = None

    def home_weights(self, layout: SlotLayout, hidden: int, intermediate: int) -> list[ExpertWeights]:
        own = layout.experts_per_rank
        self.home = ExpertWeights(torch.zeros(own, 2 * intermediate, hidden), torch.zeros(own, hidden, intermediate))
        return [self.home]

    def layer(self, layout: SlotLayout, config: MegaFluxConfig, slots: Sequence[ExpertSlots]) -> DeviceLayer:
        self.slots = list(slots)
        return self

    def prepare(self, top_k: int) -> None:
        self.prepared = top_k

    def note_failures(self) -> None:
        pass

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


OwnMemory.__abstractmethods__ = frozenset()  # what the plugin does not call is left out


@on_stand_in
def test_weights_load_into_the_memory_that_the_device_executor_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from megaflux_sglang import ranks

    executor = OwnMemory()
    monkeypatch.setattr(ranks, "select_executor", lambda *args: executor)
    made = loaded_layer(monkeypatch)
    assert made.w13_weight.data_ptr() == executor.home.w13.data_ptr()
    assert torch.equal(made.w2_weight, executor.home.w2)
    assert executor.home.w2.any()
    assert executor.prepared == 2

    waits: list[object] = []
    monkeypatch.setattr(failures, "wait_for_batch", waits.append)
    assert stand_in.Scheduler().process_batch_result("batch", "result") == "result"
    executor.failure = RuntimeError("rank 1 did not answer")
    with pytest.raises(RuntimeError, match="rank 1 did not answer"):
        stand_in.Scheduler().process_batch_result("batch", "late result")
    assert waits == ["result", "late result"]


@on_stand_in
def test_layers_of_a_process_share_their_context_and_rank_0_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from megaflux_sglang import ranks

    text = json.dumps({"megaflux": {"plan_log": str(tmp_path)}})
    args = server_args(tp_size=1, ep_size=1, json_model_override_args=text)
    first, second = stand_in.Group(), stand_in.Group()
    second.rank_in_group = 1
    monkeypatch.setattr(running, "group", first)
    context = ranks.rank_context(args, torch.device("cpu"))
    assert ranks.rank_context(args, torch.device("cpu")) is context
    assert len(context.observers) == 1
    monkeypatch.setattr(running, "group", second)
    assert ranks.rank_context(args, torch.device("cpu")).observers == []


# ---- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "is_named"),
    [
        ({"enable_metrics": True}, True),
        ({}, False),
        ({"enable_metrics": True, "moe_a2a_backend": "deepep"}, False),
        ({"enable_metrics": True, "json_model_override_args": '{"megaflux": {"metrics": false}}'}, False),
    ],
)
def test_a_folder_for_metrics_is_named_where_somebody_asks_for_them(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_named: bool
) -> None:
    named: list[bool] = []
    monkeypatch.setattr(snapshot, "name_folder", lambda: named.append(True))
    metrics.name_folder(None, server_args(**changes))
    assert bool(named) == is_named


def test_answers_show_layers_from_the_moment_that_sglang_prepares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []
    monkeypatch.setattr(registries, "show_layers", lambda: shown.append(True))
    assert metrics.show_layers(object()) is None  # SGLang's arguments stay
    assert shown == [True]


@on_stand_in
def test_a_layer_is_watched_where_a_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(snapshot.FOLDER_VARIABLE, str(tmp_path))
    made = loaded_layer(monkeypatch)
    meter = made.quant_method.context.meter
    made(*routed(5))
    meter.stop()
    (info,) = meter.snapshot().layers
    assert (info.top_k, len(info.home_rank), meter.worker.engine) == (2, 8, "sglang")
    assert meter.snapshot().totals[0][Total.BATCHES] == 1
