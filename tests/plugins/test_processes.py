"""What tests of engines share: ports that servers may have, and errors that show why a process failed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.plugins import processes
from tests.plugins.engine_runs import server_port
from tests.plugins.processes import LOG_PART, Limit, run_script

FAILS_EARLY = f"""
print("starting " * {LOG_PART})
print("ERROR: no memory")
print("waiting for others " * {LOG_PART})
raise SystemExit("processes died")
"""


def test_an_error_shows_where_the_trouble_began_and_the_end_of_the_log(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS_EARLY)
    with pytest.raises(RuntimeError) as caught:
        run_script(sys.executable, str(script), [], tmp_path / "engine.log", {}, timeout_s=60)
    said = str(caught.value)
    assert said.startswith(f"{script} failed; from {tmp_path / 'engine.log'}:\nERROR: no memory\nwaiting for others")
    assert said.endswith("processes died\n")
    assert len(said) < 3 * LOG_PART


def test_a_script_that_takes_longer_than_its_limit_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_script(sys.executable, str(script), [], tmp_path / "engine.log", {}, timeout_s=0.5)
    assert time.monotonic() - begin < 50


def test_a_limit_leaves_out_what_the_thread_waited_that_waited_most(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, clock = {1: 5.0}, [100.0]
    monkeypatch.setattr(processes, "_waits_for_a_processor", lambda session: dict(waits))
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    limit = Limit(1, 10.0)

    def passes(seconds: float, **more: float) -> bool:
        clock[0] += seconds
        waits.update({int(thread[1:]): waited for thread, waited in more.items()})
        return limit.is_over()

    assert not passes(60, t1=15.0, t2=57.0)  # 3 are counted
    assert not passes(7, t1=16.0, t2=58.0)  # 6
    assert passes(1.5)


def test_waits_for_a_processor_are_those_of_the_threads_of_a_session() -> None:
    spins = [sys.executable, "-c", "while True: pass"]
    both = [subprocess.Popen(spins, start_new_session=True, preexec_fn=on_one_processor) for _ in range(2)]
    try:
        time.sleep(2)
        found = [processes._waits_for_a_processor(process.pid) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    for process, waits in zip(both, found, strict=True):
        assert set(waits) == {process.pid}
        assert waits[process.pid] > 0.3  # each has waited for the other


def on_one_processor() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_servers_get_ports_that_are_free_and_that_the_system_gives_to_nobody_else() -> None:
    ports = [server_port() for _ in range(20)]
    assert len(set(ports)) == len(ports)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
