"""A ``vllm serve`` of one's own on 127.0.0.1: started, watched while it starts, asked, and always stopped.

Decides how a server process lives and dies, and how prompts reach it. Knows nothing of MegaFlux: backend and options
are arguments.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

MODEL = "tiny-moe"
"""Name under which the server offers its model."""

# What a line of the log tells somebody who waits; the last one that occurred is shown.
MILESTONES = (
    ("non-default args", "reading the model's configuration"),
    ("Started DP Coordinator", "starting engine processes"),
    ("Initializing a V1 LLM engine", "engine processes are up"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "weights are loaded"),
    ("KV cache size", "KV cache is allocated"),
    ("Starting vLLM API server", "opening the HTTP port"),
)
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # engine processes share the cores; float32 results must not depend on their number
}
START_TIMEOUT_S, REQUEST_TIMEOUT_S, STOP_TIMEOUT_S = 420.0, 180.0, 15.0


class ServerError(RuntimeError):
    """A server did not start or did not answer; the message ends with the last relevant lines of its log."""


@dataclass(frozen=True)
class Answer:
    """A greedy continuation: its text and its token ids."""

    text: str
    token_ids: tuple[int, ...]


class Server:
    """One ``vllm serve``, with all its processes in a process group of its own.

    ::

        with Server("stock", model, [], Path("out/stock.log")) as server:
            server.wait_until_ready(print)
            answers = server.complete(["def main(", "12 + 30 ="], max_tokens=16)

    Args:
        name: for messages.
        model: folder of the checkpoint.
        arguments: further arguments of ``vllm serve``.
        log: file that gets everything the server prints; overwritten.
        port: to listen on at 127.0.0.1; None takes a free one.

    Raises:
        ServerError: there is no ``vllm`` command, or the port is taken.
    """

    def __init__(self, name: str, model: Path, arguments: Sequence[str], log: Path, port: int | None = None) -> None:
        self.name, self.log, self.port = name, log, free_port(port or 0)
        self.command = [vllm_command(), "serve", str(model), "--served-model-name", MODEL]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), "--api-server-count", "1"]
        self.command += ["--dtype", "float32", "--enforce-eager", *arguments]

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of the group: politely, then by force."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._signal_group(number):
                break
            end = time.monotonic() + STOP_TIMEOUT_S
            while self._signal_group(0) and time.monotonic() < end:
                time.sleep(0.1)

    def wait_until_ready(self, on_milestone: Callable[[str], None]) -> float:
        """Return the seconds that the server took to answer; ``on_milestone`` gets what it is doing meanwhile.

        Raises:
            ServerError: it ended, or is not ready in time.
        """
        start = time.monotonic()
        while time.monotonic() - start < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise self.failure(f"ended with status {self.process.returncode} while it started")
            on_milestone(self.milestone())
            if self._answers():
                return time.monotonic() - start
            time.sleep(0.5)
        raise self.failure(f"was not ready within {START_TIMEOUT_S:.0f} s")

    def complete(
        self, prompts: Sequence[str], max_tokens: int, on_answer: Callable[[], None], task: str | None = None
    ) -> list[Answer]:
        """Greedy continuations of all prompts, asked at the same time; ``on_answer`` is called as each arrives.

        With ``task``, a server that captures routes labels their records with it.

        Raises:
            ServerError: the server refused a prompt or did not answer.
        """
        with ThreadPoolExecutor(len(prompts)) as pool:

            def ask(prompt: str) -> Answer:
                answer = self._complete_one(prompt, max_tokens, task)
                on_answer()
                return answer

            return list(pool.map(ask, prompts))

    def milestone(self) -> str:
        """What the server is doing, by its log."""
        text = self.log.read_text(errors="replace")
        reached = [shown for mark, shown in MILESTONES if mark in text]
        return reached[-1] if reached else "importing vLLM"

    def failure(self, what: str) -> ServerError:
        """An error that says what happened, where the log is, and what it says last."""
        lines = [line.rstrip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        relevant = [
            line
            for line in lines
            if re.search(r"error|exception|killed", line, re.IGNORECASE) and not re.search(r"\b(INFO|WARNING)\b", line)
        ]
        shown = "\n".join(f"  {line[:200]}" for line in (relevant or lines)[-12:])
        return ServerError(f"the {self.name} server {what}; its log is {self.log}:\n{shown}")

    def _signal_group(self, number: int) -> bool:
        """Send a signal to the server's processes, 0 to look only; False if there are none any more."""
        self.process.poll()  # collects the leader, which would otherwise still count
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _complete_one(self, prompt: str, max_tokens: int, task: str | None) -> Answer:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if task is not None:
            body["vllm_xargs"] = {"megaflux_task": task}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                choice = json.load(response)["choices"][0]
        except urllib.error.HTTPError as error:
            raise self.failure(f"refused a prompt: {error.read().decode(errors='replace')[:300]}") from error
        except OSError as error:
            raise self.failure(f"did not answer: {error}") from error
        return Answer(choice["text"], tuple(choice["token_ids"]))


def vllm_command() -> str:
    """The ``vllm`` of the environment that this Python belongs to.

    Raises:
        ServerError: there is none.
    """
    command = shutil.which("vllm", path=str(Path(sys.executable).parent))
    if command is None:
        raise ServerError(f"no vllm command beside {sys.executable}; make install creates an environment that has it")
    return command


def free_port(port: int = 0) -> int:
    """A port of 127.0.0.1 that nobody listens on now: the one asked for, or with 0 any.

    Raises:
        ServerError: the port is taken, or is none.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just ended is not in the way
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ServerError(f"port {port} of 127.0.0.1 cannot be used ({error}); --port takes another") from error
        return int(probe.getsockname()[1])
