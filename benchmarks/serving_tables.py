"""Tables of the serving results for README.md, docs/serving-benchmarks.md and docs/sglang.md; see ``figures``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness.documents import Row, provenance, results, rows, table, value
from benchmarks.serving.backends import BACKENDS
from benchmarks.serving.prefill import STOCK
from benchmarks.serving.routes import ROUTINGS

MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "deepseek-v3-like": "DeepSeek-V3-like"}
ROUTING_NAMES = {"balanced": "balanced", "real": "real", "real-hot-rank": "real, hot experts on one rank"}
DECODE_NAMES = {
    "stock": "stock",
    "fixed": "ours, fixed",
    "staged": "ours, handed over to vLLM's kernels",
    "sticky": "ours, sticky",
}
LARGEST = "logprob_difference_max"
AGREEMENT = {
    "first_token_equal_pct": ("first token equal", "{:.1f} %"),
    "next_token_equal_pct": ("next token equal after equal text", "{:.2f} %"),
    "answers_equal_pct": ("whole answers equal", "{:.1f} %"),
    "logprob_difference_median": ("log-probability differs by, median", "{:.4f}"),
    "logprob_difference_p99": ("99th percentile", "{:.4f}"),
    LARGEST: ("most", "{:.4f}"),
}
LOAD = {
    "median_ttft_ms": ("time to first token, median", "{:.0f} ms"),
    "p99_ttft_ms": ("99th percentile", "{:,.0f} ms"),
    "median_tpot_ms": ("time of a further token, median", "{:.2f} ms"),
    "request_throughput": ("requests a second", "{:.1f}"),
    "total_token_throughput": ("tokens a second, prompts and answers", "{:,.0f}"),
    "first_answer_s": ("from the start to a first answer", "{:.1f} s"),
}
PREFILL_KEYS = ("model", "routing", "batch", "chunk")


def prefill(bench: str = "prefill_latency", **shown: Any) -> str:
    """Time until every request has a token, by case and backend, and the two ratios that matter."""
    measured = rows(bench, "latency_ms", **shown)
    backends = [name for name in BACKENDS if any(row["case"]["backend"] == name for row in measured)]
    lines = []
    for case in prefill_cases(measured):
        latency = {row["case"]["backend"]: row["value"] for row in measured if case.items() <= row["case"].items()}
        ours = [latency[name] for name in backends if name in latency and name not in (*STOCK, "fixed")]
        stock = [latency[name] for name in STOCK if name in latency]
        best = min(ours, default=0.0)
        lines.append(
            [
                MODELS[case["model"]],
                ROUTING_NAMES[case["routing"]],
                f"{case['batch']} x {case['chunk'] // 1024}K",
                f"{value(bench, 'fixed_max_over_mean', **case):.2f}",
                *(f"{latency[name]:.0f}" if name in latency else "" for name in backends),
                f"{latency['fixed'] / best:.2f}x" if best and "fixed" in latency else "",
                f"{min(stock) / best:.2f}x" if best and stock else "",
            ]
        )
    header = ["model", "routing", "requests x budget", "max/mean", *backends, "over fixed", "over stock"]
    return table(header, lines) + provenance(bench)


def prefill_cases(measured: list[Row]) -> list[dict[str, Any]]:
    """The cases of rows, by model, routing, batch and budget."""
    found = {tuple(row["case"][key] for key in PREFILL_KEYS) for row in measured}
    order = sorted(found, key=lambda c: (list(MODELS).index(c[0]), ROUTINGS.index(c[1]), c[2], c[3]))
    return [dict(zip(PREFILL_KEYS, case, strict=True)) for case in order]


def decode() -> str:
    """Time of a decode step and throughput over stock, by running requests."""
    measured = rows("decode", "step_ms")
    backends = [name for name in BACKENDS if any(row["case"]["backend"] == name for row in measured)]
    running = sorted({row["case"]["running"] for row in measured})
    lines = []
    for backend in backends:
        steps = [value("decode", "step_ms", backend=backend, running=number) for number in running]
        cells = [f"{step:.2f}" for step in steps]
        if backend != "stock":
            ratios = [value("decode", "throughput_vs_stock", backend=backend, running=number) for number in running]
            cells = [f"{cell} ({ratio:.2f}x)" for cell, ratio in zip(cells, ratios, strict=True)]
        lines.append([DECODE_NAMES[backend], *cells])
    return table(["ms a step; running requests", *map(str, running)], lines) + provenance("decode")


def agreement() -> str:
    """How far greedy answers agree with the reference's."""
    compared = [(row["case"]["reference"], row["case"]["backend"]) for row in rows("agreement", "answers_equal_pct")]
    alike = {b for r, b in compared if r == "fixed" and not value("agreement", LARGEST, reference=r, backend=b)}
    compared = [(r, b) for r, b in compared if r == "fixed" or b not in alike]  # they differ from stock as fixed does
    lines = []
    for metric, (name, form) in AGREEMENT.items():
        values = [value("agreement", metric, reference=r, backend=b) for r, b in compared]
        lines.append([name, *(form.format(v) for v in values)])
    return table(["", *(f"{backend} / {reference}" for reference, backend in compared)], lines) + provenance(
        "agreement"
    )


def bf16_noise() -> str:
    """How far right implementations of the model that was served differ from each other."""
    pairs = list(dict.fromkeys((row["case"]["reference"], row["case"]["other"]) for row in results("bf16_noise")))
    lines = []
    for metric, (name, form) in AGREEMENT.items():
        if rows("bf16_noise", metric):
            values = [value("bf16_noise", metric, reference=r, other=o) for r, o in pairs]
            lines.append([name, *(form.format(v) for v in values)])
    names = [f"rounded as {other} / {'exact' if of == 'exact' else f'as {of}'}" for of, other in pairs]
    return table(["", *names], lines) + provenance("bf16_noise")


def soak() -> str:
    """What the soak served and what changed by it."""
    lines = []
    for row in results("soak"):
        unit = "" if row["unit"] == "1" else f" {row['unit']}"
        amount = f"{row['value']:,.0f}" if row["unit"] == "1" else f"{row['value']:.1f}"
        lines.append([row["metric"].removesuffix("_pct").removesuffix("_mib").replace("_", " "), f"{amount}{unit}"])
    return table(["", "in all"], lines) + provenance("soak")


def load() -> str:
    """What ``vllm bench serve`` measured on every server, and how long it took to start."""
    servers = [row["case"] for row in rows("serving_load", "first_answer_s")]
    lines = [
        [name, *(form.format(value("serving_load", metric, **server)) for server in servers)]
        for metric, (name, form) in LOAD.items()
    ]
    modes = {False: "layers as in eager mode", True: "compiled"}
    header = [f"{s['backend']}, GPUs: {s['ranks']}, {modes[s['compiled']]}" for s in servers]
    return table(["", *header], lines) + provenance("serving_load")


TABLES: dict[str, Callable[[], str]] = {
    "prefill": prefill,
    "prefill_16": partial(prefill, batch=16, chunk=16384),
    "sglang_prefill": partial(prefill, "sglang_prefill"),
    "decode": decode,
    "agreement": agreement,
    "bf16_noise": bf16_noise,
    "soak": soak,
    "load": load,
}
