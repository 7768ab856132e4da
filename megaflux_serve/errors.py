"""Every error that MegaFlux-serve raises on purpose, in one tree.

::

    MegafluxError
    ├── ConfigError          an option or flag has a value that is not allowed (also a ValueError)
    ├── InputError           data handed to us breaks its contract: a trace, a histogram, a file (also a ValueError)
    ├── UnsupportedError     a model, engine or machine asks for what this version does not do
    ├── CapacityError        a batch is larger than the workspace that was allocated for it
    └── PeerTimeoutError     a wait for another rank ended without an answer

A message names the operation or field, the value that came, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MegafluxError(Exception):
    """Base of every error raised on purpose by this library."""


class ConfigError(MegafluxError, ValueError):
    """An option has a value that is not allowed.

    Args:
        field: name of the option or flag as the user wrote it.
        value: the value that came.
        allowed: what would have been accepted, as a phrase.
    """

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        super().__init__(f"{field} = {value!r} is not allowed; allowed: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


@contextmanager
def renamed(rename: Callable[[str], str]) -> Iterator[None]:
    """Have a ``ConfigError`` name its option as the user wrote it.

    Args:
        rename: from the field that the error names.

    Raises:
        ConfigError: instead of the one raised inside.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(rename(error.field), error.value, error.allowed) from None


class InputError(MegafluxError, ValueError):
    """Data breaks its contract.

    Args:
        source: the argument, file or record at fault.
        problem: what is wrong, with the offending value.
        allowed: what would have been accepted, as a phrase.
    """

    def __init__(self, source: str, problem: str, allowed: str) -> None:
        super().__init__(f"{source}: {problem}; allowed: {allowed}")
        self.source, self.problem, self.allowed = source, problem, allowed


@contextmanager
def read_from(path: Path) -> Iterator[None]:
    """Have an ``InputError`` about what a file holds name the file.

    Raises:
        InputError: instead of the one raised inside.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error.source}", error.problem, error.allowed) from error


class UnsupportedError(MegafluxError):
    """A model, engine or machine asks for something that this version does not do.

    Args:
        feature: the flag, layer or property that asked for it.
        reason: why it cannot be served.
        instead: what to do about it, as a phrase.
    """

    def __init__(self, feature: str, reason: str, instead: str) -> None:
        super().__init__(f"{feature}: {reason}; {instead}")
        self.feature, self.reason, self.instead = feature, reason, instead


class CapacityError(MegafluxError):
    """A batch does not fit the workspace that was allocated for it."""


class PeerTimeoutError(MegafluxError):
    """A bounded wait for another rank ended.

    Args:
        rank: the rank that did not answer.
        phase: what was waited for, in the vocabulary of docs/architecture.md.
        slot: block, slot or epoch that was waited for, or -1 where none applies.
        timeout_s: how long the wait lasted, in seconds.
    """

    def __init__(self, rank: int, phase: str, slot: int, timeout_s: float) -> None:
        super().__init__(f"rank {rank} did not answer within {timeout_s:g} s: phase {phase}, slot {slot}")
        self.rank, self.phase, self.slot, self.timeout_s = rank, phase, slot, timeout_s
