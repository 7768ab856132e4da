"""This process among the expert-parallel ranks, and what its layers share.

Decides how SGLang's expert-parallel group becomes the core's ranks. Knows nothing of plans or weights. SGLang's experts
have one rule of placement, rank ``e // (E/P)``, which is the core's default.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from megaflux_serve.executors import DeviceExecutor, select_executor
from megaflux_serve.rank import RankContext
from megaflux_sglang.choice import settle
from megaflux_sglang.metrics import worker_meter
from megaflux_sglang.options import megaflux_config, named_as_written
from megaflux_sglang.versions import resolved

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

LOGGER = logging.getLogger("sglang.megaflux")


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
        arguments = resolved(server_args)
        given = megaflux_config(arguments)
        with named_as_written():
            options = settle(arguments, given)
            executor = select_executor(options, group.world_size, group.device_group, device, group.cpu_group)
        meter = worker_meter(options, executor, group.rank_in_group, arguments)
        _contexts[group] = RankContext.of(options, executor, group.rank_in_group, meter, LOGGER)
    return _contexts[group]


def device_executors() -> list[DeviceExecutor]:
    """The executors of this process that plan on the device."""
    return [context.executor for context in _contexts.values() if isinstance(context.executor, DeviceExecutor)]


__all__ = ["device_executors", "rank_context"]
