#!/usr/bin/env python3
"""Create the SGLang environment: SGLang, this project, and a platform on which SGLang runs on any CPU.

Needs Linux, Python 3.10 to 3.13 and pip; takes 9 GB of disk and about five minutes, since SGLang's package brings CUDA.
Runs again in well under a second when nothing changed. SGLang and vLLM never share an environment.

Usage: python3 scripts/install_sglang_env.py [DIRECTORY] [--sglang VERSION]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from install_cpu_env import PROJECT, fingerprint, run, write_whole

PLATFORM = PROJECT / "tests" / "plugins" / "sglang_cpu"
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the SGLang environment of MegaFlux-serve.")
    parser.add_argument("directory", nargs="?", default=".venv-sglang", type=Path, help="(default: .venv-sglang)")
    parser.add_argument("--sglang", default="0.5.17", help="release of SGLang, 0.5.11 to 0.5.23 (default: 0.5.17)")
    args = parser.parse_args()
    if not sys.platform.startswith("linux") or not (3, 10) <= sys.version_info[:2] <= (3, 13):
        sys.exit(f"install: needs Linux and Python 3.10 to 3.13, not {sys.platform} with {sys.version.split()[0]}")

    environment = args.directory.absolute()
    stamp, wanted = environment / "installed-from", fingerprint(f"sglang {args.sglang} {Path(__file__).read_text()}")
    if stamp.exists() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    install(environment, args.sglang)
    write_whole(stamp, wanted)


def install(environment: Path, version: str) -> None:
    python, start = environment / "bin" / "python", time.monotonic()

    def step(number: int, what: str, *command: str | Path) -> None:
        print(f"install [{number}/3] {time.monotonic() - start:4.0f} s  {what}", flush=True)
        run(what, *command)

    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install")
    step(1, f"virtual environment {environment}", sys.executable, "-m", "venv", environment)
    step(2, f"sglang {version}", *pip, f"sglang=={version}")
    step(3, "this project, the CPU platform and test tools", *pip, "-e", PROJECT, "-e", PLATFORM, *TOOLS)
    run("a first import", python, "-c", "import megaflux_serve, megaflux_sglang, sglang, sglang_plain_cpu")
    print(f"install: done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
