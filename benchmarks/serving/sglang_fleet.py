"""SGLang servers on the same GPUs, as members of a ``fleet.Fleet``, so that ``PrefillSamples`` can measure them.

Decides how servers are started, asked over HTTP and told what to route. Batches are sent as one request, so that both
ranks find their part of it when they schedule.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.fleet import EngineError, Fleet
from benchmarks.serving.sglang_routes import CONTROL
from megaflux_serve.durable import write_atomically

REQUEST_TIMEOUT_S, COUNTS_TIMEOUT_S, STOP_TIMEOUT_S = 40.0, 20.0, 5.0


@dataclass(frozen=True)
class ServerSpec:
    """A server to start.

    Attributes:
        name: the backend.
        flags: of ``sglang.launch_server``.
        options: of ours, as in ``MEGAFLUX_OPTIONS``; None for a stock server.
        port: to listen on; SGLang takes ports above it for its own processes.
        folder: for its log and for the control file of its routes.
        ranks: over which rows are spread when routers see them; 1 where every rank routes all rows.
    """

    name: str
    flags: tuple[str, ...]
    options: dict[str, Any] | None
    port: int
    folder: Path
    ranks: int

    @property
    def log(self) -> Path:
        """What the server prints."""
        return self.folder / "server.log"


class SglangServer:
    """A running server: a member of a fleet.

    Args:
        spec: the server.
        environment: added to this process's.
    """

    def __init__(self, spec: ServerSpec, environment: dict[str, str]) -> None:
        self.spec, self.name = spec, spec.name
        spec.folder.mkdir(parents=True, exist_ok=True)
        given = {} if spec.options is None else {"MEGAFLUX_OPTIONS": json.dumps(spec.options)}
        address = ("--host", "127.0.0.1", "--port", str(spec.port))
        with spec.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *address, *spec.flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment | given | {CONTROL: str(spec.folder)},
                start_new_session=True,
            )
        (spec.folder / "server.pid").write_text(str(self.process.pid))  # for whoever has to clean up after a killed run

    def wait_until_ready(self, deadline: float) -> None:
        """Return when it answers.

        Raises:
            EngineError: it ended, or is not ready at ``deadline`` of ``time.monotonic``.
        """
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.spec.port}/health", timeout=5):
                    return
            except OSError:
                if self.process.poll() is not None:
                    raise self.failure("ended while it started") from None
                if time.monotonic() > deadline:
                    raise self.failure("did not start in time") from None
            time.sleep(0.5)

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The value of one of the methods below, each of which is bounded by itself."""
        return getattr(self, method)(*arguments)

    def batch_seconds(self, prompts: Sequence[list[int]], max_tokens: int, chunk: int) -> float:
        """Seconds until every request has ``max_tokens`` tokens; the chunk budget is the server's own."""
        begin = time.perf_counter()
        self.complete(prompts, max_tokens)
        return time.perf_counter() - begin

    def complete(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy continuations of prompts that are sent as one request.

        Raises:
            EngineError: no answer, or a wrong one.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": [*prompts], "sampling_params": sampling}).encode()
        url = f"http://127.0.0.1:{self.spec.port}/generate"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                return [answer["output_ids"] for answer in json.load(response)]
        except (OSError, KeyError, ValueError) as error:
            raise self.failure(f"did not answer: {error}") from error

    def call_workers(self, method: str, *arguments: Any) -> Any:
        """``benchmark_force_routes`` and ``benchmark_counts`` of ``worker.BenchmarkWorker``."""
        if method == "benchmark_force_routes":
            path, is_counting = (*arguments, False)[:2]
            return self.control(path, is_counting)
        if method == "benchmark_counts":
            return self.counts()
        raise ValueError(f"unknown method {method}")

    def control(self, table: str | None, is_counting: bool) -> None:
        """Have the schedulers route by a table from their next batch on."""
        order = json.dumps({"table": table, "count": is_counting}).encode()
        write_atomically(self.spec.folder / "control.json", order)

    def counts(self) -> list[list[list[int]]]:
        """[ranks, layers, E] assignments since counting began; ends the counting.

        Raises:
            EngineError: a rank did not write its counts.
        """
        order = json.loads((self.spec.folder / "control.json").read_text())
        paths = [self.spec.folder / f"counts-{rank}.npy" for rank in range(2)]
        for path in paths:
            path.unlink(missing_ok=True)
        self.control(order["table"], False)
        deadline = time.monotonic() + COUNTS_TIMEOUT_S
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                raise self.failure("did not count its routes")
            self.complete([[1], [2]], 1)  # ranks write when their next batch begins
        return [np.load(path).tolist() for path in paths]

    def stop(self) -> None:
        """End all its processes: politely, then by force."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(STOP_TIMEOUT_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    kill = stop
    """As a fleet calls it."""

    def failure(self, what: str) -> EngineError:
        """An error with the end of the log."""
        lines = [line for line in self.spec.log.read_text(errors="replace").splitlines() if line.strip()]
        shown = "\n".join(f"  {line[:240]}" for line in lines[-25:])
        return EngineError(f"server {self.spec.name} {what}; its log ends with\n{shown}")


@contextmanager
def running(
    specs: Sequence[ServerSpec], environment: dict[str, str], start_s: float, meanwhile: Callable[[], None]
) -> Iterator[Fleet]:
    """The servers that start; why one does not is printed, and the others are measured without it.

    Args:
        specs: the servers.
        environment: added to this process's.
        start_s: that all of them have to start.
        meanwhile: done while they start.
    """
    begin = time.monotonic()
    servers = {spec.name: SglangServer(spec, environment) for spec in specs}
    fleet = Fleet(servers)
    try:
        meanwhile()
        for name, server in servers.items():
            try:
                server.wait_until_ready(begin + start_s)
            except EngineError as error:
                fleet.leave_out(name, str(error))
            else:
                print(f"{name}: ready after {time.monotonic() - begin:.0f} s", flush=True)
        yield fleet
    finally:
        for server in servers.values():
            server.stop()
