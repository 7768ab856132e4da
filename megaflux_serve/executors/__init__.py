"""Who carries out a plan: ``reference`` (all ranks in one process) or ``staged`` (one rank a process).

Decides which executor an option means. Nothing falls back: an executor that cannot run here is an error.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.executors.base import Executor
from megaflux_serve.executors.reference import ReferenceExecutor
from megaflux_serve.executors.staged import StagedExecutor


def select_executor(
    config: MegaFluxConfig,
    num_ranks: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Executor:
    """The executor that ``config.executor`` names.

    Args:
        config: options.
        num_ranks: P.
        group: the expert-parallel group of P processes, or None when this process holds every rank.
        device: of the tensors that the group's backend sends.

    Raises:
        ConfigError: the executor does not fit how ranks are spread over processes.
        UnsupportedError: the executor cannot run on this machine.
    """
    if config.executor == "megakernel":
        raise _no_megakernel()
    spread = group is not None and num_ranks > 1
    kind = config.executor if config.executor != "auto" else ("staged" if spread else "reference")
    if kind == "staged":
        if group is None:
            raise ConfigError("executor", kind, "reference or auto: this process holds every rank")
        return StagedExecutor(group, device)
    if spread:
        raise ConfigError("executor", kind, f"staged or auto: the {num_ranks} ranks are processes of their own")
    return ReferenceExecutor(num_ranks)


def _no_megakernel() -> UnsupportedError:
    missing = "this version has no forward megakernel yet"
    if not torch.cuda.is_available():
        missing += ", and this machine has no NVIDIA GPU"
    return UnsupportedError("executor = 'megakernel'", missing, "use staged, reference or auto")


__all__ = ["Executor", "ReferenceExecutor", "StagedExecutor", "select_executor"]
