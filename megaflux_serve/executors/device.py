"""DeviceExecutor: an executor that also plans, so that nothing of a batch passes through the host.

Decides the contract between such an executor and the layer. The other kind of executor, ``base.Executor``, is handed a
plan that was made on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertSlots, ExpertWeights


class DeviceLayer(ABC):
    """One layer on the local ranks: plans, routes, moves and computes on the device.

    Attributes:
        slots: weights a local rank. Home weights were copied here; whoever writes new ones writes into these.
    """

    slots: Sequence[ExpertSlots]

    @abstractmethod
    def forward(self, batches: Sequence[RoutingBatch]) -> list[Tensor]:
        """Serve one batch on the current stream, without waiting for the device.

        Args:
            batches: rows and routes a local rank, any of them empty. Ids must be distinct in a row and in range; the
                device does not check.

        Returns:
            [M, H] a local rank, as ``Executor.execute``.

        Raises:
            CapacityError: more rows than memory was allocated for.
            PeerTimeoutError: a wait of an *earlier* batch has failed.
        """

    @abstractmethod
    def last_plan(self) -> ReplicaPlan:
        """The plan of the last batch, copied to the host; waits for the batch to end.

        Raises:
            PeerTimeoutError: a wait of this batch or an earlier one has failed.
        """

    @abstractmethod
    def forget_replicas(self) -> None:
        """Before the next batch, hold no replica as resident. Every rank has to call this before the same batch."""


class DeviceExecutor(ABC):
    """Makes layers that plan by themselves.

    Attributes:
        num_ranks: P.
        local_ranks: the ranks that this process holds, ascending.
    """

    num_ranks: int
    local_ranks: Sequence[int]

    @abstractmethod
    def layer(self, layout: SlotLayout, config: MegaFluxConfig, home: Sequence[ExpertWeights]) -> DeviceLayer:
        """Allocate one layer and copy its home weights; every rank makes the same calls in the same order.

        Args:
            layout: ranks, experts and slots.
            config: what the planner may do, and whether replicas stay.
            home: home weights a local rank, E/P experts each.

        Raises:
            UnsupportedError: a layer that the kernels cannot serve.
        """


__all__ = ["DeviceExecutor", "DeviceLayer"]
