"""RankContext: what all layers of a rank share in an engine's process, and how a layer joins them.

Decides what is made around an executor. Knows no engine: a plugin brings the executor and the meter, which follow from
its engine's groups and settings.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors import DeviceExecutor, Executor
from megaflux_serve.layer import Observer, ReplicatedMoE
from megaflux_serve.metrics.meter import Meter
from megaflux_serve.plan_log import PlanLog
from megaflux_serve.slots import SlotLayout
from megaflux_serve.startup import Startup
from megaflux_serve.workspace import ExpertWeights, Workspace

if TYPE_CHECKING:
    from typing_extensions import Self


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

    @classmethod
    def of(
        cls,
        options: MegaFluxConfig,
        executor: Executor | DeviceExecutor,
        rank: int,
        meter: Meter | None,
        logger: logging.Logger,
    ) -> Self:
        """The context of expert-parallel rank ``rank``; rank 0 logs for all.

        Args:
            options: with the executor that runs.
            executor: runs the layers.
            rank: of this process.
            meter: of this process, or None.
            logger: of the engine.
        """
        workspace = Workspace(options.replica_slots if executor.num_ranks > 1 else 0, options.sticky)
        logs = [PlanLog(options.plan_log)] if options.plan_log is not None and rank == 0 else []
        startup = Startup(options, executor, logger if rank == 0 else None)
        return cls(options, executor, workspace, [*logs], meter, startup)

    def add_layer(self, name: str, layout: SlotLayout, home: ExpertWeights, top_k: int) -> ReplicatedMoE:
        """Build a layer on its loaded weights; on a device all memory is taken and all kernels are ready afterwards.

        Args:
            name: of the layer in the model.
            layout: ranks, experts and slots.
            home: this rank's E/P experts.
            top_k: k.

        Raises:
            InputError, UnsupportedError: weights that the executor cannot serve.
        """
        layer = ReplicatedMoE(
            name, layout, self.options, self.executor, self.workspace, [home], observers=self.observers
        )
        if layer.on_device is not None:
            layer.on_device.prepare(top_k)
        if self.meter is not None:
            self.meter.watch(layer, top_k)
        self.startup.add(layer)
        return layer


__all__ = ["RankContext"]
