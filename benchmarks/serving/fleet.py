"""Several engines on the same GPUs, started at the same time and asked one after the other.

Decides how engine processes live and die. Starting takes a minute and measuring seconds, so engines start together; an
engine that is not asked waits for requests and leaves the GPUs alone, so backends can be measured in turns.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.serving.backends import EngineSpec
from benchmarks.serving.engine import serve

Answers = dict[str, Any]
"""By backend."""

START_TIMEOUT_S, CALL_TIMEOUT_S, STOP_TIMEOUT_S = 240.0, 60.0, 10.0


class EngineError(RuntimeError):
    """An engine did not start or did not answer."""


class Member:
    """A running engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.name = spec, spec.name
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["vllm.v1.engine.async_llm"])  # imported once, not once an engine
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(spec, theirs), name=f"engine-{spec.name}")
        self.process.start()
        theirs.close()

    def wait_until_ready(self, deadline: float) -> float:
        """Seconds that vLLM took to start.

        Raises:
            EngineError: it ended, or is not ready at ``deadline`` of ``time.monotonic``.
        """
        return float(self._receive("ready", deadline - time.monotonic(), "start"))

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The value of a method of ``engine.Engine``.

        Raises:
            EngineError: it failed or took longer.
        """
        self.connection.send((method, arguments))
        return self._receive("done", timeout_s, method)

    def ask_to_stop(self) -> None:
        """Tell the engine to end, without waiting for it."""
        with suppress(OSError):  # of a process that has ended already
            self.connection.send(None)

    def stop(self) -> None:
        """End all processes of the engine: politely, then by force."""
        self.ask_to_stop()
        self.process.join(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End all processes of the engine by force."""
        self.process.kill()  # which has no group of its own before it runs
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join(STOP_TIMEOUT_S)

    def _receive(self, expected: str, timeout_s: float, what: str) -> Any:
        try:
            if not self.connection.poll(max(0.0, timeout_s)):
                raise self._failure(f"did not {what} within {timeout_s:.0f} s")
            kind, value = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self._failure(f"ended while it should {what}") from None
        if kind != expected:
            raise self._failure(f"failed to {what}: {value}")
        return value

    def _failure(self, what: str) -> EngineError:
        lines = self.spec.log.read_text(errors="replace").splitlines() if self.spec.log.exists() else []
        shown = "\n".join(f"  {line[:240]}" for line in lines[-25:])
        return EngineError(f"engine {self.name} {what}; its log {self.spec.log} ends with\n{shown}")


class Fleet:
    """The engines that still answer.

    Attributes:
        members: by backend, in the order in which they are asked.
    """

    def __init__(self, members: dict[str, Member]) -> None:
        self.members = members

    def each(
        self, method: str, *arguments: Any, only: Sequence[str] = (), timeout_s: float = CALL_TIMEOUT_S
    ) -> Answers:
        """Ask the engines one after the other; the answers by backend, without an engine that fails now.

        Args:
            method: of ``engine.Engine``.
            *arguments: for it.
            only: backends to ask; all by default.
            timeout_s: for each of them.
        """
        answers = {}
        for name, member in list(self.members.items()):
            if only and name not in only:
                continue
            try:
                answers[name] = member.call(method, *arguments, timeout_s=timeout_s)
            except EngineError as error:
                self.leave_out(name, str(error))
        return answers

    def take(self, names: Sequence[str]) -> Fleet:
        """A fleet of those of these engines that started; they are members of this one no more."""
        return Fleet({name: self.members.pop(name) for name in names if name in self.members})

    def leave_out(self, name: str, why: str) -> None:
        """Stop an engine, say why, and go on without it."""
        _leave_out(self.members.pop(name), why)


@contextmanager
def running(specs: Sequence[EngineSpec]) -> Iterator[Fleet]:
    """The engines that start; why one does not is printed, and the others are measured without it."""
    members = [Member(spec) for spec in specs]
    deadline = time.monotonic() + START_TIMEOUT_S
    ready: dict[str, Member] = {}
    try:
        for member in members:
            try:
                seconds = member.wait_until_ready(deadline)
            except EngineError as error:
                _leave_out(member, str(error))
                continue
            print(f"{member.name}: ready after {seconds:.0f} s", flush=True)
            ready[member.name] = member
        yield Fleet(ready)
    except BaseException:  # a time limit, too: leave nothing on the GPUs
        for member in members:
            member.kill()
        raise
    finally:
        for member in members:
            member.ask_to_stop()
        for member in members:
            member.stop()


def _leave_out(member: Member, why: str) -> None:
    print(f"LEFT OUT from here: {member.name}: {why}", file=sys.stderr, flush=True)
    member.stop()


__all__ = ["EngineError", "Fleet", "Member", "running"]
