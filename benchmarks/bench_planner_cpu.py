"""The replica planner on the CPU: how well it balances, and how long a plan takes.

Method: a setting is an (experts, ranks, tokens per rank, routing) tuple of appendix B.1 with three realisations, top-8,
blocks of 128 rows, s = max(1, E / 4P) replica slots; ``benchmarks.cases`` says what each routing is. Each plan is
checked against Eq. 3 before it is counted. Of a setting the mean over its realisations is reported, as in appendix B.2.

* *Balance*, P = 8, E = 64/128/256, M = 1K to 64K (the paper's grid): ``eta_median``, the median over the settings that
  are not balanced, once over the paper's six families and once over OLMoE's domains; ``block_eta_median``, the same
  in blocks, of which no plan can have fewer than tau; ``residual_blocks_median``, rows of the busiest rank above the
  mean, in blocks; ``eta_bound_median``, the best eta with the same replicas and maximum of blocks (``row_optimum``).
  Beyond the paper also E = 512, and P = 72 with E = 144/288/504, without the bound.
* *Time*, M = 8192: ``plan_us``, median of one call of the compiled planner including its checks, on one thread;
  baseline: the specification in plain Python in the same run; ``fixed_us``, the floor: a plan without replicas.

Run: ``python -m benchmarks.bench_planner_cpu`` (half a minute; needs ortools); writes results/planner_cpu.{json,png}.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.progress import track

from benchmarks.cases import REAL, Setting, families
from benchmarks.harness import (
    RESULTS,
    ResultRow,
    RunContext,
    cpu_name,
    figure,
    print_table,
    summarise,
    time_call,
    write_results,
)
from benchmarks.row_optimum import least_max_rows
from megaflux_serve.planning import (
    ReplicaPlan,
    block_eta,
    eta,
    fixed_plan,
    fixed_rank_rows,
    plan_replicas,
    planner,
    rank_rows,
)
from megaflux_serve.planning.workload import BANDS, split_by_source
from megaflux_serve.routing import kappa, max_over_mean
from megaflux_serve.slots import SlotLayout

BENCH = "planner_cpu"
TOKENS = tuple(1024 * k for k in (1, 2, 4, 8, 16, 32, 64))
SHAPES = ((64, 8), (128, 8), (256, 8), (512, 8), (144, 72), (288, 72), (504, 72))
PAPER_SHAPES = SHAPES[:3]
PAPER_FAMILIES = ("zipf-k3", "zipf-k6", *BANDS)
MEDIANS = (("eta", 100, "%"), ("eta_bound", 100, "%"), ("block_eta", 100, "%"), ("residual_blocks", 1, "blocks"))
TIMED_TOKENS = 8192


@dataclass(frozen=True)
class Balance:
    """Means over the realisations of one setting; no eta for balanced routing, whose excess is a few rows or none."""

    eta: float | None
    block_eta: float | None
    eta_bound: float | None
    residual_blocks: float
    kappa: float
    max_over_mean_before: float
    max_over_mean_after: float
    replicas: float


def layout_of(experts: int, ranks: int) -> SlotLayout:
    """The paper's budget, a quarter more experts, but at least one replica slot."""
    return SlotLayout(experts, ranks, max(1, experts // (4 * ranks)))


def measure_balance(setting: Setting) -> Balance:
    """Plan the realisations of a setting."""
    layout = layout_of(setting.experts, setting.ranks)
    plans = [plan_replicas(split_by_source(counts, setting.ranks), layout) for counts in setting.realisations()]
    for plan in plans:
        plan.check()
    mean_rows = setting.tokens_per_rank * 8
    return Balance(
        eta=None if setting.routing == "balanced" else _mean(eta(plan) for plan in plans),
        block_eta=None if setting.routing == "balanced" else _mean(block_eta(plan) for plan in plans),
        eta_bound=_mean(eta_bound(plan) for plan in plans) if _has_bound(setting) else None,
        residual_blocks=float(np.mean([(rank_rows(p).max() - mean_rows) / p.block_rows for p in plans])),
        kappa=float(np.mean([kappa(plan.counts.sum(axis=0)) for plan in plans])),
        max_over_mean_before=float(np.mean([max_over_mean(fixed_rank_rows(plan)) for plan in plans])),
        max_over_mean_after=float(np.mean([max_over_mean(rank_rows(plan)) for plan in plans])),
        replicas=float(np.mean([plan.num_replicas for plan in plans])),
    )


def _has_bound(setting: Setting) -> bool:
    return (setting.experts, setting.ranks) in PAPER_SHAPES and setting.routing != "balanced"


def eta_bound(plan: ReplicaPlan) -> float | None:
    """Eta of the most even rows with the plan's replicas and its maximum of blocks."""
    mean_rows = plan.counts.sum() / plan.layout.num_ranks
    excess = fixed_rank_rows(plan).max() - mean_rows
    return None if excess == 0 else float(1 - (least_max_rows(plan) - mean_rows) / excess)


def _mean(values: Iterable[float | None]) -> float | None:
    counted = [value for value in values if value is not None]
    return float(np.mean(counted)) if counted else None


def balance_rows(balances: dict[Setting, Balance]) -> list[ResultRow]:
    """Medians over groups of settings, and every setting at ``TIMED_TOKENS``."""
    rows = []
    for name, routings in (("paper families", PAPER_FAMILIES), ("olmoe domains", REAL[len(BANDS) :])):
        rows += median_rows(balances, name, routings, PAPER_SHAPES, TOKENS)
        rows += [row for tokens in TOKENS for row in median_rows(balances, name, routings, PAPER_SHAPES, (tokens,))]
        rows += [row for shape in SHAPES for row in median_rows(balances, name, routings, (shape,), TOKENS)]
    for setting, balance in balances.items():
        if setting.tokens_per_rank == TIMED_TOKENS:
            case = _case(setting)
            values = (
                ("kappa", balance.kappa, "1"),
                ("max_over_mean_before", balance.max_over_mean_before, "1"),
                ("max_over_mean_after", balance.max_over_mean_after, "1"),
                ("eta", None if balance.eta is None else 100 * balance.eta, "%"),
                ("replicas", balance.replicas, "1"),
            )
            rows += [ResultRow(BENCH, case, name, value, unit) for name, value, unit in values if value is not None]
    return rows


def median_rows(
    balances: dict[Setting, Balance],
    name: str,
    routings: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
) -> list[ResultRow]:
    """Medians over the settings of a group; none where this machine lacks its traces."""
    group = [
        balance
        for setting, balance in balances.items()
        if setting.routing in routings
        and (setting.experts, setting.ranks) in shapes
        and setting.tokens_per_rank in tokens
        and balance.eta is not None
    ]
    if not group:
        return []
    case: dict[str, str | int] = {
        "experts": "/".join(str(experts) for experts, _ in shapes),
        "ranks": shapes[0][1],
        "tokens_per_rank": tokens[0] if len(tokens) == 1 else f"{tokens[0]}-{tokens[-1]}",
        "routing": name,
        "settings": len(group),
    }
    rows = []
    for metric, scale, unit in MEDIANS:
        values = [value for balance in group if (value := getattr(balance, metric)) is not None]
        if values:
            rows.append(ResultRow(BENCH, case, f"{metric}_median", scale * float(np.median(values)), unit))
    return rows


def time_rows(setting: Setting) -> list[ResultRow]:
    """Time of one plan of the first realisation of a setting."""
    layout = layout_of(setting.experts, setting.ranks)
    counts = split_by_source(setting.realisations()[0], setting.ranks)
    fast = summarise(time_call(lambda: plan_replicas(counts, layout), iterations=200, warmup=20))
    slow = summarise(time_call(lambda: planner.plan_replicas(counts, layout), iterations=5, warmup=1))
    fixed = summarise(time_call(lambda: fixed_plan(counts, layout, 128), iterations=200, warmup=20))
    case = _case(setting)
    peer = {"name": "python specification", "value": slow.median_us}
    return [
        ResultRow(BENCH, case, "plan_us", fast.median_us, "us", peer),
        ResultRow(BENCH, case, "fixed_us", fixed.median_us, "us"),
    ]


def _case(setting: Setting) -> dict[str, str | int]:
    return {
        "experts": setting.experts,
        "ranks": setting.ranks,
        "tokens_per_rank": setting.tokens_per_rank,
        "routing": setting.routing,
        "replica_slots": layout_of(setting.experts, setting.ranks).num_replica_slots,
    }


def draw(balances: dict[Setting, Balance], times: Sequence[ResultRow]) -> None:
    """Left: eta over M with its median and bound; middle: max/mean before and after; right: time of a plan."""
    with figure(RESULTS / "planner_cpu.png", columns=3, title="Replica planner on the CPU") as axes:
        for routing in PAPER_FAMILIES:
            points = [
                (tokens / 1024, balances[setting].eta)
                for tokens in TOKENS
                if (setting := Setting(256, 8, tokens, routing)) in balances
            ]
            if points:
                label = f"{routing}, E 256"
                axes[0].plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=label)
        for metric, style in (("eta", "k-"), ("eta_bound", "k--")):
            medians = [_median_over_paper_grid(balances, metric, tokens) for tokens in TOKENS]
            axes[0].plot([tokens / 1024 for tokens in TOKENS], medians, style, label=f"median {metric}, all E")
        axes[0].set(title="Excess rows removed, P 8", xlabel="tokens a rank (K)", ylabel="eta", ylim=(0.85, 1.002))
        axes[0].set_xscale("log", base=2)
        axes[0].set_xticks([tokens / 1024 for tokens in TOKENS], [str(tokens // 1024) for tokens in TOKENS])
        axes[0].legend(fontsize=6)

        shown = [s for s in balances if (s.experts, s.ranks, s.tokens_per_rank) == (128, 8, TIMED_TOKENS)]
        places = np.arange(len(shown))
        axes[1].barh(places - 0.2, [balances[s].max_over_mean_before for s in shown], 0.38, label="fixed placement")
        axes[1].barh(places + 0.2, [balances[s].max_over_mean_after for s in shown], 0.38, label="with replicas")
        axes[1].set(title="Busiest rank over mean, E 128, P 8, M 8K", xlim=(0.9, None), xlabel="max / mean (rows)")
        axes[1].set_yticks(places, [s.routing for s in shown])
        axes[1].invert_yaxis()
        axes[1].legend(fontsize=7)

        measured: dict[str, list[float]] = {}
        for row in times:
            if row.metric == "plan_us":
                measured.setdefault(f"{row.case['experts']} / {row.case['ranks']}", []).append(row.value)
        for i, values in enumerate(measured.values()):
            axes[2].plot([i] * len(values), values, "o", color="C0", markersize=4, alpha=0.6)
        axes[2].set_xticks(range(len(measured)), list(measured), rotation=30)
        axes[2].set(title="Time of a plan, one dot a routing", xlabel="experts / ranks", ylabel="us", ylim=(0, None))


def _median_over_paper_grid(balances: dict[Setting, Balance], metric: str, tokens: int) -> float:
    grid = [Setting(experts, ranks, tokens, routing) for experts, ranks in PAPER_SHAPES for routing in PAPER_FAMILIES]
    return float(np.median([getattr(balances[setting], metric) for setting in grid if setting in balances]))


def main() -> None:
    routings, reason = families()
    if reason:
        print(reason)
    settings = [
        Setting(experts, ranks, tokens, routing)
        for experts, ranks in SHAPES
        for tokens in TOKENS
        for routing in routings
    ]
    balances = {setting: measure_balance(setting) for setting in track(settings, "balance")}
    timed = [setting for setting in settings if setting.tokens_per_rank == TIMED_TOKENS]
    times = [row for setting in track(timed, "time") for row in time_rows(setting)]

    rows = balance_rows(balances) + times
    write_results(RESULTS / "planner_cpu.json", rows, RunContext.current(cpu_name(), "numpy", "numba"))
    draw(balances, times)
    print_table([row for row in rows if "settings" in row.case], "Balance: medians over settings")
    print_table([row for row in rows if "settings" not in row.case], f"Plans at {TIMED_TOKENS} tokens a rank")


if __name__ == "__main__":
    main()
