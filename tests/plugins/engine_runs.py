"""Real vLLM engines for tests: a server in processes of its own, and offline engines in one child process.

``MEGAFLUX_VLLM_PYTHON`` names the interpreter of another environment with vLLM and this project, to test another
release; the default is the interpreter that runs the tests. Run as a script, this file is the child process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
TINY_MOE = PROJECT / "models" / "tiny-moe"
PYTHON = os.environ.get("MEGAFLUX_VLLM_PYTHON", sys.executable)
NUM_TOKENS = 24
START_TIMEOUT_S = 280
OFFLINE_TIMEOUT_S = 600  # five engines, one after the other
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
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


class Server:
    """A running ``vllm serve``.

    Args:
        url: where it listens.
        model: the name it serves.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def complete(self, prompt: str) -> list[int]:
        """Greedy tokens after the prompt."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
        return tokens

    def complete_together(self, prompts: Sequence[str]) -> list[list[int]]:
        """Greedy tokens after each prompt, all sent at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.complete, prompts))

    def is_healthy(self) -> bool:
        """Whether it answers and every engine process lives."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def serve(
    options: Sequence[str],
    log: Path,
    model: Path = TINY_MOE,
    common: Sequence[str] = COMMON_FLAGS,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """``vllm serve`` on a free port of this machine, stopped at the end with all its processes.

    Args:
        options: command-line options beside ``common``.
        log: file that gets what the server prints.
        model: checkpoint folder.
        common: options that every test of a kind wants.
        start_timeout_s: the longest wait for the first answer.

    Raises:
        RuntimeError: the server ended or did not answer in time; carries the end of the log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += [*common, *options]
    server = Server(f"http://127.0.0.1:{port}", str(model))
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + start_timeout_s
        while not server.is_healthy():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vllm serve did not start; the end of {log}:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(timeout=20)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_offline(runs: list[dict[str, Any]], folder: Path) -> dict[str, list[list[int]]]:
    """Greedy tokens after ``PROMPTS`` of one engine after the other.

    Args:
        runs: ``name``, ``model`` and keyword arguments of ``vllm.LLM`` as ``options``, beside or instead of those that
            every test wants; ``reload`` names a checkpoint whose weights are loaded afterwards, for tokens under the
            name ``<name>, reloaded``.
        folder: for files.

    Returns:
        Tokens a prompt, by name.
    """
    request, answer, log = folder / "runs.json", folder / "tokens.json", folder / "offline.log"
    request.write_text(json.dumps(runs))
    with log.open("w") as output:
        process = subprocess.Popen(
            [PYTHON, __file__, str(request), str(answer)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            start_new_session=True,
        )
    try:
        if process.wait(timeout=OFFLINE_TIMEOUT_S):
            raise RuntimeError(f"the offline engines failed; the end of {log}:\n{log.read_text()[-4000:]}")
    finally:
        stop(process)
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
