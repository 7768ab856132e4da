"""Windows that the RoutePack tests share, and the invariants of every schedule."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from megaflux_serve.routepack.demand import Demand
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.topology import CostModel, DenseStage, Topology

COST = CostModel((DenseStage("linear", 20.0), DenseStage("attention", 5.0, 8.0)))


def window(num_trajectories: int, num_layers: int = 3, num_experts: int = 16, top_k: int = 4, seed: int = 0) -> Demand:
    """A window whose tokens really select ``top_k`` distinct experts; lengths 20 to 99, three kinds of routing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 100, size=num_trajectories)
    taste = rng.normal(size=(3, num_layers, num_experts))
    counts = np.zeros((num_trajectories, num_layers, num_experts), dtype=np.int64)
    for i, length in enumerate(lengths):
        noise = rng.gumbel(size=(length, num_layers, num_experts))
        chosen = np.argsort(taste[rng.integers(3)] + noise, axis=2)[:, :, -top_k:]
        for layer in range(num_layers):
            counts[i, layer] = np.bincount(chosen[:, layer].reshape(-1), minlength=num_experts)
    return Demand.of(counts, lengths)


@st.composite
def windows(draw: st.DrawFn, smallest: int = 16, largest: int = 40) -> tuple[Demand, Topology]:
    """A window and a topology that it fits: at most 2 rows of 4 slots are needed for every 16 trajectories."""
    num_trajectories = draw(st.integers(smallest, largest))
    demand = window(num_trajectories, draw(st.integers(1, 4)), seed=draw(st.integers(0, 2**16)))
    shards = draw(st.sampled_from([1, 2]))
    stages = draw(st.sampled_from([1, 2]))
    topology = Topology(draw(st.sampled_from([2, 4, 8])), 4, draw(st.integers(250, 400)), shards, stages)
    return demand, topology


def check_schedule(layout: Layout, demand: Demand, topology: Topology) -> None:
    """Every trajectory exactly once, no empty cell, capacities kept, rows at the pipeline floor or above."""
    layout.check(demand.lengths, topology)
    assert layout.num_rows >= topology.min_rows
    members = [i for cell in layout.cells() for i in cell]
    assert sorted(members) == list(range(demand.num_trajectories))
    assert all(layout.cells())
    assert max(sum(int(demand.lengths[i]) for i in cell) for cell in layout.cells()) <= topology.capacity
