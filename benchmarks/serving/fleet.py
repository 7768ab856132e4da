"""Several engines on the same GPUs, started at the same time and asked one after the other.

Decides how engine processes live and die. Starting takes a minute and measuring seconds, so engines start together; an
engine that is not asked waits for requests and leaves the GPUs alone, so backends can be measured in turns.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from benchmarks.serving.backends import EngineSpec
from benchmarks.serving.engine import serve
from benchmarks.serving.progress import say

Answers = dict[str, Any]
"""By backend."""

CALL_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 5.0


@dataclass(frozen=True)
class TimeLimits:
    """How long engines may take.

    Attributes:
        first_s: until the first one answers.
        others_s: the others after the first.
        call_s: to answer a call.
    """

    first_s: float = 240.0
    others_s: float = 120.0
    call_s: float = CALL_TIMEOUT_S


class EngineError(RuntimeError):
    """An engine did not start or did not answer."""


class Spec(Protocol):
    """What is known of an engine: ranks over which its requests are spread, and the file that it prints to."""

    @property
    def ranks(self) -> int: ...

    @property
    def log(self) -> Path: ...


class Running(Protocol):
    """What a fleet asks: a ``Member``, or a server of another kind."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> Spec: ...

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any: ...

    def kill(self) -> None: ...


class Member:
    """A running engine of vLLM."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.name = spec, spec.name
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.serving.preload"])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(spec, theirs), name=f"engine-{spec.name}")
        self.process.start()
        theirs.close()

    def started(self) -> float:
        """Seconds that vLLM took to start, of an engine that has said something.

        Raises:
            EngineError: it ended instead.
        """
        return float(self._receive("ready", 0.0, "start"))

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The value of a method of ``engine.Engine``.

        Raises:
            EngineError: it failed or took longer.
        """
        self.connection.send((method, arguments))
        return self._receive("done", timeout_s, method)

    def kill(self) -> None:
        """End all processes of the engine by force."""
        self.process.kill()  # which has no group of its own before it runs
        with suppress(ProcessLookupError):
            assert self.process.pid is not None  # it was started
            os.killpg(self.process.pid, signal.SIGKILL)
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
        call_s: the longest wait for an answer.
    """

    def __init__(self, members: Mapping[str, Running], call_s: float = CALL_TIMEOUT_S) -> None:
        self.members, self.call_s = dict(members), call_s

    def each(self, method: str, *arguments: Any, only: Sequence[str] = (), timeout_s: float | None = None) -> Answers:
        """Ask the engines one after the other; the answers by backend, without an engine that fails now.

        Args:
            method: of ``engine.Engine``.
            *arguments: for it.
            only: backends to ask; all by default.
            timeout_s: for each of them, instead of ``call_s``.
        """
        answers, timeout_s = {}, timeout_s or self.call_s
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
        return Fleet({name: self.members.pop(name) for name in names if name in self.members}, self.call_s)

    def leave_out(self, name: str, why: str) -> None:
        """Stop an engine, say why, and go on without it."""
        _leave_out(self.members.pop(name), why)


@contextmanager
def running(
    specs: Sequence[EngineSpec], limits: TimeLimits = TimeLimits(), warm_up: Callable[[Member], None] | None = None
) -> Iterator[Fleet]:
    """The engines that start; why one does not is printed, and the others are measured without it.

    Args:
        specs: the engines, in the order in which they will be asked.
        limits: of time.
        warm_up: called with every engine as soon as it answers, while others still start.
    """
    os.environ.update(specs[0].environment)  # for what is imported before engines are forked
    members = [Member(spec) for spec in specs]
    try:
        ready = _wait(members, limits, warm_up or (lambda member: None))
        yield Fleet({member.name: member for member in members if member in ready}, limits.call_s)
        _stop(members)
    finally:  # at a time limit, too, nothing may stay on the GPUs
        for member in members:
            member.kill()


def _wait(members: Sequence[Member], limits: TimeLimits, warm_up: Callable[[Member], None]) -> list[Member]:
    """The members that answer in time; the others are stopped."""
    waiting, ready = list(members), list[Member]()
    deadline = time.monotonic() + limits.first_s
    while waiting and (said := wait([m.connection for m in waiting], max(0.0, deadline - time.monotonic()))):
        for member in [m for m in waiting if m.connection in said]:
            waiting.remove(member)
            try:
                say(f"{member.name}: ready, vLLM took {member.started():.0f} s")
                warm_up(member)
            except EngineError as error:
                _leave_out(member, str(error))
                continue
            if not ready:
                deadline = min(deadline, time.monotonic() + limits.others_s)
            ready.append(member)
    for member in waiting:
        _leave_out(member, f"did not start in time; its log is {member.spec.log}")
    return ready


def _stop(members: Sequence[Member]) -> None:
    """Ask all engines to end, and give them a moment for it."""
    for member in members:
        with suppress(OSError):  # of a process that has ended already
            member.connection.send(None)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for member in members:
        member.process.join(max(0.0, deadline - time.monotonic()))


def _leave_out(member: Running, why: str) -> None:
    say(f"LEFT OUT from here: {member.name}: {why}")
    member.kill()


__all__ = ["EngineError", "Fleet", "Member", "TimeLimits", "running"]
