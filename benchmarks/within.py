"""Run a command for at most some seconds, and leave nothing of it behind.

    python3 benchmarks/within.py SECONDS COMMAND...

Engines start processes in sessions of their own and change their titles and environments, so that neither a process
group nor a name finds them all once their parents are gone; on GPUs they would keep their memory. Here every process
whose parent dies becomes a child of this one, and all of them are ended with the command: when it has ended, when its
time is over, when a signal comes, or when the parent of this process dies, even by SIGKILL. A command that is cut short
gets SIGABRT first, at which Python says where it was (``PYTHONFAULTHANDLER``).

The status is that of the command, 128 + N if signal N ended it, 124 if its time was over, 143 if a signal came here.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # options of prctl(2)
TIME_IS_OVER, CUT_SHORT = 124, 143
LAST_WORDS_S, END_S = 3.0, 20.0
POLL_S = 0.05


class SignalCame(Exception):
    """Somebody wants this process to end."""


def main() -> int:
    limit_s, command = float(sys.argv[1]), sys.argv[2:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0) or prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of an engine is as large as its memory
    catch(signal_came)
    try:
        status = run(command, limit_s)
        catch(ignore)
    except SignalCame:
        status = CUT_SHORT
    if status in (TIME_IS_OVER, CUT_SHORT):
        end_all(signal.SIGABRT, LAST_WORDS_S)
    end_all(signal.SIGKILL, END_S)
    return status


def catch(handler: object) -> None:
    """Set what the signals do that ask a process to end. Never SIG_IGN, which a command would inherit."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, handler)  # type: ignore[arg-type]


def signal_came(number: int, frame: object) -> None:
    catch(ignore)
    raise SignalCame


def ignore(number: int, frame: object) -> None:
    pass


def run(command: list[str], limit_s: float) -> int:
    """The status of the command, or ``TIME_IS_OVER``.

    Raises:
        SignalCame: see there.
    """
    end = time.monotonic() + limit_s
    process = subprocess.Popen(command)
    while time.monotonic() < end:
        for pid, status in reaped():
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode if process.returncode >= 0 else 128 - process.returncode
        time.sleep(POLL_S)
    return TIME_IS_OVER


def reaped() -> Iterator[tuple[int, int]]:
    """Process id and wait status of every child that has ended, adopted ones too."""
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            yield child


def end_all(number: int, patience_s: float) -> None:
    """Send a signal to every descendant once, those started meanwhile too, and wait until all have ended."""
    end, told = time.monotonic() + patience_s, set[int]()
    while (alive := descendants()) and time.monotonic() < end:
        for pid in alive:
            if pid not in told:
                told.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(POLL_S)


def descendants() -> list[int]:
    """Process ids of the children of this process, their children and so on; those that have ended are reaped first.

    A zombie that is still there counts, since it may have children: threads of a process end after its first one.
    """
    list(reaped())
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            child, _, fields = stat.read_text().partition(" ")
            parent = int(fields[fields.rindex(")") + 1 :].split()[1])
            children.setdefault(parent, []).append(int(child))
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found += children.get(pid, ())
    return found


if __name__ == "__main__":
    sys.exit(main())
