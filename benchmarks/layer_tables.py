"""Tables of the layer's results for README.md and docs/forward-kernel.md; see ``figures``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness.documents import cell, provenance, rows, table, value

SHAPES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "deepseek-v3-e64": "DeepSeek-V3-like",
    "olmoe": "OLMoE",
    "gpt-oss-20b": "gpt-oss-20b widths",
}
ROUTINGS = {
    "balanced": "balanced",
    "real-median": "real, median",
    "real-high": "real, high",
    "zipf-3": "kappa 3",
    "zipf-6": "kappa 6",
    "zipf-3-one-rank": "kappa 3, hot experts on one rank",
    "zipf-6-one-rank": "kappa 6, hot experts on one rank",
}
PEERS = {
    "fixed": "one launch, fixed placement",
    "pipelined": "one launch, replicas",
    "all-gather + grouped_mm": "NCCL and torch's grouped_mm",
    "all-gather + quack": "NCCL and quack's grouped products",
    "all-gather + fused_experts": "NCCL and vLLM's fused_experts",
}
AT_8K: dict[str, Any] = {"tokens_per_rank": 8192, "ranks": 2}


def present(bench: str, key: str, names: dict[str, str], ranks: int = 2) -> list[str]:
    """The names that a result file has, in the order of ``names``."""
    held = {row["case"].get(key) for row in rows(bench, "latency_ms", ranks=ranks)}
    return [name for name in names if name in held]


def layer() -> str:
    """The whole layer on two GPUs, planned on the device, sustained: fixed placement and replicas."""
    lines = []
    for shape in present("layer", "shape", SHAPES):
        for routing in present("layer", "routing", ROUTINGS):
            for tokens in sorted({row["case"]["tokens_per_rank"] for row in rows("layer", "latency_ms")}):
                case = {"shape": shape, "routing": routing, "tokens_per_rank": tokens, "protocol": "sustained"}
                rates = [value("layer", "tflops_per_gpu", variant=v, **case) for v in ("fixed", "moving", "sticky")]
                gains = [value("layer", "speedup_over_fixed", variant=v, **case) for v in ("moving", "sticky", "gated")]
                cells = [SHAPES[shape], ROUTINGS[routing], f"{tokens // 1024}K"]
                lines.append([*cells, *(f"{rate:.0f}" for rate in rates), *(f"{gain:.2f}x" for gain in gains)])
    header = ["shape", "routing", "tokens", "fixed", "replicas", "sticky", "gain", "gain, sticky", "gain, gated"]
    return table(header, lines) + provenance("layer")


def forward() -> str:
    """The forward kernel and the combine, balanced, with clock and power."""
    bench, lines = "layer_forward", []
    for shape in present(bench, "shape", SHAPES):
        for variant in ("fixed", "pipelined"):
            at = {**AT_8K, "routing": "balanced", "variant": variant, "shape": shape}
            if not rows(bench, "latency_ms", **at):
                continue  # a plan without replicas is the fixed one
            lines.append(
                [
                    SHAPES[shape],
                    variant,
                    cell("{:.0f}", bench, "tflops_per_gpu", protocol="burst", **at),
                    cell("{:.0f}", bench, "tflops_per_gpu", protocol="sustained", **at),
                    cell("{:.0%}", bench, "roofline_fraction", protocol="burst", **at),
                    cell("{:.0%}", bench, "roofline_fraction", protocol="sustained", **at),
                    cell("{:.0f}", bench, "sm_clock_mhz", protocol="sustained", **at),
                    cell("{:.0f}", bench, "power_w", protocol="sustained", **at),
                ]
            )
    header = ["TFLOP/s a GPU", "", "burst", "sustained", "of the limit", "sustained", "MHz", "W"]
    return table(header, lines) + provenance(bench, ranks=2)


def forward_peers(ranks: int = 2) -> str:
    """Who else computes the layer on the same GPUs in the same run, balanced: burst / sustained."""
    case = {**AT_8K, "ranks": ranks, "routing": "balanced"}
    shapes = present("layer_forward", "shape", SHAPES, ranks)
    lines = []
    for variant in present("layer_forward", "variant", PEERS, ranks):
        cells = []
        for shape in shapes:
            at = {**case, "shape": shape, "variant": variant}
            rates = [
                cell("{:.0f}", "layer_forward", "tflops_per_gpu", protocol=protocol, **at)
                for protocol in ("burst", "sustained")
            ]
            cells.append(" / ".join(rates) if rates != ["-", "-"] else "-")
        if set(cells) != {"-"}:
            lines.append([PEERS[variant], *cells])
    header = ["TFLOP/s a GPU", *(SHAPES[shape] for shape in shapes)]
    return table(header, lines) + provenance("layer_forward", ranks=ranks)


def routings() -> str:
    """By routing, at 8192 tokens a rank."""
    lines = []
    for shape in present("layer_forward", "shape", SHAPES):
        for routing in present("layer_forward", "routing", ROUTINGS):
            case = {**AT_8K, "shape": shape, "routing": routing}
            if rows("layer_forward", "latency_ms", variant="fixed", protocol="burst", **case):
                lines.append([SHAPES[shape], ROUTINGS[routing], *gains(case)])
    return table(["shape", "routing", *GAINS], lines) + provenance("layer_forward", ranks=2)


def tokens() -> str:
    """By batch size, where several were measured."""
    lines = []
    sizes = sorted({row["case"]["tokens_per_rank"] for row in rows("layer_forward", "latency_ms", ranks=2)})
    for shape in present("layer_forward", "shape", SHAPES):
        for routing in present("layer_forward", "routing", ROUTINGS):
            found = [{"shape": shape, "routing": routing, "tokens_per_rank": size, "ranks": 2} for size in sizes]
            found = [case for case in found if rows("layer_forward", "latency_ms", variant="fixed", **case)]
            if len(found) > 1:
                names = (SHAPES[shape], ROUTINGS[routing])
                lines += [[*names, f"{case['tokens_per_rank'] // 1024}K", *gains(case)] for case in found]
    return table(["shape", "routing", "tokens", *GAINS], lines) + provenance("layer_forward", ranks=2)


GAINS = ("fixed, TFLOP/s", "staged", "pipelined", "ideal", "hidden", "pipelined, sustained")


def gains(case: dict[str, Any]) -> list[str]:
    """Single launches: rate at fixed placement, gains, ideal gain, hidden share; then the gain of a sustained run.

    A sustained gain is shown only where the clock of the run was recorded: without it, what ran before may be in it.
    """
    burst = {**case, "protocol": "burst"}
    cells = [cell("{:.0f}", "layer_forward", "tflops_per_gpu", variant="fixed", **burst)]
    cells += [
        cell("{:.2f}x", "layer_forward", "speedup_over_fixed", variant=variant, **burst)
        for variant in ("staged", "pipelined")
    ]
    cells.append(cell("{:.2f}x", "layer_forward", "ideal_speedup", variant="pipelined", **burst))
    cells.append(cell("{:.0f} %", "layer_forward", "hidden_pct", variant="pipelined", **burst))
    sustained = {**case, "protocol": "sustained", "variant": "pipelined"}
    clocked = rows("layer_forward", "sm_clock_mhz", **sustained)
    return [*cells, cell("{:.2f}x", "layer_forward", "speedup_over_fixed", **sustained) if clocked else "-"]


def counters() -> str:
    """What the hardware counted of one rank's launches, forward kernel and combine."""
    bench, lines = "layer_counters", []
    for shape in SHAPES:
        for kernel in ("forward", "combine"):
            at = {"shape": shape, "kernel": kernel}
            if not rows(bench, "latency_ms", **at):
                continue
            cells = [
                cell(form, bench, metric, **at)
                for metric, form in (
                    ("latency_ms", "{:.2f}"),
                    ("tensor_active_pct", "{:.0f} %"),
                    ("dram_read_gb", "{:.2f}"),
                    ("dram_write_gb", "{:.2f}"),
                    ("l2_hit_pct", "{:.0f} %"),
                )
            ]
            lines.append([SHAPES[shape], kernel, *cells])
    header = ["one rank", "", "ms", "matrix units at work", "GB read", "GB written", "L2 hits"]
    return table(header, lines) + provenance(bench)


def stress() -> str:
    """Many launches in a row on two GPUs."""
    names = {
        "launches": ("batches", "{:,.0f}"),
        "launches_in_all": ("layers run", "{:,.0f}"),
        "rows": ("tokens", "{:,.0f}"),
        "values_that_differ": ("values that differ from fixed placement", "{:.0f}"),
        "relative_l2_max": ("relative L2 to float64, worst sample", "{:.2%}"),
        "elapsed_s": ("seconds", "{:.0f}"),
    }
    lines = [[name, cell(form, "layer_stress", metric)] for metric, (name, form) in names.items()]
    return table(["two GPUs, planned on the device", ""], lines) + provenance("layer_stress")


TABLES: dict[str, Callable[[], str]] = {
    "layer": layer,
    "forward": forward,
    "forward_peers": forward_peers,
    "forward_peers_alone": partial(forward_peers, 1),
    "forward_routings": routings,
    "forward_tokens": tokens,
    "layer_counters": counters,
    "layer_stress": stress,
}
