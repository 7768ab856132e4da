"""A command within a time limit: its status comes through, and nothing that it has started outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WITHIN = Path(__file__).resolve().parents[2] / "benchmarks" / "within.py"
DAEMON = "setsid sleep 600 & echo $!"  # in a session of its own, and an orphan as soon as its parent ends


ENDS_ITS_FIRST_THREAD = """
import ctypes, os, platform, subprocess, threading, time
threading.Thread(target=time.sleep, args=[600]).start()
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
exit_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
ctypes.CDLL(None).syscall(exit_thread, 0)
"""


def within(seconds: float, shell: str) -> subprocess.Popen[str]:
    """A shell command within a time limit."""
    command = [sys.executable, str(WITHIN), str(seconds), "bash", "-c", shell]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("shell", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)])
def test_the_status_is_that_of_the_command(shell: str, status: int) -> None:
    with within(60, shell) as process:
        assert process.wait(timeout=60) == status


def test_what_a_command_leaves_behind_is_ended() -> None:
    with within(60, f"{DAEMON}; exit 5") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 5
    assert not is_alive(int(said))


def test_a_command_whose_time_is_over_says_where_it_was_and_is_ended_with_all_that_it_started() -> None:
    program = "import faulthandler, time; faulthandler.enable(); time.sleep(600)"
    begin = time.monotonic()
    with within(1, f"{DAEMON}; {sys.executable} -c '{program}'") as process:
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 124
    assert time.monotonic() - begin < 30
    assert "Fatal Python error: Aborted" in errors
    assert not is_alive(int(said))


def test_a_command_that_ignores_signals_is_killed() -> None:
    with within(60, "trap '' TERM ABRT; echo $$; while :; do sleep 0.1; done") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert not is_alive(pid)


def test_children_of_a_process_whose_first_thread_has_ended_are_found() -> None:
    """Its state is a zombie's, and its children still its own: how every process with threads ends, drawn out."""
    with within(60, f"exec {sys.executable} -c '{ENDS_ITS_FIRST_THREAD}'") as process:
        assert process.stdout is not None
        leader, child = map(int, process.stdout.readline().split())
        while is_alive(leader):
            time.sleep(0.05)
        assert is_alive(child)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert not is_alive(child)


def test_a_command_keeps_the_signals_that_a_shell_ignores_in_the_background() -> None:
    """An engine that is asked to end by SIGINT has to hear it."""
    shell = f"{sys.executable} {WITHIN} 60 bash -c 'kill -INT $$; echo deaf' & wait $!"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "")


def test_a_command_ends_with_the_process_that_wanted_it() -> None:
    shell = f"{sys.executable} {WITHIN} 60 bash -c '{DAEMON}; wait' & wait $!"
    with subprocess.Popen(["bash", "-c", shell], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate(timeout=60)  # until nobody holds the pipe
    assert not is_alive(pid)
