"""What ``--moe-backend megaflux`` refuses, as a user would meet it: on vLLM's own command line, before weights load."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import megaflux_vllm
import torch
from megaflux_vllm import choice
from megaflux_vllm.checks import check_config, check_layer
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.utils.argparse_utils import FlexibleArgumentParser

from megaflux_serve.errors import ConfigError, MegafluxError, UnsupportedError
from tests.plugins.engine_runs import TINY_MOE
from tests.plugins.vllm_configs import moe_config, parallel_config

TWO_RANKS = ["--enable-expert-parallel", "--tensor-parallel-size", "2"]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    megaflux_vllm.register()


def front_end(*flags: str, model: Path = TINY_MOE, backend: str = "megaflux") -> VllmConfig:
    """What ``vllm serve`` does with its command line before it starts an engine process."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    always = ["--model", str(model), "--moe-backend", backend, "--enforce-eager", "--dtype", "float32"]
    return EngineArgs.from_cli_args(parser.parse_args([*always, *flags])).create_engine_config()


def megaflux(**options: Any) -> list[str]:
    """``--additional-config`` with our options."""
    return ["--additional-config", json.dumps({"megaflux": options})]


@pytest.mark.parametrize("flags", [[], TWO_RANKS, [*TWO_RANKS, *megaflux(replica_slots=8, block_rows=16)]])
def test_what_is_served_passes(flags: list[str]) -> None:
    assert front_end(*flags).kernel_config.moe_backend == "megaflux"


def test_a_wrong_backend_is_refused_by_vllm_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        front_end(backend="nonsense")
    said = capsys.readouterr().err
    assert "invalid choice: 'nonsense'" in said
    assert "triton" in said
    assert "megaflux" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (megaflux(replica_slots=-1), "megaflux.replica_slots = -1 is not allowed; allowed: an integer of at least 0"),
        ([*TWO_RANKS, *megaflux(replica_slots=9)], "megaflux.replica_slots = 9 is not allowed; allowed: 0 to 8"),
        (megaflux(block_rows=129), "megaflux.block_rows = 129 is not allowed; allowed: an integer from 1 to 128"),
        (megaflux(slots=1), "megaflux.slots = 1 is not allowed; allowed: one of the options executor, replica_slots"),
        (["--additional-config", '{"megaflux": 3}'], "megaflux = 3 is not allowed; allowed: an object with the keys"),
        (["--tensor-parallel-size", "2"], "--enable-expert-parallel = False is not allowed"),
        (["--dtype", "float16"], "--dtype = 'float16' is not allowed; allowed: float32 or bfloat16"),
        (["--no-enforce-eager"], "--enforce-eager = False is not allowed"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_what_is(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        front_end(*flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([*TWO_RANKS, "--enable-eplb"], "--enable-eplb"),
        pytest.param(
            ["--enable-fault-tolerance"],
            "--enable-fault-tolerance",
            marks=pytest.mark.skipif(
                not hasattr(EngineArgs, "enable_fault_tolerance"), reason="vLLM 0.26 has no such flag"
            ),
        ),
        (["--enable-lora"], "--enable-lora"),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], "--speculative-config"),
        (["--spec-method", "ngram", "--spec-tokens", "2"], "--spec-method ngram"),
        (["--spec-tokens", "2"], "--spec-tokens 2"),
        (["--spec-model", "draft"], "--spec-model draft"),
        (["--enable-dbo"], "--enable-dbo"),
        (["--ubatch-size", "2"], "--ubatch-size 2"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2"),
        (["--quantization", "fp8"], "--quantization fp8"),
        (["--cpu-offload-gb", "1"], "--cpu-offload-gb 1"),
        (["--offload-group-size", "2"], "--offload-group-size 2"),
    ],
)
def test_a_feature_that_is_not_served_is_named_with_the_reason(flags: list[str], named: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(named)):
        front_end(*flags)


@pytest.mark.parametrize("flags", [megaflux(slots=1), ["--enable-lora"]], ids=["option", "flag"])
def test_flags_are_refused_before_vllm_reads_the_model(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(MegafluxError, match=r"megaflux\.slots|--enable-lora"):
        front_end(*flags, model=tmp_path / "no model")


def changed_model(folder: Path, **changes: Any) -> Path:
    """The configuration of tiny-moe with some values changed; no weights are needed."""
    shutil.copytree(TINY_MOE, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "float32"], "--dtype = 'float32' is not allowed; allowed: bfloat16 with executor"),
        (megaflux(block_rows=64), "megaflux.block_rows = 64 is not allowed; allowed: 128"),
        (
            megaflux(max_tokens=1000),
            "megaflux.max_tokens = 1000 is not allowed; allowed: null, or at least 1024, the rows",
        ),
        (["--no-enforce-eager", *megaflux(plan_log="plans")], "megaflux.plan_log = 'plans' is not allowed"),
    ],
)
def test_limits_of_the_megakernel_are_named(flags: list[str], message: str) -> None:
    options = json.loads(flags[-1])["megaflux"] if "--additional-config" in flags else {}
    sized = ["--dtype", "bfloat16", "--max-num-batched-tokens", "2048", *TWO_RANKS]
    with pytest.raises(ConfigError, match=re.escape(message)):
        front_end(*sized, *flags, *megaflux(executor="megakernel", **options))


def test_the_megakernel_needs_no_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "machine_obstacle", lambda num_ranks, device_ids: None)
    front_end("--dtype", "bfloat16", "--no-enforce-eager", *megaflux(executor="megakernel"))


def test_experts_that_ranks_do_not_divide_are_named(tmp_path: Path) -> None:
    flags = ["--enable-expert-parallel", "--tensor-parallel-size", "4"]
    with pytest.raises(ConfigError, match=r"= 4 is not allowed; allowed: a divisor of the model's 10 experts"):
        front_end(*flags, model=changed_model(tmp_path, num_experts=10))


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    with pytest.raises(UnsupportedError, match="quantization fp8"):
        front_end("--dtype", "bfloat16", model=changed_model(tmp_path, quantization_config=quantization))


def test_a_dense_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "get_num_experts", lambda self: 0)  # inspecting another model takes long
    with pytest.raises(UnsupportedError, match="has no routed experts"):
        front_end()


def test_a_checkpoint_that_brings_a_draft_model_is_refused() -> None:
    config = front_end()
    config.speculative_config = object()  # vLLM sets it for a checkpoint of a speculator, without a flag
    with pytest.raises(UnsupportedError, match="a checkpoint with a draft model"):
        check_config(config)


def test_other_backends_are_not_checked() -> None:
    assert front_end("--no-enforce-eager", *megaflux(replica_slots=-1), backend="auto") is not None


def test_a_layer_that_is_served_passes() -> None:
    check_layer("layer", moe_config(), None, weights_on_input=False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation": MoEActivation.GELU}, "activation gelu"),
        ({"has_bias": True}, "expert biases"),
        ({"is_lora_enabled": True}, "LoRA adapters"),
        ({"swiglu_limit": 7.0}, "a clamped SwiGLU"),
        ({"in_dtype": torch.float16}, "dtype torch.float16"),
        ({"num_logical_experts": 14}, "redundant or fused shared experts"),
        ({"skip_final_all_reduce": True}, "a reduction that the model does itself"),
        ({"moe_parallel_config": parallel_config(enable_eplb=True)}, "EPLB"),
        ({"moe_parallel_config": parallel_config(tp_size=2)}, "tensor-parallel experts"),
        ({"moe_parallel_config": parallel_config(pcp_size=2)}, "prefill context parallelism"),
    ],
)
def test_a_layer_that_is_not_served_is_named_with_the_property(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(MegafluxError, match=rf"layer model\.layers\.0.*{re.escape(named)}"):
        check_layer("model.layers.0", moe_config(**changes), None, weights_on_input=False)


def test_quantized_layers_and_weights_on_the_input_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="quantization fp8"):
        check_layer("layer", moe_config(), "fp8", weights_on_input=False)
    with pytest.raises(UnsupportedError, match="router weights on the input"):
        check_layer("layer", moe_config(), None, weights_on_input=True)


def test_the_backend_may_be_named_in_the_kernel_config_and_is_checked_there() -> None:
    named = ["--kernel-config", '{"moe_backend": "megaflux"}']
    assert front_end(*named, backend="auto").kernel_config.moe_backend == "megaflux"
    with pytest.raises(UnsupportedError, match="--enable-lora"):
        front_end(*named, "--enable-lora", backend="auto")
