"""Real SGLang servers for tests, on the plain CPU platform of ``sglang_cpu``.

``MEGAFLUX_SGLANG_PYTHON`` names the interpreter of an environment with SGLang, this project and that platform, as
``make test-sglang`` makes it; tests that need one are skipped without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.engine_runs import NUM_TOKENS, TINY_MOE
from tests.plugins.processes import HttpServer, free_port, serving

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
# How attention is spread over two ranks.
ATTENTION = {"tensor parallel": [], "data parallel": ["--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"]}
MEGAFLUX = ["--moe-a2a-backend", "megaflux", "--moe-runner-backend", "megaflux"]

needs_sglang = pytest.mark.skipif(not PYTHON, reason="needs an environment with SGLang; make test-sglang has one")


class Server(HttpServer):
    """A running SGLang server."""

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
    port = free_port()
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), *FLAGS, *options]
    num_ranks = int(options[options.index("--tp-size") + 1]) if "--tp-size" in options else 1
    cores = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(num_ranks))
    variables = ENVIRONMENT | {"SGLANG_CPU_OMP_THREADS_BIND": cores} | (environment or {})
    server = Server(f"http://127.0.0.1:{port}")
    with serving(server, command, log, variables, START_TIMEOUT_S):
        yield server
