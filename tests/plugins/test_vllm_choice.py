"""What the front end settles for all ranks: the executor that ``auto`` means, limits of rows, the gate's costs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import megaflux_vllm
from megaflux_vllm import choice
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.planning.calibration import CALIBRATION_VARIABLE, store_costs
from megaflux_serve.planning.gate import GateCosts
from tests.plugins.test_vllm_refusals import TWO_RANKS, front_end, megaflux

BF16 = ["--dtype", "bfloat16", *TWO_RANKS]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    megaflux_vllm.register()


@pytest.fixture(autouse=True)
def _no_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CALIBRATION_VARIABLE, str(tmp_path / "calibration.json"))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes vLLM's platform say that it is a node of GPUs; configurations have to be made before."""

    def say(family: int = 90, linked: bool = True) -> None:
        answers = {
            "is_cuda": lambda: True,
            "is_device_capability_family": lambda wanted: wanted == family,
            "get_device_name": lambda: "NVIDIA A100",
            "device_count": lambda: 2,
            "is_fully_connected": lambda devices: linked,
            "device_id_to_physical_device_id": lambda index: index,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(type(current_platform), name, staticmethod(answer), raising=False)

    return say


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can run the megakernel, as far as the front end asks."""
    monkeypatch.setattr(choice, "machine_obstacle", lambda num_ranks, device_ids: None)


def settled(config: VllmConfig) -> MegaFluxConfig:
    """The options that every rank reads."""
    return MegaFluxConfig.parse(config.additional_config["megaflux"])


def chosen(*flags: str, num_ranks: int = 2, **options: Any) -> MegaFluxConfig:
    """What ``settle`` makes of options; the configuration is made for the CPU, which refuses captured graphs."""
    return choice.settle(front_end(*flags), MegaFluxConfig.parse(options), num_ranks)


def test_auto_is_the_megakernel_where_model_and_machine_allow(pretend: Callable[..., None]) -> None:
    config = front_end(*BF16, "--max-num-batched-tokens", "2048")
    pretend()
    options = choice.settle(config, MegaFluxConfig(), 2)
    assert (options.executor, options.max_tokens) == ("megakernel", 1024)  # of two ranks that share rows
    assert options.min_tokens == choice.HANDOVER_ROWS
    assert isinstance(options.gate, GateCosts)


@pytest.mark.parametrize(
    ("says", "flags", "options", "reason"),
    [
        ({"family": 80}, BF16, {}, "NVIDIA A100 is not of the Hopper generation"),
        ({"linked": False}, BF16, {}, "the GPUs are not all connected by NVLink"),
        ({}, TWO_RANKS, {}, "--dtype = 'float32' is not allowed; allowed: bfloat16"),
        ({}, BF16, {"block_rows": 16}, "block_rows = 16 is not allowed; allowed: 128"),
    ],
)
def test_the_log_says_why_auto_is_not_the_megakernel(
    pretend: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    says: dict[str, Any],
    flags: list[str],
    options: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM's own handler would keep it from caplog
    config = front_end(*flags)
    pretend(**says)
    caplog.set_level(logging.INFO, "vllm")
    settled = choice.settle(config, MegaFluxConfig.parse(options), 2)
    assert (settled.executor, settled.gate, settled.min_tokens) == ("staged", "auto", 0)
    assert f"executor 'auto' is 'staged' here, not 'megakernel': {reason}" in caplog.text


def test_more_ranks_than_a_node_has_gpus_are_an_obstacle(pretend: Callable[..., None]) -> None:
    pretend()
    assert choice.machine_obstacle(2) is None
    assert choice.machine_obstacle(4) == "4 ranks do not fit the 2 GPUs of this node"


def test_links_are_looked_for_between_the_gpus_that_the_ranks_get(
    pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    monkeypatch.setattr(type(current_platform), "is_fully_connected", staticmethod(lambda devices: devices == [4, 5]))
    assert choice.machine_obstacle(2, [4, 5]) is None
    for device_ids in (None, [4, 6]):
        assert choice.machine_obstacle(2, device_ids) == "the GPUs are not all connected by NVLink"


@pytest.mark.parametrize(
    ("release", "obstacle"),
    [
        ("4.6.0", "nvidia-cutlass-dsl is 4.6.0, not 4.8.0 or 4.8.1"),  # that of vLLM 0.26
        ("4.8.0", None),  # that of vLLM 0.32 and 0.33
        (None, "nvidia-cutlass-dsl is not installed"),
    ],
)
def test_a_kernel_language_that_kernels_do_not_compile_with_is_an_obstacle(
    pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch, release: str | None, obstacle: str | None
) -> None:
    pretend()
    monkeypatch.setattr(choice.language, "installed", lambda: release)
    assert choice.machine_obstacle(2) == obstacle


def test_the_megakernel_asked_for_by_name_is_refused_before_an_engine_starts() -> None:
    message = "executor = 'megakernel': this machine has no NVIDIA GPU; leave it out, and the log says"
    with pytest.raises(UnsupportedError, match=message):
        front_end(*BF16, *megaflux(executor="megakernel"))


@pytest.mark.usefixtures("hopper")
def test_the_limit_of_rows_is_at_least_what_vllm_may_schedule_on_a_rank() -> None:
    flags = [*BF16, "--max-num-batched-tokens", "2048"]
    assert chosen(*flags, executor="megakernel", max_tokens=1024).max_tokens == 1024
    with pytest.raises(ConfigError, match="max_tokens = 1023 is not allowed; allowed: null, or at least 1024"):
        chosen(*flags, executor="megakernel", max_tokens=1023)


@pytest.mark.usefixtures("hopper")
def test_plans_of_the_megakernel_may_be_logged_where_no_graphs_are_captured() -> None:
    assert chosen(*BF16, executor="megakernel", plan_log="plans").plan_log == Path("plans")


@pytest.mark.usefixtures("hopper")
def test_sizes_that_the_configuration_does_not_say_are_left_to_the_layers(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "size_of", lambda config, names: None)
    options = chosen(*BF16, executor="megakernel")
    assert (options.executor, options.gate) == ("megakernel", None)
    assert "the gate is open" in log.text


def test_what_is_settled_travels_with_the_configuration() -> None:
    options = settled(front_end(*TWO_RANKS, *megaflux(replica_slots=3, plan_log="plans")))
    assert (options.executor, options.replica_slots, str(options.plan_log)) == ("staged", 3, "plans")
    json.dumps(options.model_dump(mode="json"))


@pytest.mark.usefixtures("hopper")
def test_measured_costs_are_preferred_to_estimates() -> None:
    config = front_end(*BF16, *megaflux(executor="megakernel"))
    estimated, measured = settled(config).gate, GateCosts(1, 2, 3, 4)
    assert isinstance(estimated, GateCosts)
    assert estimated.replica_ns > 10 * estimated.block_ns  # moving weights is dear
    store_costs("128x64", measured, "NVIDIA H200")
    assert choice.gate_costs(config) == measured


@pytest.mark.parametrize("gate", [None, {"block_ns": 5, "replica_ns": 6, "plan_ns": 7, "hidden_permille": 8}])
@pytest.mark.usefixtures("hopper")
def test_a_gate_that_was_given_is_kept(gate: dict[str, int] | None) -> None:
    options = settled(front_end(*BF16, *megaflux(executor="megakernel", gate=gate)))
    assert options.gate == (gate if gate is None else GateCosts(**gate))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged; vLLM's own handler would keep it from caplog."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm")
    return caplog


OTHER_BACKEND = ["--dtype", "bfloat16", "--enable-expert-parallel", "--data-parallel-size", "2"]
OTHER_BACKEND += ["--all2all-backend", "deepep_low_latency"]


@pytest.mark.parametrize("executor", ["auto", "megakernel"])
@pytest.mark.parametrize(("given", "settles_at"), [(None, choice.HANDOVER_ROWS), (0, 0), (64, 64)])
@pytest.mark.usefixtures("hopper")
def test_small_batches_are_handed_over_unless_told_otherwise(
    log: pytest.LogCaptureFixture, executor: str, given: int | None, settles_at: int
) -> None:
    assert chosen(*BF16, executor=executor, min_tokens=given).min_tokens == settles_at
    assert settled(front_end(*BF16, *megaflux(executor=executor, min_tokens=given))).min_tokens == settles_at
    assert "not handed over" not in log.text


@pytest.mark.parametrize(("executor", "num_ranks"), [("staged", 2), ("reference", 1)])
def test_executors_of_the_host_compute_every_batch(
    log: pytest.LogCaptureFixture, executor: str, num_ranks: int
) -> None:
    assert chosen(*TWO_RANKS, num_ranks=num_ranks, executor=executor).min_tokens == 0
    assert "not handed over" not in log.text  # nothing that one could change
    with pytest.raises(ConfigError, match=f"min_tokens = 64 is not allowed; allowed: 0 with executor '{executor}'"):
        chosen(*TWO_RANKS, num_ranks=num_ranks, executor=executor, min_tokens=64)


@pytest.mark.parametrize(
    ("flags", "is_invariant", "reason"),
    [
        (
            OTHER_BACKEND,
            "0",
            "--all2all-backend = 'deepep_low_latency' is not allowed; allowed: allgather_reducescatter",
        ),
        (BF16, "1", "allowed: 0 with VLLM_BATCH_INVARIANT"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_where_vllm_must_not_take_small_batches_the_log_says_why_and_a_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, flags: list[str], is_invariant: str, reason: str
) -> None:
    config = front_end(*flags)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", is_invariant)
    assert choice.settle(config, MegaFluxConfig(executor="megakernel"), 2).min_tokens == 0
    assert "small batches are not handed over to vLLM's kernels: " in log.text
    assert reason in log.text
    assert choice.settle(config, MegaFluxConfig(executor="megakernel", min_tokens=0), 2).min_tokens == 0
    with pytest.raises(ConfigError, match=reason):
        choice.settle(config, MegaFluxConfig(executor="megakernel", min_tokens=64), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 17, "num_experts": 32}, "top_k = 17 is not allowed; allowed: 1 to 16"),
        ({"moe_intermediate_size": 96}, "intermediate = 96 is not allowed; allowed: a multiple of 64"),
    ],
)
def test_sizes_that_the_kernels_cannot_serve_are_named_before_an_engine_starts(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    from tests.plugins.test_vllm_refusals import changed_model

    with pytest.raises(UnsupportedError, match=message):
        front_end(*BF16, *megaflux(executor="megakernel"), model=changed_model(tmp_path, **changes))


@pytest.mark.parametrize(
    ("sizes", "size"),
    [
        ({"moe_intermediate_size": 64, "intermediate_size": 128}, 64),
        ({"moe_intermediate_size": None, "intermediate_size": 128}, 128),
        ({"moe_intermediate_size": [64, 64, 64]}, 64),  # a layer each, as in Hunyuan's configuration
        ({"moe_intermediate_size": [64, 32]}, None),  # text and pictures, as in Ernie's
        ({}, None),
    ],
)
def test_the_size_of_experts_is_a_number_that_all_layers_share(sizes: dict[str, Any], size: int | None) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**sizes)))
    assert choice.size_of(config, choice.INTERMEDIATE_SIZES) == size  # type: ignore[arg-type]
