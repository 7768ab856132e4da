"""Tables of the results on eight ranks for docs/ep8.md, beside the paper's figures; see ``figures``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import ep8_paper as paper
from benchmarks.ep8_grid import EXPERTS, HIDING_EXPERTS, HIDING_ROUTING, HIDING_TOKENS, ROUTINGS, TOKENS
from benchmarks.ep8_report import STAGED_ROUTINGS, VARIANTS
from benchmarks.harness.documents import RESULTS, cell, provenance, results, rows, table

NOT_RUN = "Not run yet.\n"
NAMES = {
    "balanced": "balanced",
    **{f"real-{band}": f"real, {band}" for band in ("low", "median", "high", "extreme")},
    "zipf-k3": "kappa 3",
    "zipf-k6": "kappa 6",
}


def on_gpus(bench: str) -> str:
    """The line below a table: on how many GPUs eight ranks ran, then machine, commit and day."""
    case = results(bench)[0]["case"]
    shared = f": {8 // case['gpus']} virtual ranks each, emulated" if case.get("emulated") else ""
    return f"\nEight ranks on {case['gpus']} GPU{'s' * (case['gpus'] > 1)}{shared}." + provenance(bench)


def gains(metric: str, variant: str) -> dict[tuple[int, str, int], float]:
    """A metric of the layer's results by (experts, routing, tokens a rank)."""
    found = rows("layer_ep8", metric, variant=variant)
    return {(r["case"]["experts"], r["case"]["routing"], r["case"]["tokens_per_rank"]): r["value"] for r in found}


def layer() -> str:
    """Pipelined over fixed by experts, batch and routing, the ideal in brackets: the paper's Figure 3."""
    held = gains("speedup_over_fixed", "pipelined")
    routings = [name for name in ROUTINGS if any(key[1] == name for key in held)]
    lines = []
    for experts in EXPERTS:
        for tokens in (m for m in TOKENS if any((key[0], key[2]) == (experts, m) for key in held)):
            case = {"experts": experts, "tokens_per_rank": tokens, "variant": "pipelined"}
            cells = [
                cell("{:.2f}", "layer_ep8", "speedup_over_fixed", routing=name, **case)
                + cell(" ({:.2f})", "layer_ep8", "ideal_speedup", routing=name, **case)
                for name in routings
            ]
            lines.append([str(experts), f"{tokens // 1024}K", *cells])
    return table(["E", "tokens a rank", *(NAMES[name] for name in routings)], lines) + on_gpus("layer_ep8")


def stages() -> str:
    """Staged and pipelined over fixed at E = 256, and what is hidden: the paper's Figures 4 and 5."""
    held, lines = gains("latency_ms", "fixed"), []
    for routing in STAGED_ROUTINGS:
        for tokens in sorted({*TOKENS, *HIDING_TOKENS}):
            if (HIDING_EXPERTS, routing, tokens) in held:
                case = {"experts": HIDING_EXPERTS, "routing": routing, "tokens_per_rank": tokens}
                ratios = [cell("{:.2f}x", "layer_ep8", "speedup_over_fixed", variant=v, **case) for v in VARIANTS[1:]]
                hidden = cell("{:.0f} %", "layer_ep8", "hidden_pct", variant="pipelined", **case)
                fixed = f"{held[HIDING_EXPERTS, routing, tokens]:.2f}"
                lines.append([NAMES[routing], f"{tokens // 1024}K", fixed, *ratios, hidden])
    if not lines:
        return NOT_RUN
    return table(["routing", "tokens a rank", "fixed, ms", *VARIANTS[1:], "hidden"], lines) + on_gpus("layer_ep8")


def beside_paper() -> str:
    """What the paper says in numbers, and ours where it was measured."""
    pipelined, staged = gains("speedup_over_fixed", "pipelined"), gains("speedup_over_fixed", "staged")
    hidden = gains("hidden_pct", "pipelined")
    lines: list[list[str]] = []

    def line(what: str, theirs: str, ours: list[float], show: Callable[[list[float]], str]) -> None:
        lines.append([what, theirs, show(ours) if ours else "-"])

    def mean(values: list[float]) -> str:
        return f"{np.exp(np.mean(np.log(values))):.2f}x ({len(values)} configurations)"

    def highest(values: list[float]) -> str:
        return f"{max(values):.2f}x"

    def span(values: list[float], form: str = "{:.2f}x") -> str:
        return " to ".join(form.format(end) for end in dict.fromkeys((min(values), max(values))))

    line("geometric mean of the grid", f"{paper.GEOMETRIC_MEAN}x", list(pipelined.values()), mean)
    balanced = [value for key, value in pipelined.items() if key[1] == "balanced"]
    line("balanced, geometric mean", f"{paper.BALANCED_MEAN}x", balanced, mean)
    for routing, peak in paper.PEAKS.items():
        mine = [value for key, value in pipelined.items() if key[1] == routing]
        line(f"{NAMES[routing]}, highest", f"{peak}x", mine, highest)
    for tokens, gain in paper.REAL_HIGH_256.items():
        mine = [pipelined[key] for key in [(256, "real-high", tokens)] if key in pipelined]
        line(f"real, high, E 256, {tokens // 1024}K tokens", f"{gain}x", mine, span)
    for tokens, ends in paper.STAGED_256.items():
        keys = [key for key in ((256, routing, tokens) for routing in STAGED_ROUTINGS) if key in staged]
        what = f"E 256, {tokens // 1024}K tokens, low, high, kappa 3 and 6"
        line(f"staged, {what}", f"{ends[0]} to {ends[1]}x", [staged[key] for key in keys], span)
        saved = [100 * (1 - staged[key] / pipelined[key]) for key in keys]
        low, high = paper.PIPELINING_SAVES_PCT[tokens]
        line(f"saved by pipelining, {what}", f"{low} to {high} %", saved, lambda v: span(v, "{:.1f} %"))
    for tokens, share in paper.HIDDEN_PCT.items():
        mine = [hidden[key] for key in [(HIDING_EXPERTS, HIDING_ROUTING, tokens)] if key in hidden]
        line(f"hidden, real, high, E 256, {tokens // 1024}K tokens", f"{share} %", mine, lambda v: span(v, "{:.0f} %"))
    return table(["", paper.MACHINE, "here"], lines) + on_gpus("layer_ep8")


def left_out() -> str:
    """Points of the grid that a run had no memory or no time for."""
    lines = [
        [
            *(str(row["case"][key]) for key in ("experts", "tokens_per_rank", "process")),
            f"{row['value']:g}",
            row["case"]["reason"],
        ]
        for row in rows("layer_ep8_runs", "left_out_points")
    ]
    return table(["E", "tokens a rank", "process", "points", "why"], lines) if lines else "Nothing was left out.\n"


def planner() -> str:
    """The planner's launch under real-high routing by experts and batch, beside the paper's range."""
    held = rows("planner_ep8", "total_us", routing=HIDING_ROUTING)
    sizes = [m for m in TOKENS if any(row["case"]["tokens_per_rank"] == m for row in held)]
    lines = []
    for experts in EXPERTS:
        case: dict[str, Any] = {"routing": HIDING_ROUTING, "experts": experts}
        cells = [cell("{:.1f}", "planner_ep8", "total_us", tokens_per_rank=m, **case) for m in sizes]
        theirs = " to ".join(map(str, paper.PLANNER_US[experts])) if experts in paper.PLANNER_US else "-"
        lines.append([str(experts), *cells, theirs])
    header = ["µs; E", *(f"{m // 1024}K" for m in sizes), f"{paper.MACHINE}, 1K to 128K"]
    return table(header, lines) + on_gpus("planner_ep8")


def prefill() -> str:
    """vLLM's prefill over fixed placement beside the paper's Table 1."""
    held = rows("prefill_ep8", "speedup_over_fixed", backend="pipelined", routing="real")
    lines = []
    for row in sorted(held, key=lambda row: (row["case"]["chunk"], row["case"]["batch"])):
        batch, chunk = row["case"]["batch"], row["case"]["chunk"]
        case = {"batch": batch, "chunk": chunk, "routing": "real"}
        skew = cell("{:.2f}", "prefill_ep8", "fixed_max_over_mean", **case)
        theirs = f"{paper.PREFILL[batch, chunk]}x" if (batch, chunk) in paper.PREFILL else "-"
        lines.append([f"{batch} x {chunk // 1024}K", skew, f"{row['value']:.2f}x", theirs])
    ranks = results("prefill_ep8")[0]["case"]["ranks"]
    header = ["requests x budget", "max/mean", f"{ranks} ranks, one a GPU", paper.MACHINE]
    return table(header, lines) + provenance("prefill_ep8")


def where_run(bench: str, write: Callable[[], str]) -> Callable[[], str]:
    """The table, or that its result file is not there yet."""
    return lambda: write() if (RESULTS / f"{bench}.json").exists() else NOT_RUN


TABLES = {
    "ep8_layer": where_run("layer_ep8", layer),
    "ep8_stages": where_run("layer_ep8", stages),
    "ep8_paper": where_run("layer_ep8", beside_paper),
    "ep8_left_out": where_run("layer_ep8_runs", left_out),
    "ep8_planner": where_run("planner_ep8", planner),
    "ep8_prefill": where_run("prefill_ep8", prefill),
}
"""Tables by the name that a document's block gives."""

__all__ = ["TABLES"]
