"""Expert load: which ranks, layers and experts are hot?"""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.boards import Row, dashboard
from dashboards.panels import PER_S, RATIO, SHARE, Query, bars, graph, matrix, over_time
from dashboards.promql import over, rate
from megaflux_serve.metrics import catalogue as m


def build() -> Dashboard:
    """The dashboard."""
    return dashboard(
        "megaflux-experts",
        "MegaFlux: expert load",
        "Which ranks, layers and experts are hot, without replicas and with them?",
        [
            Row("Load of each rank in each layer, over the layer's mean; 1 is balanced", _ranks()),
            Row("Over time", _courses()),
            Row("Hottest experts", _hottest()),
        ],
    )


def load(placement: str, *by: str) -> str:
    """Blocks of a rank over the mean of the ranks."""
    shared = [label for label in by if label != "rank"]
    blocks, mean = rate(m.RANK_BLOCKS, *by, placement=placement), rate(m.MEAN_RANK_BLOCKS, *shared)
    return over(blocks, mean, *shared) if shared else f"{blocks} / on () group_left () {mean}"


def _ranks() -> list[object]:
    return [
        matrix(
            "Without replicas",
            "What each rank would have computed, had every expert stayed at home.",
            RATIO,
            Query(load("fixed", "layer", "rank")),
            row="layer",
            column="rank",
            minimum=0.5,
            maximum=1.5,
        ),
        matrix(
            "With replicas",
            "What each rank computed.",
            RATIO,
            Query(load("planned", "layer", "rank")),
            row="layer",
            column="rank",
            minimum=0.5,
            maximum=1.5,
        ),
    ]


def _courses() -> list[object]:
    busiest = rate(m.BUSIEST_RANK_BLOCKS, "layer", placement="fixed")
    return [
        over_time(
            "Max / mean of each layer without replicas",
            "Layers that are hot, and when.",
            RATIO,
            Query(over(busiest, rate(m.MEAN_RANK_BLOCKS, "layer"), "layer"), "layer {{layer}}"),
            minimum=1.0,
        ),
        graph(
            "Load of each rank with replicas",
            "Over all layers; a rank that is always above 1 owns experts that too few replicas relieve.",
            RATIO,
            [Query(load("planned", "rank"), "rank {{rank}}")],
            width=12,
        ),
    ]


def _hottest() -> list[object]:
    chosen = over(rate(m.EXPERT_ROWS, "layer", "expert", "home_rank"), rate(m.TOKENS, "layer"), "layer")
    return [
        bars(
            "Tokens that choose an expert",
            "Rows of an expert over the tokens of its layer, for the hottest experts "
            "of all layers. Uniform routing gives every expert top-k over the number of experts.",
            SHARE,
            Query(f"topk(16, {chosen})", "layer {{layer}}, expert {{expert}} of rank {{home_rank}}"),
            width=12,
        ),
        graph(
            "The hottest experts",
            "Rows each second. A hot set that changes from minute to minute makes replicas "
            "move; one that stays is held in its slots.",
            PER_S,
            [Query(f"topk(8, {rate(m.EXPERT_ROWS, 'layer', 'expert')})", "layer {{layer}}, expert {{expert}}")],
            width=12,
        ),
    ]
