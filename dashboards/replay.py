"""Rollout capture and RoutePack: are all routes stored, and how are windows sealed, planned and migrated to?"""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.boards import Row, dashboard
from dashboards.panels import BYTES, BYTES_PER_S, COUNT, PER_S, SECONDS, SHARE, Query, figure, graph
from dashboards.promql import mean, over, rate, select, total
from megaflux_serve.metrics import catalogue as m

LONG = "1h"
"""Windows come minutes apart: their means are over the last hour."""


def build() -> Dashboard:
    """The dashboard."""
    return dashboard(
        "megaflux-replay",
        "MegaFlux: rollout capture and RoutePack",
        "Are the routes of all rollouts stored, and how are windows sealed, placed, scheduled and migrated to?",
        [
            Row("Capture, in the server", _capture()),
            Row("Windows, in the process that seals and plans them", _windows()),
            Row("The last plan", _plan()),
        ],
        variables=("engine", "model"),
    )


def per_window(metric: m.Metric) -> str:
    """Mean of a counter over the windows that were planned."""
    planned = rate(m.WINDOW_PLANNING_SECONDS, suffix="_count", interval=LONG)
    return over(rate(metric, interval=LONG), planned)


def _capture() -> list[object]:
    return [
        graph(
            "Requests stored",
            "Finished requests whose routes are in the store.",
            PER_S,
            [Query(rate(m.CAPTURE_RECORDS, "model"), "{{model}}")],
            width=6,
        ),
        graph(
            "Tokens stored",
            "Tokens of those requests.",
            PER_S,
            [Query(rate(m.CAPTURE_TOKENS, "model"), "{{model}}")],
            width=6,
        ),
        graph(
            "Written",
            "Bytes appended to the replay store.",
            BYTES_PER_S,
            [Query(rate(m.CAPTURE_BYTES, "model"), "{{model}}")],
            width=6,
        ),
        graph(
            "Requests not stored",
            "Since the server started: their routes break the record's contract (refused), "
            "or the disk failed (storage). A window without them is not the whole rollout.",
            COUNT,
            [Query(total(m.CAPTURE_DROPPED, "reason"), "{{reason}}")],
            width=6,
        ),
    ]


def _windows() -> list[object]:
    migrated = rate(m.WINDOW_MIGRATION_SECONDS, suffix="_count", interval=LONG)
    return [
        graph(
            "Time of a window",
            "Mean seconds to seal a window, to repair the expert placement for it, to plan it as a whole, and to move "
            "experts into their new slots.",
            SECONDS,
            [
                Query(mean(m.WINDOW_SEAL_SECONDS, interval=LONG), "seal"),
                Query(mean(m.WINDOW_PLACEMENT_SECONDS, interval=LONG), "placement"),
                Query(mean(m.WINDOW_PLANNING_SECONDS, interval=LONG), "placement and schedule"),
                Query(mean(m.WINDOW_MIGRATION_SECONDS, interval=LONG), "migration"),
            ],
            width=9,
        ),
        graph(
            "Trajectories of a window",
            "Mean of the windows that were planned.",
            COUNT,
            [Query(per_window(m.WINDOW_TRAJECTORIES), "trajectories")],
            width=5,
        ),
        graph(
            "Experts that move for a window",
            "Over all layers; each is one expert's weights and optimizer state.",
            COUNT,
            [Query(per_window(m.WINDOW_MOVED_EXPERTS), "experts")],
            width=5,
        ),
        graph(
            "Bytes that move for a window",
            "What a rank receives from others, weights and optimizer state.",
            BYTES,
            [Query(over(rate(m.WINDOW_MIGRATED_BYTES, interval=LONG), migrated), "received")],
            width=5,
        ),
    ]


def _plan() -> list[object]:
    return [
        figure(
            "Bytes a token",
            "Size of the routes in the store.",
            BYTES,
            Query(over(total(m.CAPTURE_BYTES), total(m.CAPTURE_TOKENS))),
            width=4,
            decimals=1,
        ),
        figure(
            "Windows planned",
            "Since the process started.",
            COUNT,
            Query(f"sum({select(m.WINDOW_PLANNING_SECONDS, '_count')})"),
            width=4,
        ),
        figure("Execution rows", "Synchronised micro-steps of the window.", COUNT, Query(f"max({m.WINDOW_ROWS.name})")),
        figure(
            "Excess removed",
            "Part of global first-fit's cost above the lower bound that the schedule removes.",
            SHARE,
            Query(f"min({m.WINDOW_EXCESS_REMOVED.name})"),
            decimals=1,
        ),
        figure(
            "Expert excess, window",
            "Expert work of the busiest ranks above uniform work that the placement leaves, over the window.",
            SHARE,
            Query(f"max({select(m.WINDOW_EXPERT_EXCESS, scope='window')})"),
            decimals=2,
        ),
        figure(
            "Expert excess, row by row",
            "The same where ranks wait for each other after every row.",
            SHARE,
            Query(f"max({select(m.WINDOW_EXPERT_EXCESS, scope='row_local')})"),
            decimals=2,
        ),
    ]
