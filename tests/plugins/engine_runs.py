"""Real vLLM engines for tests: a server in processes of its own, and offline engines in one child process.

``MEGAFLUX_VLLM_PYTHON`` names the interpreter of another environment with vLLM and this project, to test another
release; the default is the interpreter that runs the tests. Run as a script, this file is the child process.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.plugins.processes import PROJECT, HttpServer, run_script, serving

TINY_MOE = PROJECT / "models" / "tiny-moe"
PYTHON = os.environ.get("MEGAFLUX_VLLM_PYTHON", sys.executable)
NUM_TOKENS = 24
START_TIMEOUT_S = 280
OFFLINE_TIMEOUT_S = 600  # six engines, one after the other
_ports = iter(random.sample(range(15_000, 30_000), 15_000))  # at random, for another run of the tests beside this one
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles itself at the first start; greedy answers do not need it
    # A program that uses NVLink multicast can put shared GPUs out of service.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
NO_FUSED_ALLREDUCE = {"pass_config": {"fuse_allreduce_rms": False}}
"""``compilation_config`` of tensor-parallel engines: without FlashInfer's all-reduce, which uses multicast."""
ONE_PROCESS = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
COMMON = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}  # float32: tokens have to be equal
COMMON_FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--api-server-count", "1")

PROMPTS = [
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "The import statement combines two operations: it searches for the named module, then it binds",
    "If a class defines a slot also defined in a base class,",
    "12 + 30 =",
    "81 - 64 = 17\n7 + 8 = 15\n45 + 45 =",
    "17 + 4 = 21 17 + 4 = 21 17 + 4 = 21 17 + 4 =",
    "a",
    "def f(x): return 3 + x  # adds three. What is 3 + 4?",
    "naïve café — ∑ 数学",
]


class Server(HttpServer):
    """A running ``vllm serve``.

    Args:
        url: where it listens.
        model: the name it serves.
    """

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url)
        self.model = model

    def body(self, prompt: str, **more: Any) -> dict[str, Any]:
        """A request for greedy tokens after a prompt; ``more`` is added or takes the place of what is there."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        return {**asked, "return_token_ids": True, **more}

    def complete(self, prompt: str) -> list[int]:
        """Greedy tokens after the prompt."""
        tokens: list[int] = self.post("/v1/completions", self.body(prompt))["choices"][0]["token_ids"]
        return tokens

    def complete_together(self, prompts: Sequence[str]) -> list[list[int]]:
        """Greedy tokens after each prompt, all sent at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.complete, prompts))


@contextmanager
def serve(
    options: Sequence[str],
    log: Path,
    model: Path = TINY_MOE,
    common: Sequence[str] = COMMON_FLAGS,
    start_timeout_s: float = START_TIMEOUT_S,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Iterator[Server]:
    """``vllm serve`` on a free port of this machine, stopped at the end with all its processes.

    Servers may start side by side, each in a thread.

    Args:
        options: command-line options beside ``common``.
        log: file that gets what the server prints.
        model: checkpoint folder.
        common: options that every test of a kind wants.
        start_timeout_s: the longest wait for the first answer.
        environment: beside that of this process.

    Raises:
        RuntimeError: the server ended or did not answer in time; carries parts of the log.
    """
    port = server_port()
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), *common, *options]
    server = Server(f"http://127.0.0.1:{port}", str(model))
    with serving(server, command, log, environment, start_timeout_s):
        yield server


def server_port() -> int:
    """A port that nobody listens on and that is given once only.

    It lies below those that the system hands out: engines that start side by side take dozens of them, and a server
    listens only seconds after it was told where.
    """
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("every port from 15000 to 29999 is taken")


def run_offline(
    runs: list[dict[str, Any]],
    folder: Path,
    timeout_s: float = OFFLINE_TIMEOUT_S,
    environment: Mapping[str, str] = ONE_PROCESS,
) -> dict[str, list[list[int]]]:
    """Greedy tokens after ``PROMPTS`` of one engine after the other. Engines to run side by side are calls in threads.

    Args:
        runs: ``name``, ``model`` and keyword arguments of ``vllm.LLM`` as ``options``, beside or instead of those that
            every test wants; ``reload`` names a checkpoint whose weights are loaded afterwards, for tokens under the
            name ``<name>, reloaded``.
        folder: for files.
        timeout_s: the longest that all may take.
        environment: beside that of this process.

    Returns:
        Tokens a prompt, by name.

    Raises:
        RuntimeError: an engine failed; carries parts of the log.
        subprocess.TimeoutExpired: they took longer.
    """
    request, answer = folder / "runs.json", folder / "tokens.json"
    request.write_text(json.dumps(runs))
    run_script(PYTHON, __file__, [request, answer], folder / "offline.log", environment, timeout_s)
    tokens: dict[str, list[list[int]]] = json.loads(answer.read_text())
    return tokens


def main(request: Path, answer: Path) -> None:
    """The child process of ``run_offline``."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens = {}
    for run in json.loads(request.read_text()):
        llm = LLM(model=run["model"], **(COMMON | run["options"]))

        def generate(llm: Any = llm) -> list[list[int]]:
            return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]

        tokens[run["name"]] = generate()
        if "reload" in run:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": run["reload"]})
            llm.reset_prefix_cache()
            tokens[f"{run['name']}, reloaded"] = generate()
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
    answer.write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
