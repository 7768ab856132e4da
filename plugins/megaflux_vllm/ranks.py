"""This process among the expert-parallel ranks: what its layers share, which rank owns an expert, whose rows are whose.

Decides how vLLM's groups become the core's ranks. Knows nothing of plans or weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megaflux_serve.errors import InputError
from megaflux_serve.executors import DeviceExecutor, select_executor
from megaflux_serve.rank import RankContext
from megaflux_serve.slots import IntArray, SlotLayout
from megaflux_serve.workspace import ExpertWeights
from megaflux_vllm import hooks
from megaflux_vllm.checks import megaflux_config, named_as_written
from megaflux_vllm.metrics import worker_meter
from megaflux_vllm.steps import watch_steps, watch_updates, while_alive

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

LOGGER = logging.getLogger("vllm.megaflux")


@dataclass(frozen=True)
class VllmRankContext(RankContext):
    """What all layers of a rank share under vLLM.

    Attributes:
        looks: functions that notice what was written into a layer's weights, one a layer.
        updates: functions that are told of an update that none may have noticed, one a layer.
    """

    looks: list[Callable[[], None]] = field(default_factory=list)
    updates: list[Callable[[], None]] = field(default_factory=list)

    def notice_writes(self) -> None:
        """Have layers forget their replicas if somebody has written into their weights since the last look."""
        for look in self.looks:
            look()

    def forget_replicas(self) -> None:
        """Have layers forget their replicas, whatever was written."""
        for update in self.updates:
            update()

    def home_weights(self, layout: SlotLayout, hidden: int, intermediate: int, dtype: torch.dtype) -> ExpertWeights:
        """Memory for the weights of one layer's E/P experts, on the device that vLLM builds the model for."""
        if isinstance(self.executor, DeviceExecutor):
            (home,) = self.executor.home_weights(layout, hidden, intermediate)
            return home
        own = layout.experts_per_rank
        w13 = torch.empty((own, 2 * intermediate, hidden), dtype=dtype)
        return ExpertWeights(w13, torch.empty((own, hidden, intermediate), dtype=dtype))


_contexts: WeakKeyDictionary[GroupCoordinator, VllmRankContext] = WeakKeyDictionary()


def rank_context() -> VllmRankContext:
    """The context of vLLM's expert-parallel group, made with the first layer of the model that is being built.

    Raises:
        ConfigError, UnsupportedError: options or an executor that cannot be used here; a hook that is not in its place.
    """
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_ep_group
    from vllm.platforms import current_platform

    group = get_ep_group()
    if group not in _contexts:
        hooks.install()
        config = get_current_vllm_config()
        options = megaflux_config(config.additional_config)
        with named_as_written():
            executor = select_executor(
                options, group.world_size, group.device_group, current_platform.device_type, group.cpu_group
            )
        meter = worker_meter(options, executor, group.rank_in_group, config)
        context = VllmRankContext.of(options, executor, group.rank_in_group, meter, LOGGER)
        watch_updates(while_alive(context.forget_replicas))
        if isinstance(executor, DeviceExecutor):
            watch_steps(executor, while_alive(context.notice_writes))
        _contexts[group] = context
    return _contexts[group]


def home_ranks(expert_map: Tensor | None, num_experts: int) -> IntArray:
    """int32 [E]: the rank that loaded each expert. Asks all ranks, since vLLM's placement has several rules.

    Args:
        expert_map: int32 [E], this rank's index of each expert, -1 for experts elsewhere; None where one rank has all.
        num_experts: logical experts E.

    Raises:
        InputError: an expert that not exactly one rank holds, or local indices that do not grow with the expert id.
    """
    from vllm.distributed import get_ep_group

    if expert_map is None:
        return np.zeros(num_experts, dtype=np.int32)
    own = expert_map[:num_experts].to("cpu", torch.int32).contiguous()
    group = get_ep_group()
    maps = [torch.empty_like(own) for _ in range(group.world_size)]
    dist.all_gather(maps, own, group=group.cpu_group)
    index = torch.stack(maps).numpy()
    held = index >= 0
    if not (held.sum(axis=0) == 1).all():
        expert = int(np.flatnonzero(held.sum(axis=0) != 1)[0])
        raise InputError("expert_map", f"expert {expert} is on {int(held[:, expert].sum())} ranks", "exactly one rank")
    for rank, row in enumerate(index):
        if not np.array_equal(row[row >= 0], np.arange((row >= 0).sum())):
            raise InputError(
                "expert_map", f"rank {rank} holds {row.tolist()}", "local indices that grow with the expert id"
            )
    home: IntArray = held.argmax(axis=0).astype(np.int32)
    return home


@dataclass(frozen=True)
class RowShard:
    """The rows that this rank brings when tensor-parallel ranks all hold the same ones.

    Rows are cut into equal parts, the last ones shorter or empty, so that every row is brought by one rank. With data
    parallelism alone, or where vLLM has cut the rows itself (sequence parallelism), there is one part.

    Attributes:
        num_parts: tensor-parallel ranks that hold the same rows.
        part: this rank's.
    """

    num_parts: int
    part: int

    @classmethod
    def of(cls, moe: FusedMoEConfig) -> RowShard:
        """The shard of this process for one layer."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        return cls(1, 0) if moe.is_sequence_parallel else cls(group.world_size, group.rank_in_group)

    def rows_a_part(self, num_rows: int) -> int:
        """Rows of a full part."""
        return -(-num_rows // self.num_parts)

    def take(self, tensor: Tensor) -> Tensor:
        """This rank's rows of [M, ...]."""
        size = self.rows_a_part(tensor.shape[0])
        return tensor[self.part * size : (self.part + 1) * size]

    def gather(self, own: Tensor, num_rows: int) -> Tensor:
        """All rows [M, H] on every rank, from the [m, H] of each.

        Args:
            own: what ``take`` gave, computed.
            num_rows: M.
        """
        if self.num_parts == 1:
            return own
        from vllm.distributed import tensor_model_parallel_all_gather

        padded = F.pad(own, (0, 0, 0, self.rows_a_part(num_rows) - own.shape[0]))
        rows: Tensor = tensor_model_parallel_all_gather(padded, dim=0)
        return rows[:num_rows]


__all__ = ["RowShard", "VllmRankContext", "home_ranks", "rank_context"]
