"""Where Prometheus comes from: found, fetched, or not to be had, and then said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_prometheus.py"
APT_GET = """#!/bin/sh
case "$1" in
  download) [ -e listed ] || { echo "E: Unable to locate package" >&2; exit 100; }; touch prometheus_2_all.deb;;
  update) [ -n "$HAS_LISTS" ] || { echo "E: no network" >&2; exit 100; }; touch listed;;
esac
"""
DPKG_DEB = """#!/bin/sh
mkdir -p "$3/usr/bin" && for name in prometheus promtool; do echo "$name" > "$3/usr/bin/$name"; done
"""


def fetch(folder: Path, programs: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script where only these programs and a few of the system's exist."""
    path = folder / "path"
    path.mkdir()
    for name, text in programs.items():
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    for name in ("sh", "touch", "mkdir"):
        (path / name).symlink_to(f"/bin/{name}")
    command = [sys.executable, str(SCRIPT), str(folder / "prometheus")]
    return subprocess.run(command, env={"PATH": str(path)} | environment, capture_output=True, text=True, timeout=60)


def test_nothing_is_fetched_where_it_is_installed(tmp_path: Path) -> None:
    done = fetch(tmp_path, {"prometheus": "", "promtool": ""})
    assert (done.returncode, done.stdout) == (0, "")
    assert not (tmp_path / "prometheus").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can fetch the package lists")
def test_a_machine_without_package_lists_gets_them_first(tmp_path: Path) -> None:
    done = fetch(tmp_path, {"apt-get": APT_GET, "dpkg-deb": DPKG_DEB}, HAS_LISTS="yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in (tmp_path / "prometheus").iterdir()) == ["prometheus", "promtool"]


def test_a_machine_that_cannot_have_it_says_why_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    done = fetch(tmp_path / "a", {"apt-get": APT_GET, "dpkg-deb": DPKG_DEB})
    assert done.returncode == 0
    assert "not to be had here (E: " in done.stdout
    done = fetch(tmp_path / "b", {})
    assert done.returncode == 0
    assert "no apt-get and dpkg-deb" in done.stdout
