"""EPLB's global packing, the comparison of RoutePack section 3.3: a placement built anew for every window.

Decides nothing for a plan: ``placement`` does. Experts are first replicated, always the one whose copies are busiest,
then packed from heavy to light, each copy to the least loaded rank with a free slot. Resident experts are not
considered.
"""

from __future__ import annotations

import numpy as np

from megaflux_serve.errors import ConfigError
from megaflux_serve.routepack.compiled import compiled
from megaflux_serve.routepack.demand import FloatArray, Int32Array, Int64Array


def eplb_slots(loads: Int64Array, num_ranks: int, replicas_per_rank: int = 0) -> Int32Array:
    """int32 [L, P, E/P + replicas]: the logical expert in every slot, in the order of packing.

    Args:
        loads: int64 [L, E].
        num_ranks: P; divides E.
        replicas_per_rank: further slots of every rank.

    Raises:
        ConfigError: P does not divide E.
    """
    if loads.shape[1] % num_ranks:
        raise ConfigError("num_ranks", num_ranks, f"a divisor of the {loads.shape[1]} experts")
    return _pack(loads, num_ranks, loads.shape[1] // num_ranks + replicas_per_rank)


def eplb_rank_loads(loads: Int64Array, slots: Int32Array) -> FloatArray:
    """float64 [L, P]: rank loads when the demand of an expert is split evenly over its copies."""
    held = slots.reshape(slots.shape[0], -1)
    copies = np.zeros_like(loads)
    for layer, experts in enumerate(held):
        np.add.at(copies[layer], experts, 1)
    share = np.take_along_axis(loads / copies, held.astype(np.int64), axis=1)
    return np.asarray(share.reshape(slots.shape).sum(axis=2))


@compiled
def _pack(loads: Int64Array, num_ranks: int, slots_per_rank: int) -> Int32Array:
    num_layers, num_experts = loads.shape
    num_copies = num_ranks * slots_per_rank
    slots = np.empty((num_layers, num_ranks, slots_per_rank), np.int32)
    for layer in range(num_layers):
        copies = np.ones(num_experts, np.int64)
        expert_of = np.empty(num_copies, np.int64)
        expert_of[:num_experts] = np.arange(num_experts)
        for c in range(num_experts, num_copies):
            busiest = np.argmax(loads[layer] / copies)
            expert_of[c] = busiest
            copies[busiest] += 1
        share = loads[layer][expert_of] / copies[expert_of]
        total, held = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
        for c in np.argsort(-share, kind="mergesort"):
            rank = -1
            for p in range(num_ranks):
                if held[p] < slots_per_rank and (rank < 0 or total[p] < total[rank]):
                    rank = p
            slots[layer, rank, held[rank]] = expert_of[c]
            held[rank] += 1
            total[rank] += share[c]
    return slots
