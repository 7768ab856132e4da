"""Score: what a layout costs under a placement (RoutePack Eq. 12 to 16), exactly.

Decides the objective. Knows no search: ``anneal`` holds the incremental form, and its results are scored again here.
Work is counted in whole routed rows, so the expert part of a score has no rounding.

One row-shard (r, g) costs ``J = A + E``: for every dense stage the slowest cell, plus for every MoE layer the busiest
rank. ``U_g = sum_r J_{r,g}``, with ``pipeline_bubble`` plus (PP - 1) max_r J_{r,g}: the makespan of PP equal stages
over R unequal rows. Layouts compare by (max_g U_g, sum_g U_g, max_{r,g} J_{r,g}).

The communication term has the shape of the expert term, a maximum over ranks per layer, so it is kept as more layers of
the same table: copies times their weight, in fixed point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.routepack.compiled import compiled
from megaflux_serve.routepack.demand import FloatArray, Int32Array, Int64Array
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.topology import CostModel, Topology

RANK_BLOCK = 8
"""Ranks are padded to a multiple of this with ranks that receive nothing: the search unrolls its loop over them."""
LAYER_BLOCK = 8
"""Layers are padded to a multiple of this with layers that carry nothing: rows of the table fill vector registers."""
WEIGHT_UNIT = 16
"""Fixed-point unit of the communication weight: table entries are sixteenths of a routed row where it is used."""


class Score(NamedTuple):
    """Eq. 16; smaller is better, compared in this order. In units of C routed rows."""

    primary: float
    total: float
    worst_row: float


@dataclass(frozen=True)
class RowCosts:
    """Cost of every row-shard, float64 [R, G] each: dense-side A, expert E, and the communication term."""

    dense: FloatArray
    expert: FloatArray
    communication: FloatArray

    @property
    def joint(self) -> FloatArray:
        """float64 [R, G]: J_{r,g}."""
        return self.dense + self.expert + self.communication


@dataclass(frozen=True)
class Problem:
    """Everything that scoring and search read: one window under one placement.

    Attributes:
        work: int32 [N, P', X], the load of trajectory i on rank p: X holds L expert layers and, with a communication
            term, as many of copies; P' and X are padded (``RANK_BLOCK``, ``LAYER_BLOCK``). In ``1 / unit`` routed rows.
        unit: table entries of one routed row.
        num_layers: L.
        lengths: int64 [N].
        topology: ranks, slots, shards and capacity.
        cost: dense stages and options.
    """

    work: Int32Array
    unit: int
    num_layers: int
    lengths: Int64Array
    topology: Topology
    cost: CostModel

    @classmethod
    def of(
        cls,
        rank_demand: Int32Array,
        lengths: Int64Array,
        topology: Topology,
        cost: CostModel,
        copies: Int32Array | None = None,
    ) -> Problem:
        """Build the table.

        Args:
            rank_demand: int32 [N, P, L], q_{i,l,p} (``Demand.rank_demand``).
            lengths: int64 [N].
            topology: its ``num_ranks`` is P.
            cost: the cost model; ``cost.communication > 0`` needs ``copies``.
            copies: int32 [N, P, L], token copies that rank p receives from trajectory i (``communication``).

        Raises:
            ConfigError: a communication weight without copies.
            UnsupportedError: a row's work does not fit 32 bits.
        """
        blocks, unit = [rank_demand.astype(np.int64)], 1
        if cost.communication > 0:
            if copies is None:
                raise ConfigError("communication", cost.communication, "0 where no copies are given")
            unit = WEIGHT_UNIT
            blocks = [blocks[0] * unit, copies.astype(np.int64) * round(unit * cost.communication)]
        num_trajectories, num_ranks, num_layers = rank_demand.shape
        width = len(blocks) * num_layers
        shape = (num_trajectories, _padded(num_ranks, RANK_BLOCK), _padded(width, LAYER_BLOCK))
        work = np.zeros(shape, dtype=np.int32)
        # No row holds more work than slots * capacity tokens of the densest trajectory.
        per_token = max(float((block.sum(axis=(1, 2)) / lengths).max()) for block in blocks) * len(blocks)
        if per_token * topology.slots_per_shard * topology.capacity >= 2**31:
            raise UnsupportedError(
                "capacity", "a row's work does not fit 32 bits", "use smaller cells or more EDP shards"
            )
        for index, block in enumerate(blocks):
            work[:, :num_ranks, index * num_layers : (index + 1) * num_layers] = block
        return cls(work, unit, num_layers, lengths, topology, cost)

    @property
    def stage_weights(self) -> FloatArray:
        """float64 [S, 2]: alpha_s / C and beta_s / C^2, so that a cell costs ``[S, 2] @ [sum t, sum t^2]``."""
        capacity = float(self.topology.capacity)
        weights = [(stage.linear / capacity, stage.quadratic / capacity**2) for stage in self.cost.stages]
        return np.array(weights, dtype=np.float64).reshape(-1, 2)

    @property
    def row_scale(self) -> float:
        """Cost of one table entry, 1 / (unit * C)."""
        return 1.0 / (self.unit * self.topology.capacity)

    @property
    def bubble(self) -> float:
        """PP - 1 where the pipeline term is on, else 0."""
        return float(self.topology.pipeline_stages - 1) if self.cost.pipeline_bubble else 0.0


def row_costs(problem: Problem, layout: Layout) -> RowCosts:
    """A_{r,g} (Eq. 13), E_{r,g} (Eq. 15) and the communication term of every row-shard."""
    topology, num_layers = problem.topology, problem.num_layers
    shards = (layout.num_rows, topology.num_shards)
    lengths = problem.lengths
    cell_sums = np.zeros((layout.num_cells, 2))
    np.add.at(cell_sums, layout.cell, np.stack([lengths, lengths**2], axis=1).astype(np.float64))
    stage_costs = cell_sums @ problem.stage_weights.T
    dense = stage_costs.reshape(*shards, topology.slots_per_shard, -1).max(axis=2).sum(axis=2)
    busiest = unit_loads(problem.work, layout.cell // np.int32(topology.slots_per_shard), shards[0] * shards[1]).max(
        axis=1
    )
    expert = busiest[:, :num_layers].sum(axis=1) * problem.row_scale
    copies = busiest[:, num_layers:].sum(axis=1) * problem.row_scale
    return RowCosts(dense, expert.reshape(shards), copies.reshape(shards))


def shard_costs(problem: Problem, joint: FloatArray) -> FloatArray:
    """float64 [G]: U_g of float64 [R, G] row costs, pipeline bubble included."""
    return np.asarray(joint.sum(axis=0) + problem.bubble * joint.max(axis=0))


def score(problem: Problem, layout: Layout) -> Score:
    """The exact score of a layout, Eq. 16."""
    joint = row_costs(problem, layout).joint
    shards = shard_costs(problem, joint)
    return Score(float(shards.max()), float(shards.sum()), float(joint.max()))


@compiled
def unit_loads(work: Int32Array, unit_of: Int32Array, num_units: int) -> Int64Array:
    """int64 [units, P', X]: W_{r,g,l,p} of Eq. 14, from the row-shard of every trajectory, int32 [N]."""
    loads = np.zeros((num_units, work.shape[1], work.shape[2]), dtype=np.int64)
    for i in range(work.shape[0]):
        loads[unit_of[i]] += work[i]
    return loads


def _padded(size: int, block: int) -> int:
    return -(-size // block) * block
