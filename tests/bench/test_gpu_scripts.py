"""The scripts for GPU hosts, run without one: every step starts commands that exist, with options that they have, and
a script that is cut short leaves what its steps have printed, and none of their processes.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
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
line=$(printf '%q ' "$(basename "$0")" "$@")
echo "$line" >>"$COMMANDS"  # in one piece: steps run side by side
"""
WITHIN = ["python3", "benchmarks/within.py"]
"""How a step starts its command: with a time limit."""
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
    started = [shlex.split(line) for line in (folder / "commands").read_text().splitlines()]
    return [line[3:] if line[:2] == WITHIN else line for line in started]


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


HANGING = """
cd {root} && . benchmarks/gpu_steps.sh
hang() {{ step "$1" 60 bash -c 'echo "said by $0" && setsid bash -c "exec -a $OUT sleep 600"' "$1"; }}
alone() {{ hang alone; }}
together() {{ hang left & hang right & wait; }}
run_steps "$@"
"""
"""A script whose steps print a line and start a process in a session of its own, as engines do; it is called $OUT."""


def cut_short(folder: Path, step: str, logs: list[str], number: signal.Signals) -> tuple[int, str]:
    """Status and output of a script that gets a signal when its step has begun to write the logs of these names."""
    programs, script = folder / "bin", folder / "script.sh"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    (programs / "nvidia-smi").chmod(0o755)
    (programs / "python3").symlink_to(sys.executable)
    script.write_text(HANGING.format(root=shlex.quote(str(ROOT))))
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(folder / "out")}
    with subprocess.Popen(["bash", script, step], env=environment, stdout=subprocess.PIPE, text=True) as process:
        begun = [folder / "out" / f"{name}.log" for name in logs]
        wait_until(
            lambda: all(log.exists() and log.read_text() for log in begun) and len(sleepers(folder)) == len(logs)
        )
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)  # it ends when no process holds the pipe, none of a step either
    return process.returncode, output


def wait_until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something is so, or fail."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def sleepers(folder: Path) -> list[str]:
    """Process ids of what the steps of ``HANGING`` have started."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if command.read_bytes().split(b"\0")[0] == os.fsencode(folder / "out"):
                found.append(command.parent.name)
    return found


@pytest.mark.parametrize(("step", "logs"), [("alone", ["alone"]), ("together", ["left", "right"])])
def test_a_script_that_is_told_to_end_keeps_the_logs_of_its_steps_and_none_of_their_processes(
    step: str, logs: list[str], tmp_path: Path
) -> None:
    status, output = cut_short(tmp_path, step, logs, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    kept = (tmp_path / "out" / "logs.txt").read_text()
    for name in logs:
        assert f"== {name}: " in output
        assert f"said by {name}\n" in output
        assert f"said by {name}\n" in kept
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["logs.txt"]
    assert not sleepers(tmp_path)


def test_a_script_that_is_killed_leaves_the_log_of_its_step_and_none_of_its_processes(tmp_path: Path) -> None:
    status, _ = cut_short(tmp_path, "alone", ["alone"], signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert (tmp_path / "out" / "alone.log").read_text() == "said by alone\n"
    wait_until(lambda: not sleepers(tmp_path))
