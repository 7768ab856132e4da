"""This process among the expert-parallel ranks, and what its layers share.

Decides how SGLang's expert-parallel group becomes the core's ranks. Knows nothing of plans or weights. SGLang's experts
have one rule of placement, rank ``e // (E/P)``, which is the core's default.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError
from megaflux_serve.executors import DeviceExecutor, Executor, select_executor
from megaflux_serve.layer import Observer
from megaflux_serve.metrics.meter import Meter
from megaflux_serve.plan_log import PlanLog
from megaflux_serve.startup import Startup
from megaflux_serve.workspace import Workspace
from megaflux_sglang.choice import settle
from megaflux_sglang.metrics import worker_meter
from megaflux_sglang.options import megaflux_config, option_error
from megaflux_sglang.versions import resolved

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

LOGGER = logging.getLogger("sglang.megaflux")


@dataclass(frozen=True)
class RankContext:
    """What all layers of a rank share.

    Attributes:
        options: the validated options.
        executor: drives this rank.
        workspace: where replica slots come from.
        observers: the plan log, on rank 0 and if one is asked for.
        meter: adds up what the layers do, where somebody asks for metrics.
        startup: says what the layers take.
    """

    options: MegaFluxConfig
    executor: Executor | DeviceExecutor
    workspace: Workspace
    observers: list[Observer]
    meter: Meter | None
    startup: Startup


_contexts: WeakKeyDictionary[GroupCoordinator, RankContext] = WeakKeyDictionary()


def rank_context(server_args: Any, device: torch.device) -> RankContext:
    """The context of SGLang's expert-parallel group, made with the first layer of the model that is being built.

    Args:
        server_args: of this server.
        device: where the layers' weights are.

    Raises:
        ConfigError, UnsupportedError: options or an executor that cannot be used here.
    """
    from sglang.srt.distributed import get_moe_ep_group

    group = get_moe_ep_group()
    if group not in _contexts:
        try:
            options = settle(resolved(server_args), megaflux_config(server_args))
            executor = select_executor(options, group.world_size, group.device_group, device)
        except ConfigError as error:
            raise option_error(error) from None
        workspace = Workspace(options.replica_slots if group.world_size > 1 else 0, options.sticky)
        logs = [PlanLog(options.plan_log)] if options.plan_log is not None and group.rank_in_group == 0 else []
        meter = worker_meter(options, executor, group.rank_in_group, server_args)
        startup = Startup(options, executor, LOGGER if group.rank_in_group == 0 else None)
        _contexts[group] = RankContext(options, executor, workspace, [*logs], meter, startup)
    return _contexts[group]


def device_executors() -> list[DeviceExecutor]:
    """The executors of this process that plan on the device."""
    return [context.executor for context in _contexts.values() if isinstance(context.executor, DeviceExecutor)]


__all__ = ["RankContext", "device_executors", "rank_context"]
