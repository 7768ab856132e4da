"""Communication model: what dispatch sends, and how evenly its endpoints share it (RoutePack section 6.1).

Decides the symbols of Eq. 19, which our text of the paper leaves open. For row r and layer l let ``x[s, p]`` be what
the cell of source rank s sends to destination rank p, without what stays on its rank. Then

    V = sum_{s, p} x[s, p]      and      m = max(max_s sum_p x[s, p], max_p sum_s x[s, p]),

the volume and the busiest endpoint, sending or receiving, of n endpoints; ``rho = n sum(m) / sum(V)`` over rows and
layers is 1 where every endpoint is always equally busy, and ``1 / rho`` is the endpoint efficiency.

Counted in *assignments*, x is the expert demand: one copy a selected expert. Counted in *copies*, x is what DeepEP
sends: a token goes once to each rank that holds any of its experts. Copies follow from token-level routes; where only
totals are known, ``expected_rank_copies`` estimates them, taking the experts of a token as independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.routepack.compiled import compiled
from megaflux_serve.routepack.demand import Demand, Int32Array, Int64Array
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.topology import Topology


def rank_copies(experts: NDArray[Any], offsets: Int64Array, owner: Int32Array, num_ranks: int) -> Int32Array:
    """int32 [N, P, L]: tokens of each trajectory that rank p receives at least once in layer l, exactly.

    Args:
        experts: integers [tokens, L, k], as in ``Demand.from_routes``; -1 is filler.
        offsets: int64 [N + 1].
        owner: int32 [L, E].
        num_ranks: P.
    """
    return _rank_copies(np.ascontiguousarray(experts), offsets, owner, num_ranks)


@compiled
def _rank_copies(experts: NDArray[Any], offsets: Int64Array, owner: Int32Array, num_ranks: int) -> Int32Array:
    _, num_layers, top_k = experts.shape
    copies = np.zeros((offsets.size - 1, num_ranks, num_layers), dtype=np.int32)
    last = np.full((num_ranks, num_layers), -1, dtype=np.int64)
    for i in range(offsets.size - 1):
        for token in range(offsets[i], offsets[i + 1]):
            for layer in range(num_layers):
                for k in range(top_k):
                    if experts[token, layer, k] >= 0:
                        rank = owner[layer, experts[token, layer, k]]
                        if last[rank, layer] != token:
                            last[rank, layer] = token
                            copies[i, rank, layer] += 1
    return copies


def expected_rank_copies(demand: Demand, owner: Int32Array, num_ranks: int) -> Int32Array:
    """int32 [N, P, L]: an estimate of ``rank_copies`` from totals, ``t (1 - prod_e (1 - a_e / t))`` over a rank's
    experts."""
    return _expected_copies(demand.counts, demand.lengths, owner, num_ranks)


@compiled
def _expected_copies(counts: Int32Array, lengths: Int64Array, owner: Int32Array, num_ranks: int) -> Int32Array:
    num_trajectories, num_layers, num_experts = counts.shape
    copies = np.zeros((num_trajectories, num_ranks, num_layers), dtype=np.int32)
    missed = np.empty(num_ranks)
    for i in range(num_trajectories):
        for layer in range(num_layers):
            missed[:] = 1.0
            for e in range(num_experts):
                missed[owner[layer, e]] *= 1.0 - counts[i, layer, e] / lengths[i]
            for p in range(num_ranks):
                copies[i, p, layer] = round(lengths[i] * (1.0 - missed[p]))
    return copies


@dataclass(frozen=True)
class Traffic:
    """Traffic of a whole window under one layout.

    Attributes:
        volume: sum of V over rows and layers, remote units (assignments or copies).
        local: units that stay on their rank.
        endpoint_peak: sum of m.
        num_endpoints: n.
    """

    volume: int
    local: int
    endpoint_peak: int
    num_endpoints: int

    @property
    def rho(self) -> float:
        """Eq. 19; 1 is balanced. 1 for a window without remote traffic."""
        return self.num_endpoints * self.endpoint_peak / self.volume if self.volume else 1.0

    @property
    def efficiency(self) -> float:
        """Peak-weighted endpoint efficiency, 1 / rho."""
        return 1 / self.rho


def traffic(units: Int32Array, layout: Layout, topology: Topology) -> Traffic:
    """Traffic of a layout.

    Args:
        units: int32 [N, P, L], assignments (``Demand.rank_demand``) or copies that rank p receives from trajectory i.
        layout: the schedule.
        topology: slot s of a shard with S slots trains on EP rank ``s * P // S``.
    """
    per_shard = topology.slots_per_shard
    source = np.arange(per_shard) * topology.num_ranks // per_shard
    volume, local, peak = _traffic(units, layout.cell, layout.num_cells, per_shard, source)
    return Traffic(volume, local, peak, topology.num_ranks)


@compiled
def _traffic(
    units: Int32Array, cell: Int32Array, num_cells: int, per_shard: int, source: Int64Array
) -> tuple[int, int, int]:
    num_trajectories, num_ranks, num_layers = units.shape
    sent = np.zeros((num_cells // per_shard, num_ranks, num_ranks, num_layers), dtype=np.int64)
    for i in range(num_trajectories):
        sent[cell[i] // per_shard, source[cell[i] % per_shard]] += units[i]
    volume, local, peak = 0, 0, 0
    for unit in range(sent.shape[0]):
        for layer in range(num_layers):
            busiest = 0
            for a in range(num_ranks):
                stays = sent[unit, a, a, layer]
                out, back = -stays, -stays
                for b in range(num_ranks):
                    out += sent[unit, a, b, layer]
                    back += sent[unit, b, a, layer]
                local += stays
                volume += out
                busiest = max(busiest, out, back)
            peak += busiest
    return volume, local, peak
