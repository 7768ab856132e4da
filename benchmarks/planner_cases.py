"""Histograms on which the device planner is compared with the reference planner, and what its tables must hold.

Decides the shapes, the random and adversarial histograms, the options and the copies held before. Tests and the
equality run share it. Knows no device: ``expected_tables`` is made from the reference alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from megaflux_kernels.layout import Header
from numpy.typing import NDArray

from megaflux_serve.planning import GateCosts, ReplicaPlan, apply_gate, planner
from megaflux_serve.routing import CountArray
from megaflux_serve.slots import IntArray, SlotLayout

SHAPES = (
    (8, 2, 1),
    (8, 8, 2),
    (8, 4, 0),
    (16, 2, 4),
    (24, 3, 3),
    (32, 4, 2),
    (64, 8, 2),
    (64, 16, 4),
    (96, 12, 3),
    (120, 40, 5),
    (128, 8, 4),
    (128, 2, 8),
    (128, 64, 1),
    (144, 72, 2),
    (256, 8, 8),
    (256, 2, 16),
    (256, 16, 16),
    (288, 72, 4),
    (504, 72, 1),
    (504, 72, 16),
    (512, 1, 0),
    (512, 8, 16),
    (512, 32, 4),
    (512, 64, 8),
)
"""(experts, ranks, replica slots): E 8 to 512, P 1 to 72, s 0 to 16."""

GROUPS = (
    (planner.PlannerOptions(), None),
    (planner.PlannerOptions(transfer_cost_blocks=2), None),
    (planner.PlannerOptions(reduction_penalty=12), None),
    (
        planner.PlannerOptions(reduction_penalty=3, transfer_cost_blocks=1),
        GateCosts(block_ns=14_300, replica_ns=252_000, plan_ns=30_000, hidden_permille=750),
    ),
)
"""Options and gate of the four groups into which the cases of a shape fall."""


@dataclass(frozen=True)
class Group:
    """Cases of one shape with the same options.

    Attributes:
        layout: homes are permuted in every other group.
        options: options of the planner.
        gate: coefficients of the gate, or None.
        counts: int64 [n, P, E].
        resident: int32 [n, P, s].
    """

    layout: SlotLayout
    options: planner.PlannerOptions
    gate: GateCosts | None
    counts: CountArray
    resident: IntArray

    def plan(self, case: int) -> ReplicaPlan:
        """The reference's plan of one case."""
        plan = planner.plan_replicas(self.counts[case], self.layout, self.options, self.resident[case])
        return plan if self.gate is None else apply_gate(plan, self.gate, self.resident[case])


def groups(shape: tuple[int, int, int], cases_per_group: int, seed: int) -> Iterator[Group]:
    """The groups of a shape; the same arguments give the same cases."""
    experts, ranks, slots = shape
    for index, (options, gate) in enumerate(GROUPS):
        rng = np.random.default_rng([seed, index, *shape])
        home = np.arange(experts, dtype=np.int32) // (experts // ranks)
        layout = SlotLayout(experts, ranks, slots, rng.permutation(home) if index % 2 else home)
        counts = np.stack([histogram(case, experts, ranks, rng) for case in range(cases_per_group)])
        resident = np.stack([held_before(case, layout, rng) for case in range(cases_per_group)])
        yield Group(layout, options, gate, counts, resident)


def histogram(case: int, experts: int, ranks: int, rng: np.random.Generator) -> CountArray:
    """int64 [P, E]: one of ten kinds, in turn; adversarial for ties, tau, block edges, single hot experts and ranks."""
    shape, rows = (ranks, experts), int(rng.integers(1, 1500))
    even = rng.integers(0, 2 * rows, size=shape)
    kinds = (
        lambda: even,
        lambda: (even * rng.pareto(1.0, size=experts)).astype(np.int64) % (1 << 20),  # a few hot experts
        lambda: (even * rng.exponential(size=experts) * rng.random((ranks, 1))).astype(np.int64),  # uneven sources
        lambda: np.full(shape, rows),  # all equal: every comparison is a tie
        lambda: np.where(rng.random(experts) < 0.05, 40 * even, 0),  # most experts empty
        lambda: np.where(np.arange(experts) == rng.integers(experts), 97 * even, 0),  # one expert has everything
        lambda: np.where(np.arange(experts) < experts // ranks, 9 * even, even // 9),  # one rank is hot
        lambda: np.full(shape, 128 // ranks + 1) * rng.integers(0, 9, size=experts) + (rng.random(shape) < 0.01),
        lambda: even * rng.integers(0, 2, size=experts) * 256,  # long queues
        lambda: np.where(np.arange(ranks)[:, None] == rng.integers(ranks), even, 0) * int(rng.integers(0, 2)),
    )
    return np.ascontiguousarray(kinds[case % len(kinds)](), dtype=np.int64)


def held_before(case: int, layout: SlotLayout, rng: np.random.Generator) -> IntArray:
    """int32 [P, s]: no copies in every third case, else random ones in some slots."""
    held = layout.no_replicas()
    if case % 3 == 0:
        return held
    for rank in range(layout.num_ranks):
        away = np.flatnonzero(layout.home_rank != rank)
        num = min(int(rng.integers(0, layout.num_replica_slots + 1)), away.size)
        held[rank, rng.permutation(layout.num_replica_slots)[:num]] = rng.choice(away, num, replace=False)
    return held


def expected_tables(plan: ReplicaPlan, source: int, launch: int) -> dict[str, NDArray[np.integer]]:
    """The tables of ``megaflux_kernels.layout.PlanLayout`` for a plan, each cut to what is defined.

    Args:
        plan: the reference's plan.
        source: the rank whose ``source_base`` is meant.
        launch: launch number.
    """
    layout = plan.layout
    slot_of = layout.expert_to_index(plan.replica_experts)
    computes = plan.blocks > 0
    slot_blocks = np.zeros((layout.num_ranks, layout.slots_per_rank), dtype=np.int64)
    experts, ranks = np.nonzero(computes)
    slot_blocks[ranks, slot_of[experts, ranks]] = plan.blocks[experts, ranks]
    slot_base = np.cumsum(slot_blocks, axis=1) - slot_blocks
    computes[np.arange(layout.num_experts), layout.home_rank] = True  # a home is a segment, empty or not
    experts, ranks = np.nonzero(computes)
    ends = np.cumsum(plan.blocks, axis=1)[experts, ranks]
    slots = slot_of[experts, ranks]
    header = np.zeros(int(Header.SIZE), dtype=np.int64)
    header[Header.CANDIDATE], header[Header.GATED] = plan.candidate, plan.gated
    header[Header.MAX_LOAD], header[Header.FIXED_MAX_LOAD] = plan.max_load, plan.fixed_loads.max()
    header[Header.NUM_BLOCKS], header[Header.NUM_REPLICAS] = plan.blocks.sum(), plan.num_replicas
    header[Header.EPOCH] = launch
    return {
        "header": header[: Header.EPOCH + 1],
        "slot_blocks": slot_blocks,
        "slot_base": slot_base,
        "replica_experts": plan.replica_experts,
        "loads": plan.loads,
        "transfers": plan.transfers,
        "transfer_first": np.searchsorted(plan.transfers[:, 1], np.arange(layout.num_ranks + 1)),
        "expert_rows": plan.counts.sum(axis=0),
        "source_base": plan.counts[:source].sum(axis=0),
        "segment_first": np.searchsorted(experts, np.arange(layout.num_experts + 1)),
        "segment_end": ends,
        "segment_place": ranks << 16 | slots,
        "segment_base": slot_base[ranks, slots] - (ends - plan.blocks[experts, ranks]),
    }


def first_difference(expected: dict[str, NDArray[np.integer]], tables: dict[str, NDArray[np.int32]]) -> str | None:
    """None if the device's tables hold exactly what is expected; else the first difference in words."""
    for name, wanted in expected.items():
        got = tables[name].reshape(-1)[: wanted.size]
        wrong = np.flatnonzero(got != wanted.reshape(-1))
        if wrong.size:
            at = int(wrong[0])
            return f"{name}[{at}] is {got[at]}, expected {wanted.reshape(-1)[at]}; {wrong.size} differ"
    return None


__all__ = ["GROUPS", "SHAPES", "Group", "expected_tables", "first_difference", "groups", "held_before", "histogram"]
