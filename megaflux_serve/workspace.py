"""Expert weights of a rank by slot: home weights, which the engine owns, and replica slots, which live here.

Decides what is allocated, once, and that addresses never change. Knows no plan: which expert a replica slot holds is
the layer's to remember, and who copies weights into it is the executor's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaflux_serve.errors import InputError


@dataclass(frozen=True)
class ExpertWeights:
    """A stack of n experts.

    Attributes:
        w13: [n, 2I, H], FC1: the I gate rows, then the I up rows.
        w2: [n, H, I], FC2, in the dtype and on the device of ``w13``.
    """

    w13: Tensor
    w2: Tensor

    def __post_init__(self) -> None:
        if self.w13.ndim != 3 or self.w13.shape[1] % 2:
            raise InputError("w13", f"has shape {list(self.w13.shape)}", "[experts, 2 * intermediate, hidden]")
        num_experts, double, hidden = self.w13.shape
        if tuple(self.w2.shape) != (num_experts, hidden, double // 2):
            raise InputError("w2", f"has shape {list(self.w2.shape)}", f"[{num_experts}, {hidden}, {double // 2}]")
        for name, tensor in (("w13", self.w13), ("w2", self.w2)):
            if not tensor.is_contiguous():
                raise InputError(name, f"has strides {list(tensor.stride())}", "a contiguous tensor")
        if self.w2.dtype != self.w13.dtype or self.w2.device != self.w13.device:
            raise InputError(
                "w2", f"is {self.w2.dtype} on {self.w2.device}", f"{self.w13.dtype} on {self.w13.device}, as w13"
            )

    @property
    def num_experts(self) -> int:
        """Experts in the stack, n."""
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w13.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of both tensors."""
        return self.w13.dtype

    @property
    def device(self) -> torch.device:
        """Device of both tensors."""
        return self.w13.device

    def empty_like(self, num_experts: int) -> ExpertWeights:
        """Uninitialised weights of ``num_experts`` experts of the same shape, dtype and device."""
        return ExpertWeights(
            self.w13.new_empty((num_experts, *self.w13.shape[1:])), self.w2.new_empty((num_experts, *self.w2.shape[1:]))
        )


@dataclass(frozen=True)
class ExpertSlots:
    """All slots of one rank and layer: home slots 0 .. E/P - 1, then replica slots E/P .. E/P + s - 1.

    Attributes:
        home: views of the engine's parameters, E/P experts.
        replicas: s experts; what a slot holds is undefined until a transfer has filled it.
    """

    home: ExpertWeights
    replicas: ExpertWeights

    def expert(self, index: int) -> tuple[Tensor, Tensor]:
        """(w13 [2I, H], w2 [H, I]) of the slot ``index``, as views that may be written."""
        stack, at = (
            (self.home, index) if index < self.home.num_experts else (self.replicas, index - self.home.num_experts)
        )
        return stack.w13[at], stack.w2[at]


def replica_bytes(slots: Iterable[ExpertSlots]) -> dict[int, int]:
    """Bytes of replica slots by their address: slots that layers share are there once."""
    stacks = [own.replicas for own in slots]
    return {stack.w13.data_ptr(): stack.w13.nbytes + stack.w2.nbytes for stack in stacks}


class Workspace:
    """Replica slots of the layers of one process.

    Args:
        num_replica_slots: s, at least 0.
        sticky: every layer gets slots of its own, so that replicas can stay. Otherwise layers of one shape share one
            set a rank: less memory, but nothing stays from batch to batch.
    """

    def __init__(self, num_replica_slots: int, sticky: bool = True) -> None:
        self.num_replica_slots, self.sticky = num_replica_slots, sticky
        self._shared: dict[tuple[object, ...], ExpertWeights] = {}

    def slots(self, home: ExpertWeights, rank: int) -> ExpertSlots:
        """Slots for one layer of ``rank``; replica slots are allocated on the first call that needs them."""
        if self.sticky:
            return ExpertSlots(home, home.empty_like(self.num_replica_slots))
        key = (rank, home.w13.shape[1:], home.dtype, home.device)
        if key not in self._shared:
            self._shared[key] = home.empty_like(self.num_replica_slots)
        return ExpertSlots(home, self._shared[key])


__all__ = ["ExpertSlots", "ExpertWeights", "Workspace", "replica_bytes"]
