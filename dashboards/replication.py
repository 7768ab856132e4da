"""Replication and gate: what was decided, what moved, and what did it win?"""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.boards import Row, dashboard
from dashboards.panels import BYTES, BYTES_PER_S, COUNT, PER_S, RATIO, SHARE, Query, figure, graph, over_time
from dashboards.promql import over, rate, select, share_below
from megaflux_serve.metrics import catalogue as m


def build() -> Dashboard:
    """The dashboard."""
    return dashboard(
        "megaflux-replication",
        "MegaFlux: replication and gate",
        "What did planner and gate decide, which weights moved, and what did it win?",
        [
            Row("Slots", _slots()),
            Row("Decisions", _decisions()),
            Row("Weights", _weights()),
            Row("What it won, by layer and by batch", _won()),
        ],
    )


def _slots() -> list[object]:
    return [
        figure("Ranks", "Expert-parallel ranks.", COUNT, Query(f"max({select(m.RANKS)})")),
        figure("Layers", "Layers of routed experts.", COUNT, Query(f"max({select(m.LAYERS)})")),
        figure("Replica slots", "Of each layer, on one rank.", COUNT, Query(f"max({select(m.REPLICA_SLOTS)})")),
        figure(
            "Memory of the slots",
            "On one rank, all layers.",
            BYTES,
            Query(f"max({select(m.MEMORY, use='replica_slots')})"),
        ),
        figure(
            "Slots in use",
            "Replicas that compute, over the slots of all ranks; mean over layers and batches.",
            SHARE,
            Query(
                f"{rate(m.REPLICAS)} / {rate(m.BATCHES)} / (max({select(m.REPLICA_SLOTS)}) * max({select(m.RANKS)}))"
            ),
            decimals=1,
        ),
        figure("Weights copied", "Into replica slots, all ranks.", BYTES_PER_S, Query(rate(m.REPLICA_BYTES))),
    ]


def _decisions() -> list[object]:
    decided = rate(m.PLAN_DECISIONS, "decision")
    everything = rate(m.PLAN_DECISIONS)
    return [
        graph(
            "Decisions",
            "Batches of a layer: replicas computed (replicated), the gate found that they do not pay "
            "(refused), the planner found none worth opening (not_needed), or the layer has no slots (no_slots).",
            SHARE,
            [Query(f"{decided} / on () group_left () {everything}", "{{decision}}")],
            stacked=True,
        ),
        graph(
            "Refused by the gate, by layer",
            "Layers whose replicas mostly do not pay.",
            SHARE,
            [
                Query(
                    over(rate(m.PLAN_DECISIONS, "layer", decision="refused"), rate(m.PLAN_DECISIONS, "layer"), "layer"),
                    "layer {{layer}}",
                )
            ],
        ),
        graph(
            "Tokens a batch",
            "Tokens that a layer serves at once, all ranks. Small batches rarely pay for replicas.",
            COUNT,
            [Query(over(rate(m.TOKENS), rate(m.BATCHES)), "tokens a batch")],
        ),
    ]


def _weights() -> list[object]:
    resident = rate(m.REPLICAS, weights="resident")
    return [
        graph(
            "Replicas",
            "Replicas that compute each second, over layers: weights in the slot already, or copied for the batch.",
            PER_S,
            [Query(rate(m.REPLICAS, "weights"), "{{weights}}")],
            stacked=True,
        ),
        graph(
            "Replicas that were resident",
            "The part that cost no transfer. Low with sticky slots: the hot set changes faster than it is used.",
            SHARE,
            [Query(over(resident, rate(m.REPLICAS)), "resident")],
        ),
        graph(
            "Weights copied",
            "Bytes into replica slots of all ranks.",
            BYTES_PER_S,
            [Query(rate(m.REPLICA_BYTES, "layer"), "layer {{layer}}")],
            stacked=True,
        ),
    ]


def _won() -> list[object]:
    fixed = rate(m.BUSIEST_RANK_BLOCKS, "layer", placement="fixed")
    planned = rate(m.BUSIEST_RANK_BLOCKS, "layer", placement="planned")
    return [
        over_time(
            "Speed-up of the busiest rank, by layer",
            "Its blocks without replicas over those with them.",
            RATIO,
            Query(over(fixed, planned, "layer"), "layer {{layer}}"),
            minimum=1.0,
            width=8,
        ),
        graph(
            "Blocks moved",
            "The part of all blocks that a replica computed instead of the expert's home.",
            SHARE,
            [Query(over(rate(m.MOVED_BLOCKS), rate(m.BLOCKS)), "moved")],
        ),
        graph(
            "Batches by what is left of the imbalance",
            "The part of batches whose max / mean with replicas is at most so much.",
            SHARE,
            [
                Query(share_below(bound, m.LOAD_IMBALANCE, placement="planned"), f"up to {bound}")
                for bound in (1.025, 1.05, 1.1, 1.2, 1.4)
            ],
        ),
    ]
