"""The scripts for GPU hosts, run without one: every step starts commands that exist, with options that they have."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("gpu_layer_forward.sh", "gpu_planner.sh")
STUB = """#!/usr/bin/env bash
printf '%q ' "$(basename "$0")" "$@" >>"$COMMANDS"
echo >>"$COMMANDS"
"""
NVIDIA_SMI = "#!/usr/bin/env bash\nprintf 'GPU 0\\nGPU 1\\n'\n"


def commands(script: str, folder: Path, *arguments: str) -> list[list[str]]:
    """What a script would run, every program but the shell's own being a stub that ends well."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("python3", "torchrun", "compute-sanitizer", "ncu"):
        (programs / name).write_text(STUB)
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "COMMANDS": str(folder / "commands"),
        "OUT": str(folder / "out"),
    }
    command = ["bash", str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [shlex.split(line) for line in (folder / "commands").read_text().splitlines()]


def options_of(program: str) -> set[str]:
    """Long options that a benchmark's source declares."""
    return set(re.findall(r"add_argument\(\s*\"(--[a-z-]+)", (ROOT / program).read_text()))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_step_starts_what_exists_with_options_that_it_has(script: str, tmp_path: Path) -> None:
    seen = 0
    for command in commands(script, tmp_path):
        files = [word for word in command if re.fullmatch(r"(benchmarks|tests)/[\w/]+\.py", word)]
        modules = [command[i + 1] for i, word in enumerate(command) if word == "-m" and "pytest" not in command]
        assert all((ROOT / file).is_file() for file in files), command
        assert all((ROOT / f"{module.replace('.', '/')}.py").is_file() for module in modules), command
        benchmarks = [file for file in files if file.startswith("benchmarks/")]
        if benchmarks:
            after = command[command.index(benchmarks[0]) :]
            assert {word for word in after if word.startswith("--")} <= options_of(benchmarks[0]), command
            seen += 1
    assert seen or script != "gpu_layer_forward.sh"


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_step_is_named(script: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown step nothing; known"):
        commands(script, tmp_path, "nothing")
