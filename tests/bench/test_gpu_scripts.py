"""The scripts for GPU hosts, run without one: every step starts commands that exist, with options that they have."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = {
    "gpu_capture.sh": (),
    "gpu_ep8.sh": ("compile", "correctness", "planner", "quick", "layer64_1", "layer256_2", "prefill", "report"),
    "gpu_layer_forward.sh": (),
    "gpu_metrics.sh": ("totals", "overhead"),
    "gpu_planner.sh": (),
    "gpu_sglang.sh": ("kernels", "smoke", "prefill"),
    "gpu_sweep.sh": ("times",),
    "gpu_vllm.sh": (),
    "gpu_vllm_bench.sh": ("qwen", "decode", "deepseek", "load"),
}
"""By script, the steps to run; none are all of them."""
WITHOUT_NAMED_STEPS = ("gpu_capture.sh", "gpu_sweep.sh")
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


def program_of(command: list[str]) -> tuple[Path | None, list[str]]:
    """The program of this project that a command runs, and what it is given; pytest's are its own business."""
    if "pytest" in command:
        return None, []
    for i, word in enumerate(command):
        if re.fullmatch(r"benchmarks/[\w/]+\.py", word):
            return ROOT / word, command[i + 1 :]
        if word == "-m":
            return ROOT / f"{command[i + 1].replace('.', '/')}.py", command[i + 2 :]
    return None, []


def options_of(program: Path) -> set[str]:
    """Long options that a program's source declares, or a module of the benchmarks that it imports."""
    text = program.read_text()
    modules = re.findall(r"^from benchmarks\.(\w+) import", text, re.MULTILINE)
    imported = [path for name in modules if (path := ROOT / "benchmarks" / f"{name}.py").is_file()]
    declared = re.compile(r"\badd(?:_argument)?\(\s*\"(--[a-z-]+)")
    return {option for part in (text, *(path.read_text() for path in imported)) for option in declared.findall(part)}


def test_every_script_is_run_here() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").glob("gpu_*.sh")}
    assert scripts == {*STEPS, "gpu_steps.sh"}  # the last one is what the others share


@pytest.mark.parametrize("script", STEPS)
def test_every_step_starts_what_exists_with_options_that_it_has(script: str, tmp_path: Path) -> None:
    programs = []
    for command in commands(script, tmp_path, *STEPS[script]):
        tests = [word for word in command if re.fullmatch(r"tests/[\w/]+\.py", word)]
        assert all((ROOT / file).is_file() for file in tests), command
        program, given = program_of(command)
        if program is not None:
            assert {word for word in given if word.startswith("--")} <= options_of(program), command
            programs.append(program)
    assert programs


@pytest.mark.parametrize("script", [script for script in STEPS if script not in WITHOUT_NAMED_STEPS])
def test_an_unknown_step_is_named(script: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown step nothing; known"):
        commands(script, tmp_path, "nothing")
