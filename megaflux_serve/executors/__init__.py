"""Who runs a layer: ``reference`` (all ranks in one process), ``staged`` (one rank a process) or ``megakernel`` (GPUs).

Decides which executor an option means. Nothing falls back: an executor that cannot run here is an error.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megaflux_kernels import language

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.executors.base import Executor
from megaflux_serve.executors.device import DeviceExecutor, DeviceLayer, MemoryUse
from megaflux_serve.executors.reference import ReferenceExecutor
from megaflux_serve.executors.staged import StagedExecutor


def select_executor(
    config: MegaFluxConfig,
    num_ranks: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    host_group: dist.ProcessGroup | None = None,
) -> Executor | DeviceExecutor:
    """The executor that ``config.executor`` names.

    Args:
        config: options.
        num_ranks: P.
        group: the expert-parallel group of P processes, with the megakernel also of N that hold P/N ranks each, or None
            when this process holds every rank.
        device: of the tensors that the group's backend sends.
        host_group: the same processes with a backend for host tensors, for executors that only meet in the group: they
            then make no NCCL communicator, which takes memory and time. None: ``group`` does for all.

    Raises:
        ConfigError: the executor does not fit how ranks are spread over processes.
        UnsupportedError: the executor cannot run on this machine.
    """
    if config.executor == "megakernel":
        return _megakernel(config, num_ranks, group if host_group is None else host_group)
    spread = group is not None and num_ranks > 1
    kind = config.executor if config.executor != "auto" else ("staged" if spread else "reference")
    if kind == "staged":
        if group is None:
            raise ConfigError("executor", kind, "reference or auto: this process holds every rank")
        return StagedExecutor(group, device, config.timeout_s)
    if spread:
        raise ConfigError("executor", kind, f"staged or auto: the {num_ranks} ranks are processes of their own")
    return ReferenceExecutor(num_ranks)


def _megakernel(config: MegaFluxConfig, num_ranks: int, group: dist.ProcessGroup | None) -> DeviceExecutor:
    missing = None
    if not torch.cuda.is_available():
        missing = "this machine has no NVIDIA GPU"
    elif torch.cuda.get_device_capability()[0] != 9:
        missing = f"{torch.cuda.get_device_name()} is not of the Hopper generation"
    else:
        missing = language.obstacle(language.installed())
    if missing is not None:
        raise UnsupportedError("executor = 'megakernel'", missing, "use staged, reference or auto")
    if config.max_tokens is None:
        raise ConfigError("max_tokens", None, "the rows of a rank's largest batch, with executor 'megakernel'")
    from megaflux_serve.executors.megakernel import MegakernelExecutor

    return MegakernelExecutor(num_ranks, group if num_ranks > 1 else None, config.max_tokens, config.timeout_s)


__all__ = [
    "DeviceExecutor",
    "DeviceLayer",
    "Executor",
    "MemoryUse",
    "ReferenceExecutor",
    "StagedExecutor",
    "select_executor",
]
