"""The command where the library alone is installed, which does not bring torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megaflux_serve.routepack import CostModel, DenseStage, PlanOptions, SearchOptions, Topology, plan_window, save_plan

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from megaflux_serve.cli import main; main()"


def megaflux(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    path = tmp_path / "counts.csv"
    path.write_text("layer,expert,count\n0,0,700\n0,1,200\n0,2,100\n0,3,24\n")
    return path


@pytest.fixture
def saved_plan(tmp_path: Path) -> Path:
    demand = np.full((8, 1, 4), [4, 2, 1, 1], dtype=np.int32)
    options = PlanOptions(CostModel((DenseStage("attention", 1.0),)), search=SearchOptions(proposals=100))
    plan = plan_window(demand, demand.sum(axis=(1, 2)) // 2, Topology(2, 2, 16), options)
    save_plan(plan, tmp_path / "plan")
    return tmp_path / "plan"


def test_what_plans_and_reads_needs_no_torch(counts: Path, saved_plan: Path, tmp_path: Path) -> None:
    for words in (
        ("--help",),
        ("plan", counts, "--ranks", "2"),
        ("routepack", "moves", saved_plan, "--hidden", "64", "--intermediate", "64"),
    ):
        done = megaflux(*words)
        assert done.returncode == 0, done.stderr
    missing = megaflux("replay", "inspect", tmp_path / "none")
    assert (missing.returncode, len(missing.stderr.splitlines())) == (2, 1)


def test_doctor_says_that_torch_does_not_load() -> None:
    done = megaflux("doctor")
    assert "torch does not load" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["compile", "calibrate"])
def test_what_needs_kernels_says_so_in_one_line(command: str) -> None:
    done = megaflux(command, "--hidden", "2048", "--intermediate", "768")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {command}: torch is not installed; in a checkout: pip install -e '.[gpu]'"
    ]
