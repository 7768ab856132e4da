"""Real engines on the CPU: tokens equal stock vLLM's, replicas really open, weight updates reach every copy.

One child process runs the engines without HTTP, and one server has two engine processes. Four minutes on two busy
cores.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors.torch")

from tests.oracles.greedy_transformers import greedy_tokens
from tests.plugins.engine_runs import NUM_TOKENS, PROMPTS, TINY_MOE, Server, run_offline, serve
from tests.plugins.random_moe import write_neighbours, write_shared_experts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MEGAFLUX = {"block_rows": 4, "replica_slots": 3}  # small blocks, so that a few rows are worth moving


def options(**more: Any) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for our backend."""
    return {"moe_backend": "megaflux", "additional_config": {"megaflux": MEGAFLUX | more}}


def data_parallel_flags(folder: Path) -> list[str]:
    """Flags of a server of two engine processes, which leaves its plan log in the folder."""
    settings = {"megaflux": MEGAFLUX | {"plan_log": str(folder)}}
    flags = ["--moe-backend", "megaflux", "--enable-expert-parallel", "--data-parallel-size", "2"]
    return [*flags, "--additional-config", json.dumps(settings)]


def plans(folder: Path) -> list[dict[str, Any]]:
    """The records of a plan log."""
    return [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which every expert has the weights of its neighbour."""
    return write_neighbours(TINY_MOE, tmp_path_factory.mktemp("models") / "other-weights")


@pytest.fixture(scope="module")
def shared_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose layers have a shared expert beside the routed ones."""
    return write_shared_experts(tmp_path_factory.mktemp("models") / "shared-experts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the offline engines leave their plan logs."""
    return tmp_path_factory.mktemp("offline")


@pytest.fixture(scope="module")
def offline(folder: Path, other_weights: Path, shared_experts: Path) -> dict[str, list[list[int]]]:
    """Tokens of every engine that needs no HTTP."""
    split = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    return run_offline(
        [
            {"name": "stock", "model": str(TINY_MOE), "options": {}},
            {"name": "stock, other weights", "model": str(other_weights), "options": {}},
            {"name": "one process", "model": str(TINY_MOE), "options": options()},
            {
                "name": "tensor parallel",
                "model": str(TINY_MOE),
                "options": split | options(plan_log=str(folder / "tensor-parallel")),
                "reload": str(other_weights),
            },
            {"name": "tensor parallel, fixed", "model": str(TINY_MOE), "options": split | options(replica_slots=0)},
            {"name": "shared experts", "model": str(shared_experts), "options": split | options()},
        ],
        folder,
    )


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server of two engine processes, and the folder of its plan log."""
    folder = tmp_path_factory.mktemp("data-parallel")
    with serve(data_parallel_flags(folder), folder / "server.log") as server:
        yield server, folder


def test_one_process_gives_the_tokens_of_stock_vllm(offline: dict[str, list[list[int]]]) -> None:
    assert offline["one process"] == offline["stock"]


def test_tensor_and_expert_parallel_ranks_give_the_tokens_of_stock_vllm(offline: dict[str, list[list[int]]]) -> None:
    assert offline["tensor parallel"] == offline["stock"]


def test_replicas_open_and_do_not_change_a_token(offline: dict[str, list[list[int]]], folder: Path) -> None:
    assert offline["tensor parallel"] == offline["tensor parallel, fixed"]
    assert sum(plan["replicas"] for plan in plans(folder / "tensor-parallel")) > 0


def test_reloaded_weights_reach_every_replica(offline: dict[str, list[list[int]]]) -> None:
    assert offline["stock, other weights"] != offline["stock"]
    assert offline["tensor parallel, reloaded"] == offline["stock, other weights"]


def test_shared_experts_are_added_once(offline: dict[str, list[list[int]]], shared_experts: Path) -> None:
    assert offline["shared experts"] == greedy_tokens(shared_experts, PROMPTS, NUM_TOKENS)


def test_data_and_expert_parallel_processes_give_the_tokens_of_stock_vllm(
    offline: dict[str, list[list[int]]], data_parallel: tuple[Server, Path]
) -> None:
    server, folder = data_parallel
    one_by_one = [server.complete(prompt) for prompt in PROMPTS]  # the other engine idles with one dummy row a step
    assert one_by_one == offline["stock"]
    records = plans(folder)
    assert {plan["tokens"] for plan in records} >= {2}  # a decoding engine and an idle one
    assert sum(plan["replicas"] for plan in records) > 0
    assert all(max(plan["loads"]) <= max(plan["fixed_loads"]) for plan in records)


def test_uneven_load_of_concurrent_requests_gives_the_same_tokens(
    offline: dict[str, list[list[int]]], data_parallel: tuple[Server, Path]
) -> None:
    server, _ = data_parallel
    for count in (len(PROMPTS), 3):
        assert server.complete_together(PROMPTS[:count]) == offline["stock"][:count]
    assert server.is_healthy()


def test_four_ranks_of_both_kinds_give_the_tokens_of_stock_vllm(
    offline: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    with serve([*data_parallel_flags(tmp_path), "--tensor-parallel-size", "2"], tmp_path / "server.log") as server:
        assert [server.complete(prompt) for prompt in PROMPTS] == offline["stock"]
        assert server.complete_together(PROMPTS) == offline["stock"]
    records = plans(tmp_path)
    assert {len(plan["loads"]) for plan in records} == {4}
    assert sum(plan["replicas"] for plan in records) > 0
