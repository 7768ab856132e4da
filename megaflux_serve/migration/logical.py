"""Experts by their logical ids: what checkpoints and weight exports speak.

A checkpoint that names experts by slot is wrong, without an error, as soon as they have moved.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megaflux_serve.errors import InputError
from megaflux_serve.migration.state import ExpertState
from megaflux_serve.routepack.placement import Placement


def logical_experts(
    state: ExpertState, placement: Placement, rank: int
) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """Every expert that a rank holds, layer by layer: (layer, logical expert, its tensors by name, as views).

    To save, write each under its logical id; to load under another placement, copy into what this yields there.

    Args:
        state: of the rank.
        placement: what its slots hold now.
        rank: 0 to P - 1.

    Raises:
        InputError: the state has other layers or slots than the placement.
    """
    found, expected = (state.num_layers, state.num_slots), (len(placement.slots), placement.experts_per_rank)
    if found != expected:
        raise InputError("state", f"has layers and slots {found}", f"{expected}, as the placement")
    held = placement.experts.reshape(len(placement.slots), placement.num_ranks, -1)[:, rank]
    for layer, experts in enumerate(held.tolist()):
        for index, expert in enumerate(experts):
            yield layer, expert, dict(zip(state.rows, state.slot(layer, index), strict=True))


__all__ = ["logical_experts"]
