"""What belongs to the experts in a rank's slots: weights, and what an optimizer keeps for them.

Decides which tensors move with an expert, and refuses those that cannot. Knows no placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaflux_serve.errors import InputError

Stack = Tensor | Sequence[Tensor]
"""One layer's tensors of the E/P slots: stacked [E/P, ...], or one a slot."""
Signature = tuple[tuple[str, tuple[tuple[tuple[int, ...], str], ...]], ...]


@dataclass(frozen=True)
class ExpertState:
    """The tensors of a rank's experts, as views that migration reads and writes.

    Attributes:
        rows: by name, then layer, then slot: contiguous tensors of any shape and dtype; the same names, shapes and
            dtypes in every slot of a layer and on every rank.
    """

    rows: Mapping[str, Sequence[Sequence[Tensor]]]

    @classmethod
    def of(cls, tensors: Mapping[str, Sequence[Stack]]) -> ExpertState:
        """The state that consists of these tensors.

        Args:
            tensors: by name, one entry a layer.

        Raises:
            InputError: no tensors; names with other numbers of layers or slots; slots of a layer that differ; a tensor
                that is not contiguous or shares its memory with another, so that it could not be written in place; or
                a gradient is there: it belongs to the expert that was in the slot, so migrate between
                ``zero_grad(set_to_none=True)`` and the next backward pass.
        """
        for name, layers in tensors.items():
            for layer, stack in enumerate(layers):
                for tensor in [stack] if isinstance(stack, Tensor) else stack:
                    if tensor.is_leaf and tensor.grad is not None:
                        raise InputError(
                            f"{name}, layer {layer}", "has a gradient", "none: zero_grad(set_to_none=True)"
                        )
        rows = {
            name: [
                list(stack.detach().unbind(0)) if isinstance(stack, Tensor) else [tensor.detach() for tensor in stack]
                for stack in layers
            ]
            for name, layers in tensors.items()
        }
        state = cls(rows)
        state._check()
        return state

    @classmethod
    def of_parameters(
        cls, parameters: Mapping[str, Sequence[Tensor]], optimizer: torch.optim.Optimizer | None = None
    ) -> ExpertState:
        """Stacked parameters, and every stack [E/P, ...] that the optimizer keeps for them: Adam's moments, or what
        Adafactor has by rows and columns. A single number, such as a step count, is the same for all experts and stays.

        Args:
            parameters: by name, a parameter [E/P, ...] a layer.
            optimizer: has stepped at least once, or holds nothing yet on every rank alike.

        Raises:
            InputError: as ``of``; or the optimizer keeps a tensor that is neither a stack nor a single number.
        """
        tensors: dict[str, list[Stack]] = {}
        for name, layers in parameters.items():
            for layer, parameter in enumerate(layers):
                tensors.setdefault(name, []).append(parameter)
                kept = optimizer.state.get(parameter, {}) if optimizer is not None else {}
                for key, value in kept.items():
                    if not isinstance(value, Tensor):
                        continue
                    if value.shape[:1] == parameter.shape[:1]:
                        tensors.setdefault(f"{name}.{key}", []).append(value)
                    elif value.numel() != 1:
                        came = f"is {list(value.shape)} for a parameter {list(parameter.shape)}"
                        raise InputError(
                            f"{name}.{key}, layer {layer}", came, f"[{parameter.shape[0]}, ...] or a number"
                        )
        return cls.of(tensors)

    @property
    def num_layers(self) -> int:
        """L, layers with experts."""
        return len(next(iter(self.rows.values())))

    @property
    def num_slots(self) -> int:
        """E/P, slots of a layer."""
        return len(next(iter(self.rows.values()))[0])

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the layer where they are most."""
        return max(sum(layers[i][0].nbytes for layers in self.rows.values()) for i in range(self.num_layers))

    def slot(self, layer: int, index: int) -> list[Tensor]:
        """The tensors of one slot, in the order of the names."""
        return [layers[layer][index] for layers in self.rows.values()]

    def signature(self) -> Signature:
        """Names, shapes and dtypes by layer; ranks between which experts move must have the same."""
        return tuple(
            (name, tuple((tuple(slots[0].shape), str(slots[0].dtype)) for slots in layers))
            for name, layers in self.rows.items()
        )

    def _check(self) -> None:
        if not self.rows or not all(layers and all(layers) for layers in self.rows.values()):
            raise InputError(
                "tensors", f"hold {list(self.rows)}", "a name with at least one layer of at least one slot"
            )
        for name, layers in self.rows.items():
            if len(layers) != self.num_layers:
                raise InputError(name, f"has {len(layers)} layers", f"{self.num_layers}, as the others have")
            for layer, slots in enumerate(layers):
                if len(slots) != self.num_slots:
                    raise InputError(f"{name}, layer {layer}", f"has {len(slots)} slots", f"{self.num_slots}")
                for index, tensor in enumerate(slots):
                    where = f"{name}, layer {layer}, slot {index}"
                    if tensor.shape != slots[0].shape or tensor.dtype != slots[0].dtype:
                        came = f"is {tensor.dtype} {list(tensor.shape)}"
                        allowed = f"{slots[0].dtype} {list(slots[0].shape)}, as slot 0"
                        raise InputError(where, came, allowed)
                    if not tensor.is_contiguous():
                        raise InputError(where, "is not contiguous", "a contiguous tensor")
        self._check_memory()

    def _check_memory(self) -> None:
        """Every slot has memory of its own: what is expanded from one expert cannot hold another."""
        taken: dict[int, str] = {}
        for name, layers in self.rows.items():
            for layer, slots in enumerate(layers):
                for index, tensor in enumerate(slots):
                    where = f"{name}, layer {layer}, slot {index}"
                    if tensor.numel() and taken.setdefault(tensor.data_ptr(), where) != where:
                        raise InputError(where, f"shares memory with {taken[tensor.data_ptr()]}", "memory of its own")


__all__ = ["ExpertState", "Stack"]
