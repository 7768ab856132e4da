"""Processes that tests of engines start: servers that are asked over HTTP, and scripts that run to their end.

Whatever happens, nothing that a process has started outlives the test. A limit counts seconds on a machine that has
nothing else to do. Knows no engine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
LOG_PART = 4000
"""Characters of a log that an error shows from its first error on, and of its end."""


class HttpServer:
    """A server on this machine.

    Args:
        url: where it listens.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON request."""
        with self.open(path, body) as response:
            return json.load(response)

    def open(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a JSON request, to read while it comes."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=180)

    def is_healthy(self) -> bool:
        """Whether it answers, has loaded its model, and every process of its engine lives."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    server: HttpServer, command: Sequence[str], log: Path, environment: Mapping[str, str], start_timeout_s: float
) -> Iterator[None]:
    """A server from its first answer on; stopped at the end with all its processes.

    Args:
        server: where the command will listen.
        command: starts it.
        log: file that gets what it prints.
        environment: beside that of this process.
        start_timeout_s: the longest wait for the first answer, beside waits for a processor.

    Raises:
        RuntimeError: it ended or did not answer in time; carries parts of the log.
    """
    process = _start(command, log, environment)
    try:
        limit = Limit(process.pid, start_timeout_s)
        while not server.is_healthy():
            if process.poll() is not None or limit.is_over():
                raise RuntimeError(f"{command[0]} did not start a server; from {log}:\n{_parts_of(log)}")
            time.sleep(0.5)
        yield
    finally:
        _stop(process)


def run_script(
    python: str, script: str, arguments: Sequence[Path], log: Path, environment: Mapping[str, str], timeout_s: float
) -> None:
    """Run a file of this project, which may import others of it, to its end.

    Args:
        python: interpreter.
        script: the file.
        arguments: of the script.
        log: file that gets what it prints.
        environment: beside that of this process.
        timeout_s: the longest that it may take, beside waits for a processor.

    Raises:
        RuntimeError: it failed; carries parts of the log.
        subprocess.TimeoutExpired: it took longer.
    """
    given = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    places = os.pathsep.join(filter(None, (str(PROJECT), given)))
    command = [python, script, *map(str, arguments)]
    process = _start(command, log, {**environment, "PYTHONPATH": places})
    try:
        limit = Limit(process.pid, timeout_s)
        while process.poll() is None:
            if limit.is_over():
                raise subprocess.TimeoutExpired(command, timeout_s)
            time.sleep(0.1)
        if process.returncode:
            raise RuntimeError(f"{script} failed; from {log}:\n{_parts_of(log)}")
    finally:
        _stop(process)


class Limit:
    """Seconds that processes may take, less those in which they waited for a processor that others had.

    An engine imports for half a minute in each of its processes before it does anything. On a machine with much else to
    do that takes many times as long, and a limit of plain time ends a start that goes well.

    Args:
        session: id of the processes' session, which is that of the first of them.
        limit_s: on a machine that has nothing else to do.
    """

    def __init__(self, session: int, limit_s: float) -> None:
        self.session, self.left_s = session, limit_s
        self.then, self.waits = time.monotonic(), _waits_for_a_processor(session)

    def is_over(self) -> bool:
        """Whether they have had their time; to be asked again and again.

        Of the time since the last call, what the thread has waited that waited most is left out.
        """
        now, waits = time.monotonic(), _waits_for_a_processor(self.session)
        longest = max((waited - self.waits.get(thread, 0.0) for thread, waited in waits.items()), default=0.0)
        self.left_s -= max(now - self.then - longest, 0.0)
        self.then, self.waits = now, waits
        return self.left_s < 0


def _waits_for_a_processor(session: int) -> dict[int, float]:
    """Seconds that each thread of a session has been ready to run and did not; empty where the kernel does not say."""
    waits = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                for thread in (process / "task").iterdir():
                    with suppress(OSError):
                        waits[int(thread.name)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waits


def _start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("w") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(timeout=20)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _parts_of(log: Path) -> str:
    """Where the trouble begins, and the end, which with several processes is often just about processes that died."""
    text = log.read_text(errors="replace")
    first = re.search(r"^.*(ERROR|Traceback|Fatal)", text, re.MULTILINE)
    end = max(len(text) - LOG_PART, 0)
    if first is None or first.start() >= end:
        return text[end:]
    begin = first.start()
    return f"{text[begin : min(begin + LOG_PART, end)]}\n[...]\n{text[end:]}"


__all__ = ["PROJECT", "HttpServer", "Limit", "free_port", "run_script", "serving"]
