"""Real engines of two ranks on Hopper GPUs: compiled, with captured graphs, at the sizes of a real model.

The ranks have a GPU each, or take turns on one where there is no second (``shared_gpu``).

A start takes most of a minute, nearly all of it on a few CPU cores, so all engines start side by side: servers that are
asked one after the other, one whose rank is killed when those have answered, and offline engines of tensor-parallel
ranks. Every test waits for its own engines and gets their errors, which show parts of the engine's log.

Tokens are compared with stock vLLM's in BF16, where two nearly equal tokens may change places; weights are random, so
most tokens lead clearly.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA GPU of the Hopper generation, better two", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("vllm", reason="vLLM is not installed")

from megaflux_vllm.choice import HANDOVER_ROWS  # noqa: E402

from tests.plugins import shared_gpu  # noqa: E402
from tests.plugins.engine_runs import (  # noqa: E402
    ENVIRONMENT,
    NO_FUSED_ALLREDUCE,
    ONE_PROCESS,
    PROMPTS,
    Server,
    run_offline,
    serve,
)
from tests.plugins.random_moe import write_checkpoint, write_neighbours  # noqa: E402
from tests.plugins.vllm_smoke import ENOUGH_EQUAL, LONG, verdict  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(300)]

START_S, OFFLINE_S = 220, 260  # the longest that a start and an offline engine may take; a cold machine imports slowly
KV_CACHE_BYTES = 1 << 30  # stated, since what others take meanwhile would count as an engine's own; 256K tokens
OWN = {"gate": None, "min_tokens": 0}  # no batch is handed over and every plan carried out: few rows move replicas too
Tokens = list[list[int]]


def backend(**options: Any) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for our backend."""
    return {"moe_backend": "megaflux", "additional_config": {"megaflux": {"timeout_s": 60} | options}}


def flags(**options: Any) -> list[str]:
    """Flags of a server for our backend."""
    arguments = backend(**options)
    return [
        "--moe-backend",
        arguments["moe_backend"],
        "--additional-config",
        json.dumps(arguments["additional_config"]),
    ]


COMMON = ("--dtype", "bfloat16", "--max-model-len", "2048", "--api-server-count", "1", "--no-enable-prefix-caching")
COMMON += ("--enable-expert-parallel", "--data-parallel-size", "2", "--distributed-executor-backend", "uni")
COMMON += ("--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--gpu-memory-utilization", "0.05")
FEW_GRAPHS = ("--max-cudagraph-capture-size", "32")
SERVERS = {
    "stock": [*FEW_GRAPHS],
    "default": [*FEW_GRAPHS, *flags()],
    "own-kernels": [*FEW_GRAPHS, *flags(**OWN, replica_slots=4)],
}
"""Servers that are asked, by name: their flags beside ``COMMON``."""
LOSES_A_RANK = ["--enforce-eager", *flags(min_tokens=0)]
OFFLINE = {"stock": {}, "ours": backend(**OWN)}
"""Engines of two tensor-parallel ranks, by name: their arguments beside ``OFFLINE_COMMON``."""
OFFLINE_COMMON = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "max_model_len": 512,
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": KV_CACHE_BYTES,
    "gpu_memory_utilization": 0.05,
    "compilation_config": NO_FUSED_ALLREDUCE,
}


@dataclass(frozen=True)
class Asked:
    """What a server has answered, and what it has printed until its end."""

    tokens: Tokens
    log: str


@dataclass(frozen=True)
class Engines:
    """Engines that start side by side; a result is there when its engine has ended, or raises its error.

    Attributes:
        servers: by name, as ``SERVERS``.
        losing: the server that loses a rank.
        offline: tokens by name, as ``OFFLINE``; those after other weights were loaded under ``<name>, reloaded``.
    """

    servers: dict[str, Future[Asked]]
    losing: Future[None]
    offline: dict[str, Future[dict[str, Tokens]]]


@dataclass(frozen=True)
class Place:
    """Where engines find their model and leave their files.

    Attributes:
        checkpoint: the model.
        caches: for what vLLM compiles. Each engine has a folder there: vLLM replaces some files of a cache whole and
            writes others in place.
        logs: kept by pytest; ``<name>.log`` is a server's, ``offline-<name>`` a folder of an offline engine.
        machine: environment variables that this machine asks for.
    """

    checkpoint: Path
    caches: Path
    logs: Path
    machine: dict[str, str]

    def environment(self, name: str) -> dict[str, str]:
        """The environment that gives an engine its devices and its cache."""
        return ENVIRONMENT | self.machine | {"VLLM_CACHE_ROOT": str(self.caches / name)}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All engines, starting; the model is two layers of Qwen3-30B-A3B."""
    logs = tmp_path_factory.mktemp("engines")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(SERVERS) + 1 + len(OFFLINE)) as pool:
        folder, turn = Path(scratch), Lock()
        machine = shared_gpu.environment(folder / "shared") if torch.cuda.device_count() == 1 else {}
        place = Place(write_checkpoint(folder / "random", num_layers=2), folder / "caches", logs, machine)
        servers = {name: pool.submit(ask_server, name, place, turn) for name in SERVERS}
        losing = pool.submit(lose_a_rank, place, list(servers.values()))
        other = write_neighbours(place.checkpoint, folder / "other")
        offline = {name: pool.submit(ask_offline, name, place, other) for name in OFFLINE}
        yield Engines(servers, losing, offline)


def ask_server(name: str, place: Place, turn: Lock) -> Asked:
    """The life of a server that is asked when it is its turn."""
    log, begin = place.logs / f"{name}.log", time.monotonic()
    with serve(SERVERS[name], log, place.checkpoint, COMMON, START_S, place.environment(name)) as server:
        started = time.monotonic()
        with turn:
            tokens = ask(server)
            assert server.is_healthy()
        print(f"{name}: started in {started - begin:.0f} s, has answered {time.monotonic() - started:.0f} s later")
    return Asked(tokens, log.read_text())


def ask(server: Server) -> Tokens:
    """Greedy tokens: some prompts alone, while the other rank idles; all at once; long ones."""
    alone = [server.complete(prompt) for prompt in PROMPTS[:4]]
    return alone + server.complete_together(PROMPTS) + server.complete_together([LONG] * 3)


def lose_a_rank(place: Place, others: Sequence[Future[Asked]]) -> None:
    """The life of a server whose rank is killed as soon as the others have ended, which it must not disturb."""
    log = place.logs / "loses-a-rank.log"
    with serve(LOSES_A_RANK, log, place.checkpoint, COMMON, START_S, place.environment("loses-a-rank")) as server:
        wait(others)
        server.complete_together(PROMPTS)
        (victim,) = engine_processes(log.read_text())
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        while server.is_healthy():
            assert time.monotonic() < killed + 90, "the server still answers"
            time.sleep(0.5)
        print(f"loses-a-rank: unhealthy {time.monotonic() - killed:.0f} s after its rank was killed")


def engine_processes(log: str) -> Sequence[int]:
    """Process ids of the engine cores, as their log lines name them."""
    return sorted({int(part.split(")")[0]) for part in log.split("EngineCore_DP1 pid=")[1:]})


def ask_offline(name: str, place: Place, other: Path) -> dict[str, Tokens]:
    """Tokens of an offline engine, before and after it has loaded other weights."""
    folder, begin = place.logs / f"offline-{name}", time.monotonic()
    folder.mkdir()
    run = {
        "name": name,
        "model": str(place.checkpoint),
        "options": OFFLINE_COMMON | OFFLINE[name],
        "reload": str(other),
    }
    tokens = run_offline([run], folder, OFFLINE_S, ONE_PROCESS | place.environment(folder.name))
    print(f"{folder.name}: done in {time.monotonic() - begin:.0f} s")
    return tokens


def assert_as_stock(tokens: Tokens, stock: Tokens) -> None:
    equal = sum(a[0] == b[0] for a, b in zip(tokens, stock, strict=True))
    assert equal >= ENOUGH_EQUAL * len(stock), verdict(tokens, stock)


@pytest.mark.parametrize(("name", "hands_over"), [("default", True), ("own-kernels", False)])
def test_a_server_with_captured_graphs_answers_as_stock_vllm(engines: Engines, name: str, hands_over: bool) -> None:
    ours = engines.servers[name].result()
    assert "executor 'auto' is 'megakernel' here" in ours.log
    assert "megaflux: executor megakernel, 2 ranks, 2 layers of 128 experts, 64 home" in ours.log
    assert (f"the engine's own kernels for batches of less than {HANDOVER_ROWS} rows" in ours.log) == hands_over
    assert_as_stock(ours.tokens, engines.servers["stock"].result().tokens)


def test_reloaded_weights_reach_replicas_on_tensor_parallel_ranks(engines: Engines) -> None:
    tokens = engines.offline["ours"].result() | engines.offline["stock"].result()
    assert tokens["stock"] != tokens["stock, reloaded"]
    assert_as_stock(tokens["ours"], tokens["stock"])
    assert_as_stock(tokens["ours, reloaded"], tokens["stock, reloaded"])


def test_a_server_ends_when_one_of_its_ranks_dies(engines: Engines) -> None:
    engines.losing.result()
