"""Real SGLang servers for tests, on the plain CPU platform of ``sglang_cpu``.

``MEGAFLUX_SGLANG_PYTHON`` names the interpreter of an environment with SGLang, this project and that platform, as
``make test-sglang`` makes it; tests that need one are skipped without it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.engine_runs import NUM_TOKENS, TINY_MOE, stop

PYTHON = os.environ.get("MEGAFLUX_SGLANG_PYTHON", "")
START_TIMEOUT_S = 420  # three processes import SGLang, which takes a core 20 to 40 s each
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_PLATFORM": "plain_cpu",
}
FLAGS = ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--mem-fraction-static", "0.6"]
FLAGS += ["--max-total-tokens", "4096", "--context-length", "256", "--skip-server-warmup"]
MEGAFLUX = ["--moe-a2a-backend", "megaflux", "--moe-runner-backend", "megaflux"]

needs_sglang = pytest.mark.skipif(not PYTHON, reason="needs an environment with SGLang; make test-sglang has one")


class Server:
    """A running SGLang server.

    Args:
        url: where it listens.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a JSON request."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=180) as response:
            return json.load(response)

    def generate(self, prompt: str, **more: Any) -> dict[str, Any]:
        """SGLang's whole answer to a prompt, greedy; ``more`` goes into the request."""
        sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        answer: dict[str, Any] = self.post("/generate", {"text": prompt, "sampling_params": sampling, **more})
        return answer

    def complete(self, prompt: str) -> list[int]:
        """Greedy tokens after the prompt."""
        tokens: list[int] = self.generate(prompt)["output_ids"]
        return tokens

    def generate_together(self, prompts: Sequence[str], **more: Any) -> list[dict[str, Any]]:
        """Answers to all prompts, sent at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **more), prompts))

    def is_healthy(self) -> bool:
        """Whether it answers and has loaded its model."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def serve(
    options: Sequence[str], log: Path, environment: dict[str, str] | None = None, model: Path = TINY_MOE
) -> Iterator[Server]:
    """A server on a free port of this machine, stopped at the end with all its processes.

    Args:
        options: command-line options beside ``FLAGS``.
        log: file that gets what the server prints.
        environment: more variables.
        model: checkpoint folder.

    Raises:
        RuntimeError: the server ended or did not answer in time; carries the end of the log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), *FLAGS, *options]
    num_ranks = int(options[options.index("--tp-size") + 1]) if "--tp-size" in options else 1
    cores = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(num_ranks))
    server = Server(f"http://127.0.0.1:{port}")
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | {"SGLANG_CPU_OMP_THREADS_BIND": cores} | (environment or {}),
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.is_healthy():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SGLang did not start; the end of {log}:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield server
    finally:
        stop(process)
