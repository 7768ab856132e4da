"""DeviceExecutor: an executor that also plans, so that nothing of a batch passes through the host.

Decides the contract between such an executor and the layer. The other kind of executor, ``base.Executor``, is handed a
plan that was made on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertSlots, ExpertWeights


class DeviceLayer(ABC):
    """One layer on the local ranks: plans, routes, moves and computes on the device.

    Attributes:
        slots: weights a local rank; whoever writes new home weights writes into these.
        totals: int64 [local ranks, words], what batches add up to (``planning.totals``); on the device, where it grows
            when a captured graph is replayed, too. None without ``config.metrics``.
    """

    slots: Sequence[ExpertSlots]
    totals: Tensor | None

    @abstractmethod
    def prepare(self, top_k: int) -> None:
        """Allocate and compile what depends on k, which the first batch would do otherwise; collective.

        Args:
            top_k: k, experts of a token.

        Raises:
            UnsupportedError: a shape that the kernels cannot serve.
        """

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
        """This process's home weights have changed: with the next batch, all ranks hold no replica as resident."""


class DeviceExecutor(ABC):
    """Makes layers that plan by themselves.

    Attributes:
        kind: the option that asks for it.
        num_ranks: P.
        local_ranks: the ranks that this process holds, ascending.
        notes_batches: whether every batch ends with ``note_failures``. An engine that runs many layers a step may call
            it once a step instead.
    """

    kind: str
    num_ranks: int
    local_ranks: Sequence[int]
    notes_batches: bool = True

    @abstractmethod
    def home_weights(self, layout: SlotLayout, hidden: int, intermediate: int) -> list[ExpertWeights]:
        """Memory for the home weights of one layer that peers can read, so that loaded weights need not be copied.

        Every rank makes the same calls in the same order.

        Args:
            layout: ranks, experts and slots.
            hidden: H.
            intermediate: I.

        Returns:
            Uninitialised weights of E/P experts a local rank, for ``layer``.

        Raises:
            UnsupportedError: a layer that the kernels cannot serve, whatever k is.
        """

    @abstractmethod
    def layer(self, layout: SlotLayout, config: MegaFluxConfig, slots: Sequence[ExpertSlots]) -> DeviceLayer:
        """Make one layer; every rank makes the same calls in the same order.

        Args:
            layout: ranks, experts and slots.
            config: what the planner may do, and whether replicas stay.
            slots: weights a local rank. Home weights of ``home_weights`` stay where they are, others are copied;
                replica slots are used as they are, and may be other layers' too unless replicas stay.

        Raises:
            UnsupportedError: a layer that the kernels cannot serve.
        """

    @abstractmethod
    def note_failures(self) -> None:
        """Have the host know of failed waits once the batches so far have ended; does not wait for that."""

    @abstractmethod
    def raise_failure(self) -> None:
        """Raise a failure that has been noted, by batches or by replays of captured graphs that are over.

        Raises:
            PeerTimeoutError: a wait has failed.
        """

    @abstractmethod
    def timeouts(self) -> list[str]:
        """What was waited for when a wait failed, one a rank and set of buffers; does not wait for the device."""

    @abstractmethod
    def memory_use(self) -> MemoryUse:
        """What this process has allocated so far."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the local ranks.

    Attributes:
        weight_bytes: home weights.
        replica_bytes: replica slots of all layers.
        workspace_bytes: what the layers share.
    """

    weight_bytes: int
    replica_bytes: int
    workspace_bytes: int


__all__ = ["DeviceExecutor", "DeviceLayer", "MemoryUse"]
