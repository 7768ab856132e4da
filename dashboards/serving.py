"""Serving overview: is replication on, does it help now, what does it cost?"""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.boards import Row, dashboard
from dashboards.panels import BYTES, COUNT, PER_S, RATIO, SECONDS, SHARE, Query, facts, figure, graph
from dashboards.promql import INTERVAL, mean, over, quantile, rate, select, total
from megaflux_serve.metrics import catalogue as m

FIXED = rate(m.BUSIEST_RANK_BLOCKS, placement="fixed")
PLANNED = rate(m.BUSIEST_RANK_BLOCKS, placement="planned")
MEAN, BALANCED = rate(m.MEAN_RANK_BLOCKS), rate(m.BALANCED_RANK_BLOCKS)
EXCESS_REMOVED = f"({FIXED} - {PLANNED}) / ({FIXED} - {BALANCED} > 0)"


def build() -> Dashboard:
    """The dashboard."""
    return dashboard(
        "megaflux-serving",
        "MegaFlux: serving overview",
        "Is replication on, does it help now, and what does it cost?",
        [
            Row("Now", _now()),
            Row("Balance of the ranks", _balance()),
            Row("Time", _time()),
            Row("Requests, as the engine counts them", _requests()),
            Row("State", _state()),
        ],
    )


def _now() -> list[object]:
    return [
        figure(
            "Tokens",
            "Tokens that a layer serves each second, mean over layers.",
            PER_S,
            Query(f"{rate(m.TOKENS)} / count(sum by (layer) ({select(m.TOKENS)}))"),
        ),
        figure(
            "Speed-up of the busiest rank",
            "Blocks of the busiest rank without replicas over those with them: what the layer could gain if blocks "
            "were all that takes time.",
            RATIO,
            Query(over(FIXED, PLANNED)),
            decimals=2,
        ),
        figure(
            "Max / mean without replicas",
            "Blocks of the busiest rank over the mean, had every expert stayed at home; 1 is balanced.",
            RATIO,
            Query(over(FIXED, MEAN)),
            decimals=3,
        ),
        figure(
            "Max / mean with replicas",
            "The same under the plans that were carried out.",
            RATIO,
            Query(over(PLANNED, MEAN)),
            decimals=3,
        ),
        figure(
            "Excess removed",
            "How much of the busiest rank's work above the best possible balance is gone.",
            SHARE,
            Query(EXCESS_REMOVED),
            decimals=1,
        ),
        figure(
            "Batches with replicas",
            "Batches of a layer in which replicas computed.",
            SHARE,
            Query(over(rate(m.PLAN_DECISIONS, decision="replicated"), rate(m.PLAN_DECISIONS))),
            decimals=1,
        ),
    ]


def _balance() -> list[object]:
    return [
        graph(
            "Max / mean",
            "Blocks of the busiest rank over the mean, before and after planning; 1 is balanced. The "
            "area between the lines is what replicas win.",
            RATIO,
            [Query(over(FIXED, MEAN), "without replicas"), Query(over(PLANNED, MEAN), "with replicas")],
            minimum=1.0,
        ),
        graph(
            "Excess removed",
            "How much of the busiest rank's work above the best possible balance is gone.",
            SHARE,
            [Query(EXCESS_REMOVED, "excess removed")],
        ),
        graph(
            "Routing skew (kappa)",
            "Skew of what the router chose, over layers and batches; 1 is uniform. Small batches are skewed by chance.",
            RATIO,
            [Query(quantile(q, m.ROUTING_KAPPA), f"p{int(100 * q)}") for q in (0.5, 0.95)],
            minimum=1.0,
        ),
    ]


def _time() -> list[object]:
    return [
        graph(
            "Layer time",
            "From the start of planning until the rows of a layer are combined, waits for other ranks included.",
            SECONDS,
            [
                Query(quantile(0.5, m.LAYER_SECONDS, "rank"), "p50, rank {{rank}}"),
                Query(quantile(0.99, m.LAYER_SECONDS, "rank"), "p99, rank {{rank}}"),
            ],
        ),
        graph(
            "Planner time",
            "From the start of planning until the plan is known, the wait for other ranks' counts included.",
            SECONDS,
            [
                Query(quantile(0.5, m.PLANNER_SECONDS, "rank"), "p50, rank {{rank}}"),
                Query(quantile(0.99, m.PLANNER_SECONDS, "rank"), "p99, rank {{rank}}"),
            ],
        ),
        graph(
            "Planner's share of the layer",
            "Mean planner time over mean layer time. It counts the wait for the "
            "slowest rank, so it also grows when ranks arrive at different times.",
            SHARE,
            [Query(f"({mean(m.PLANNER_SECONDS, 'rank')}) / ({mean(m.LAYER_SECONDS, 'rank')})", "rank {{rank}}")],
        ),
    ]


def _requests() -> list[object]:
    def of_engine(name: str) -> str:
        return f'{{__name__=~"{name}", model_name=~"$model"}}'

    first_token = f"sum by (le) (rate({of_engine('(vllm|sglang):time_to_first_token_seconds_bucket')}[{INTERVAL}]))"
    return [
        graph(
            "Requests",
            "Requests that run and that wait for a place in a batch.",
            COUNT,
            [
                Query(f"sum({of_engine('vllm:num_requests_running|sglang:num_running_reqs')})", "running"),
                Query(f"sum({of_engine('vllm:num_requests_waiting|sglang:num_queue_reqs')})", "waiting"),
            ],
        ),
        graph(
            "Time to first token",
            "What a client waits for the first token of its answer.",
            SECONDS,
            [Query(f"histogram_quantile({q}, {first_token})", f"p{int(100 * q)}") for q in (0.5, 0.95)],
        ),
        graph(
            "Prompt and output tokens",
            "Tokens of requests; a token of a prompt that was cached is not computed again.",
            PER_S,
            [
                Query(f"sum(rate({of_engine('(vllm|sglang):prompt_tokens_total')}[{INTERVAL}]))", "prompt"),
                Query(f"sum(rate({of_engine('(vllm|sglang):generation_tokens_total')}[{INTERVAL}]))", "output"),
            ],
        ),
    ]


def _state() -> list[object]:
    return [
        graph(
            "Memory",
            "Memory of one rank: weights at home, replica slots, and the buffers that layers share; the "
            "largest of the ranks.",
            BYTES,
            [Query(f"max by (use) ({select(m.MEMORY)})", "{{use}}")],
            stacked=True,
        ),
        graph(
            "Waits that timed out",
            "Since the server started, by what was waited for. After one, the server cannot go on.",
            COUNT,
            [Query(total(m.WAIT_TIMEOUTS, "phase"), "{{phase}}")],
        ),
        graph(
            "Age of the last report",
            "Workers report once a second; one that is silent is stuck or gone.",
            SECONDS,
            [Query(f"time() - min by (rank) ({select(m.LAST_REPORT)})", "rank {{rank}}")],
        ),
        facts(
            "Workers",
            "What each worker runs.",
            Query(select(m.BUILD_INFO)),
            ["rank", "engine", "engine_version", "version", "executor", "sticky", "gate"],
        ),
    ]
