"""``megaflux compile`` on a machine without a GPU: every kernel that a server of the shape would compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("cutlass") is None:
    pytest.skip("needs nvidia-cutlass-dsl", allow_module_level=True)

SHAPE = {
    "hidden": 256,
    "intermediate": 64,
    "experts": 16,
    "top-k": 2,
    "ranks": 2,
    "replica-slots": 1,
    "max-tokens": 512,
}


def compile_ahead(folder: Path, **changes: int) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the kernel language reads its target when it is imported."""
    shape = SHAPE | changes
    options = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"MEGAFLUX_KERNEL_CACHE": str(folder)}
    environment.pop("CUTE_DSL_ARCH", None)
    command = [sys.executable, "-c", "from megaflux_serve.cli import main; main()", "compile", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def told(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_the_kernels_of_a_shape_are_compiled_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    first, second = (told(compile_ahead(tmp_path / "kernels")) for _ in range(2))
    assert (first["compiled"], first["loaded"]) == (4, 0)
    assert (second["compiled"], second["loaded"]) == (0, 4)
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "kernels").glob("*.o"))
    assert names == ["combine", "forward", "planner", "transfer"]


def test_a_shape_that_the_kernels_cannot_serve_is_one_line_and_status_2(tmp_path: Path) -> None:
    result = compile_ahead(tmp_path / "kernels", hidden=2040)
    assert result.returncode == 2
    assert "hidden = 2040 is not allowed; allowed: a multiple of 64" in result.stderr


def test_slots_that_no_rank_can_have_are_one_line_that_names_the_option(tmp_path: Path) -> None:
    for slots, allowed in ((-1, "an integer of at least 0"), (9, "0 to 8: the experts that live on other ranks")):
        result = compile_ahead(tmp_path / "kernels", **{"replica-slots": slots})
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
        assert f"error: --replica-slots = {slots} is not allowed; allowed: {allowed}" in result.stderr
