"""What a machine can run, and if not, why and what to do. Pure: facts in, verdicts out.

Decides which versions and devices each executor and engine needs; the ranges are those of pyproject.toml (a test holds
them together).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megaflux_kernels import language

from megaflux_serve.cli.machine import PLUGIN_GROUPS, Machine

PYTHON_VERSIONS = ("3.10", "3.14")
ENGINE_VERSIONS = {"vllm": ("0.26", "0.34"), "sglang": ("0.5.11", "0.5.24")}
"""Engine -> first version that is supported, first that is not."""

HOPPER = (9, 0)


@dataclass(frozen=True)
class Verdict:
    """Whether something can run here.

    Attributes:
        subject: executor or engine.
        can_run: the answer.
        reason: what it rests on.
        remedy: what to do about it; empty where nothing has to be done.
    """

    subject: str
    can_run: bool
    reason: str
    remedy: str = ""


def judge_executors(machine: Machine) -> list[Verdict]:
    """Verdicts on the reference, staged and megakernel executors."""
    return [_reference(machine), _staged(machine), _megakernel(machine)]


def judge_engines(machine: Machine) -> list[Verdict]:
    """Verdicts on vLLM and SGLang with this library's plugin."""
    return [_engine(machine, "vllm", "vLLM"), _engine(machine, "sglang", "SGLang")]


def notes(machine: Machine) -> list[str]:
    """What is worth knowing although it stops nothing."""
    found = []
    if not in_range(machine.python, *PYTHON_VERSIONS):
        found.append(f"Python {machine.python} was never tested; tested are {' up to before '.join(PYTHON_VERSIONS)}")
    if machine.gpus:
        found.append("NVLink multicast is used by no kernel here; it may stay switched off")
    if machine.disk_free_gib < 5:
        found.append(f"{machine.disk_free_gib:.1f} GiB of disk are free here; an environment with vLLM takes about 4")
    if machine.memory_free_gib < 4:
        found.append(f"{machine.memory_free_gib:.1f} GiB of memory are free; two CPU engine processes take about 4")
    return found


def in_range(version: str, first: str, beyond: str) -> bool:
    """Whether ``first <= version < beyond``, comparing release numbers only (``0.27.1+cpu`` is 0.27.1)."""
    return _numbers(first) <= _numbers(version) < _numbers(beyond)


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


def _reference(machine: Machine) -> Verdict:
    if machine.versions["torch"] is None:
        return Verdict("reference", False, "torch is not installed", "install torch, or an engine, which brings it")
    if machine.torch_error is not None:
        return Verdict("reference", False, f"torch does not load: {machine.torch_error}", "reinstall torch")
    return Verdict("reference", True, f"torch {machine.versions['torch']}; all ranks in one process")


def _staged(machine: Machine) -> Verdict:
    reference = _reference(machine)
    if not reference.can_run:
        return Verdict("staged", False, reference.reason, reference.remedy)
    if not machine.has_distributed:
        return Verdict("staged", False, "this torch was built without torch.distributed", "install a full torch build")
    return Verdict("staged", True, f"torch {machine.versions['torch']} with torch.distributed; one rank a process")


def _megakernel(machine: Machine) -> Verdict:
    found = machine.versions[language.DISTRIBUTION]
    missing: list[tuple[str, str]] = []
    if not machine.gpus:
        missing.append(("torch sees no NVIDIA GPU", "use a machine with H100 or H200 GPUs and a CUDA build of torch"))
    elif any(gpu.capability != HOPPER for gpu in machine.gpus):
        other = next(gpu for gpu in machine.gpus if gpu.capability != HOPPER)
        capability = ".".join(map(str, other.capability))
        missing.append((f"{other.name} has compute capability {capability}, not 9.0", "use H100 or H200 GPUs"))
    if machine.peer_access is False:
        missing.append(("the GPUs cannot reach each other's memory", "use GPUs joined by NVLink"))
    if (reason := language.obstacle(found)) is not None:
        missing.append((reason, language.REMEDY))
    if missing:
        return Verdict("megakernel", False, *("; ".join(dict.fromkeys(texts)) for texts in zip(*missing, strict=True)))
    return Verdict("megakernel", True, f"{len(machine.gpus)} x {machine.gpus[0].name}, {language.DISTRIBUTION} {found}")


def _engine(machine: Machine, engine: str, name: str) -> Verdict:
    version, (first, beyond) = machine.versions[engine], ENGINE_VERSIONS[engine]
    install = f"in a checkout: pip install -e '.[{engine}]'"
    if version is None:
        return Verdict(name, False, f"{engine} is not installed", install)
    if not in_range(version, first, beyond):
        return Verdict(name, False, f"{engine} {version} is outside {first} up to before {beyond}", install)
    if engine not in machine.plugins:
        reason = f"{engine} {version}, but no entry point megaflux in {PLUGIN_GROUPS[engine]}"
        return Verdict(name, False, reason, "install a megaflux-serve that has this plugin into this environment")
    runnable = [verdict.subject for verdict in judge_executors(machine) if verdict.can_run]
    if not runnable:
        return Verdict(name, False, f"{engine} {version} with the plugin, but no executor can run", "see the executors")
    return Verdict(name, True, f"{engine} {version} with the plugin; executors: {', '.join(runnable)}")
