"""Metrics in SGLang: the layers' series on the server's own ``/metrics``, which ``--enable-metrics`` turns on.

Decides where SGLang's processes meet: the launcher makes a folder and names it in the environment, which every
scheduler inherits; schedulers write their snapshots there, and answers to ``/metrics`` show them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaflux_sglang import backend, versions
from megaflux_sglang.options import megaflux_config

if TYPE_CHECKING:
    from megaflux_serve.config import MegaFluxConfig
    from megaflux_serve.executors import DeviceExecutor, Executor
    from megaflux_serve.metrics.meter import Meter


def worker_meter(
    options: MegaFluxConfig, executor: Executor | DeviceExecutor, rank: int, server_args: Any
) -> Meter | None:
    """The meter of this scheduler, which publishes from now on; None where nobody asks for metrics.

    Args:
        options: with the executor that runs.
        executor: runs the layers.
        rank: expert-parallel rank of this process.
        server_args: of this server.
    """
    from megaflux_serve.metrics.meter import Meter
    from megaflux_serve.metrics.snapshot import Worker

    model = server_args.served_model_name
    worker = Worker.of("sglang", versions.engine_version(), model, rank, executor, options)
    return Meter.publishing(worker, executor, options)


def name_folder(result: None, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """After the launcher has a ``ServerArgs``."""
    from megaflux_serve.metrics import snapshot

    asked = server_args.enable_metrics and server_args.moe_a2a_backend == backend.NAME
    if asked and megaflux_config(server_args).metrics:
        snapshot.name_folder()


def show_layers(app: Any) -> None:
    """Before ``add_prometheus_middleware``.

    SGLang imports prometheus-client when that is called, and not before: its mode depends on the environment then.
    """
    from megaflux_serve.metrics import registries

    registries.show_layers()


def hooks() -> tuple[versions.Hook, ...]:
    """The hooks, where this release resolves arguments."""
    return (
        (f"sglang.srt.server_args.ServerArgs.{versions.resolving_method()}", name_folder, "after"),
        ("sglang.srt.utils.common.add_prometheus_middleware", show_layers, "before"),
    )


__all__ = ["hooks", "name_folder", "show_layers", "worker_meter"]
