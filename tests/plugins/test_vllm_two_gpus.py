"""Real servers on two Hopper GPUs: compiled, with captured graphs, at the sizes of a real model.

Tokens are compared with stock vLLM's in BF16, where two nearly equal tokens may change places; weights are random, so
most tokens lead clearly.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs two NVIDIA GPUs of the Hopper generation", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("vllm", reason="vLLM is not installed")

from megaflux_vllm.choice import HANDOVER_ROWS  # noqa: E402

from tests.plugins.engine_runs import PROMPTS, Server, run_offline, serve  # noqa: E402
from tests.plugins.random_moe import write_checkpoint, write_neighbours  # noqa: E402
from tests.plugins.vllm_smoke import ENOUGH_EQUAL, LONG, verdict  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(300)]

START_S = 250  # a cold machine imports vLLM for minutes
COMMON = ("--dtype", "bfloat16", "--max-model-len", "2048", "--api-server-count", "1", "--no-enable-prefix-caching")
DATA = ("--enable-expert-parallel", "--data-parallel-size", "2", "--distributed-executor-backend", "uni")
FEW_GRAPHS = ("--max-cudagraph-capture-size", "32", "--gpu-memory-utilization", "0.6")
OWN = {"gate": None, "min_tokens": 0}  # no batch is handed over and every plan carried out: few rows move replicas too
Tokens = list[list[int]]


def ask(server: Server) -> Tokens:
    """Greedy tokens: some prompts alone, while the other rank idles; all at once; long ones."""
    alone = [server.complete(prompt) for prompt in PROMPTS[:4]]
    return alone + server.complete_together(PROMPTS) + server.complete_together([LONG] * 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Qwen3-30B-A3B."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "random", num_layers=2)


@pytest.fixture(scope="module")
def stock(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """What stock vLLM answers."""
    log = tmp_path_factory.mktemp("stock") / "server.log"
    with serve([*DATA, *FEW_GRAPHS], log, checkpoint, COMMON, START_S) as server:
        return ask(server)


def backend(**options: Any) -> list[str]:
    """Flags for our backend."""
    return ["--moe-backend", "megaflux", "--additional-config", json.dumps({"megaflux": {"timeout_s": 40} | options})]


def assert_as_stock(tokens: Tokens, stock: Tokens) -> None:
    equal = sum(a[0] == b[0] for a, b in zip(tokens, stock, strict=True))
    assert equal >= ENOUGH_EQUAL * len(stock), verdict(tokens, stock)


@pytest.mark.parametrize(
    ("options", "hands_over"), [({}, True), (OWN | {"replica_slots": 4}, False)], ids=["default", "own kernels"]
)
def test_a_server_with_captured_graphs_answers_as_stock_vllm(
    checkpoint: Path, stock: Tokens, tmp_path: Path, options: dict[str, Any], hands_over: bool
) -> None:
    log = tmp_path / "server.log"
    with serve([*DATA, *FEW_GRAPHS, *backend(**options)], log, checkpoint, COMMON, START_S) as server:
        tokens = ask(server)
        assert server.is_healthy()
    assert_as_stock(tokens, stock)
    said = log.read_text()
    assert "executor 'auto' is 'megakernel' here" in said
    assert "megaflux: executor megakernel, 2 ranks, 2 layers of 128 experts, 64 home" in said
    assert (f"the engine's own kernels for batches of less than {HANDOVER_ROWS} rows" in said) == hands_over


def test_reloaded_weights_reach_replicas_on_tensor_parallel_ranks(checkpoint: Path, tmp_path: Path) -> None:
    other = write_neighbours(checkpoint, tmp_path / "other")
    common = {"dtype": "bfloat16", "enforce_eager": False, "max_model_len": 512, "tensor_parallel_size": 2}
    common |= {"enable_expert_parallel": True, "gpu_memory_utilization": 0.4, "enable_prefix_caching": False}
    ours = {"moe_backend": "megaflux", "additional_config": {"megaflux": OWN | {"timeout_s": 40}}}
    runs = [
        {"name": "ours", "model": str(checkpoint), "options": common | ours, "reload": str(other)},
        {"name": "stock", "model": str(checkpoint), "options": common, "reload": str(other)},
    ]
    tokens = run_offline(runs, tmp_path)
    assert tokens["stock"] != tokens["stock, reloaded"]
    assert_as_stock(tokens["ours"], tokens["stock"])
    assert_as_stock(tokens["ours, reloaded"], tokens["stock, reloaded"])


def engine_processes(log: str) -> Sequence[int]:
    """Process ids of the engine cores, as their log lines name them."""
    return sorted({int(part.split(")")[0]) for part in log.split("EngineCore_DP1 pid=")[1:]})


def test_a_server_ends_when_one_of_its_ranks_dies(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with serve([*DATA, "--enforce-eager", *backend(min_tokens=0)], log, checkpoint, COMMON, START_S) as server:
        server.complete_together(PROMPTS)
        (victim,) = engine_processes(log.read_text())
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while server.is_healthy():
            assert time.monotonic() < deadline, "the server still answers"
            time.sleep(0.5)
