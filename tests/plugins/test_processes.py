"""What tests of engines share: ports that servers may have, and errors that show why a process failed."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.plugins.engine_runs import server_port
from tests.plugins.processes import LOG_PART, run_script

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


def test_servers_get_ports_that_are_free_and_that_the_system_gives_to_nobody_else() -> None:
    ports = [server_port() for _ in range(20)]
    assert len(set(ports)) == len(ports)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
