"""When SGLang changes weights: every way of updating them makes replicas stale.

Decides where updates are noticed: around every way in which a scheduler changes its model's weights, whatever loaders
write them. SGLang calls them on every rank, between two batches. From 0.5.21 updates belong to a session, in which
others may also write into the parameters without asking SGLang to: its end is one of the ways.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megaflux_sglang import versions

METHODS = tuple(f"update_weights_from_{source}" for source in ("disk", "tensor", "distributed", "ipc"))
SESSION_METHODS = (
    *(f"update_weights_from_{source}" for source in ("disk", "tensor", "ipc")),
    "load_weights_from_distributed",
    "end_weight_update",
)
"""From 0.5.21, where what is received from other processes is loaded apart."""
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
RUNNER = "sglang.srt.model_executor.model_runner"


def forget_replicas(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around an update. Replicas are forgotten when it fails too, since weights may have been written by then."""
    try:
        return original(*args, **kwargs)
    finally:
        if "megaflux_sglang.method" in sys.modules:  # else no layer is ours
            from megaflux_sglang.method import weights_updated

            weights_updated()


def hooks() -> tuple[versions.Hook, ...]:
    """The hooks, where this release keeps the methods."""
    release = versions.release(versions.engine_version())
    owner = f"{UPDATER}.WeightUpdater" if release >= (0, 5, 16) else f"{RUNNER}.ModelRunner"
    methods = SESSION_METHODS if release >= (0, 5, 21) else METHODS
    return tuple((f"{owner}.{method}", forget_replicas, "around") for method in methods)


__all__ = ["METHODS", "SESSION_METHODS", "hooks"]
