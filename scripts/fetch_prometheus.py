#!/usr/bin/env python3
"""Bring Debian's ``prometheus`` and ``promtool`` into a folder, without installing them and without root.

Does nothing where both are on the PATH or in the folder already. They come from the distribution's package, which apt
verifies; it is unpacked and not configured, so no service is started. Where there is none to be had the script says so
and ends well: the tests that need Prometheus then skip with that reason.

Usage: python3 scripts/fetch_prometheus.py DIRECTORY
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ("prometheus", "promtool")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1]).absolute()
    if all(shutil.which(name) or (directory / name).exists() for name in PROGRAMS):
        return
    print(f"prometheus: fetching the distribution's package into {directory}", flush=True)
    problem = fetch(directory)
    if problem:
        print(f"prometheus: not to be had here ({problem}); the tests that need it will be skipped", flush=True)


def fetch(directory: Path) -> str | None:
    """Download and unpack the package; what went wrong, or None."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return "no apt-get and dpkg-deb"
    with tempfile.TemporaryDirectory() as folder:
        problem = run(folder, "apt-get", "download", "prometheus")
        if problem and os.geteuid() == 0:  # a new machine has no package lists
            problem = run(folder, "apt-get", "update") or run(folder, "apt-get", "download", "prometheus")
        if problem:
            return problem
        package = next(Path(folder).glob("prometheus_*.deb"))
        problem = run(folder, "dpkg-deb", "--extract", str(package), "unpacked")
        if problem:
            return problem
        directory.mkdir(parents=True, exist_ok=True)
        for name in PROGRAMS:
            partial = directory / f"{name}.partial"
            shutil.copy2(Path(folder) / "unpacked" / "usr" / "bin" / name, partial)
            partial.replace(directory / name)
    return None


def run(folder: str, *command: str) -> str | None:
    """Run a command in a folder; the last line of what it said if it failed, else None."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return None
    return ((done.stderr or done.stdout).strip().splitlines() or [f"{command[0]} failed"])[-1]


if __name__ == "__main__":
    main()
