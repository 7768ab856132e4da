"""Metrics in vLLM: the layers' series on the server's own ``/metrics``.

Decides where vLLM's processes meet: the front end of a server makes a folder and names it in the environment, which
every process that it starts inherits; workers write their snapshots there, and answers to ``/metrics`` show them.
vLLM's own metrics, and whether they are in multiprocess mode, stay as they are.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megaflux_vllm.backend_name import BACKEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from megaflux_serve.config import MegaFluxConfig
    from megaflux_serve.executors import DeviceExecutor, Executor
    from megaflux_serve.metrics.meter import Meter


def install(module: ModuleType) -> None:
    """Hook the front end; a server that does not use the backend, or not the option ``metrics``, stays as it is."""
    module.EngineArgs.create_engine_config = _naming_a_folder(module.EngineArgs.create_engine_config)


def is_installed(module: ModuleType) -> bool:
    """Whether servers name a folder, and their answers show what is in it."""
    return hasattr(module.EngineArgs.create_engine_config, "names_a_folder")


def worker_meter(
    options: MegaFluxConfig, executor: Executor | DeviceExecutor, rank: int, config: VllmConfig
) -> Meter | None:
    """The meter of this worker, which publishes from now on; None where nobody asks for metrics.

    Args:
        options: with the executor that runs.
        executor: runs the layers.
        rank: expert-parallel rank of this process.
        config: vLLM's configuration.
    """
    from megaflux_serve.metrics.meter import Meter
    from megaflux_serve.metrics.snapshot import Worker
    from megaflux_vllm.versions import engine_version

    worker = Worker.of("vllm", engine_version(), config.model_config.served_model_name, rank, executor, options)
    return Meter.publishing(worker, executor, options)


def _naming_a_folder(create: Any) -> Any:
    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, usage_context: Any = None, *args: Any, **kwargs: Any) -> VllmConfig:
        config: VllmConfig = create(self, usage_context, *args, **kwargs)
        if config.kernel_config.moe_backend == BACKEND:
            _show_layers_of(config, usage_context)
        return config

    create_engine_config.names_a_folder = True  # type: ignore[attr-defined]
    return create_engine_config


def _show_layers_of(config: VllmConfig, usage_context: Any) -> None:
    """Name a folder and show what workers write there, in a server's front end that metrics are not turned off for."""
    from vllm.usage.usage_lib import UsageContext

    from megaflux_serve.metrics.registries import show_layers
    from megaflux_serve.metrics.snapshot import name_folder
    from megaflux_vllm.checks import megaflux_config

    serves = usage_context is UsageContext.OPENAI_API_SERVER  # an offline engine has no /metrics
    if serves and megaflux_config(config.additional_config).metrics:
        name_folder()
        show_layers()


__all__ = ["install", "is_installed", "worker_meter"]
