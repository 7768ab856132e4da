"""Write the measured tables of README.md and docs/ from benchmarks/results; no figure in them is typed by hand.

Decides which rows of which result file a table shows. A block of a document starts with ``<!-- figures: NAME -->`` and
ends with ``<!-- end of figures -->``; what stands between is replaced by the table of that name.

    python benchmarks/figures.py            rewrite the blocks
    python benchmarks/figures.py --check    exit 1 if a block is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "device-planner.md")
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

TOKENS = (1024, 4096, 8192, 32768, 131072)
PLANNER = {"experts": 256, "routing": "zipf-k6"}
SHAPES = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "mixtral-8x7b": "Mixtral-8x7B", "deepseek-v3-e64": "DeepSeek-V3-like"}
ROUTINGS = {"balanced": "balanced", "zipf-3-one-rank": "kappa 3, hot experts on one rank"}

Row = dict[str, Any]


def rows(bench: str, metric: str, **case: Any) -> list[Row]:
    """The rows of a result file with this metric whose case has these values."""
    found = [row for row in json.loads((RESULTS / f"{bench}.json").read_text()) if row["metric"] == metric]
    return [row for row in found if case.items() <= row["case"].items()]


def value(bench: str, metric: str, **case: Any) -> float:
    """The value of the one row that matches.

    Raises:
        LookupError: no row or several rows match.
    """
    found = rows(bench, metric, **case)
    if len(found) != 1:
        raise LookupError(f"{bench}: {len(found)} rows match {metric} {case}")
    return float(found[0]["value"])


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    all_lines = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in all_lines)


def provenance(bench: str) -> str:
    """One line: machine, commit and date of a result file."""
    first = json.loads((RESULTS / f"{bench}.json").read_text())[0]
    return (
        f"\n{first['device']}, commit `{first['commit']}`, {first['date'][:10]}; `benchmarks/results/{bench}.json`.\n"
    )


def planner_cpu() -> str:
    """Balance and time of the compiled planner at the paper's settings, by tokens a rank."""
    tokens = (1024, 4096, 8192, 16384, 65536)
    lines = []
    for metric, name in (
        ("eta_median", "excess rows removed, median"),
        ("eta_bound_median", "the most that is possible"),
    ):
        values = [
            value("planner_cpu", metric, routing="paper families", settings=18, tokens_per_rank=m) for m in tokens
        ]
        lines.append([name, *(f"{v:.1f} %" for v in values)])
    return table(["tokens a rank", *(f"{m // 1024}K" for m in tokens)], lines) + provenance("planner_cpu")


def planner() -> str:
    """Time of the device planner by tokens a rank, E = 256, on real and on virtual ranks."""
    lines = []
    for ranks, emulated, name in ((2, False, "2 GPUs"), (8, True, "8 virtual ranks on one GPU (emulated)")):
        case = {"ranks": ranks, "emulated": emulated, **PLANNER}
        lines.append([name, *(f"{value('planner', 'total_us', tokens_per_rank=m, **case):.1f}" for m in TOKENS)])
    return table(["µs; tokens a rank", *(f"{m // 1024}K" for m in TOKENS)], lines) + provenance("planner")


def planner_phases() -> str:
    """Where the launch's time goes on two GPUs, E = 256."""
    phases = {
        "histogram": "histogram_us",
        "exchange of counts": "exchange_us",
        "plan": "search_us",
        "of it the four searches": "greedy_us",
        "of it pruning and refinement": "refine_us",
        "of it slots and segments": "tables_us",
        "routes and tables, from the published plan": "routes_us",
        "**total** (graph replay, median)": "total_us",
        "total, p99": "total_p99_us",
    }
    case = {"ranks": 2, "emulated": False, **PLANNER}
    lines = [
        [name, *(f"{value('planner', metric, tokens_per_rank=m, **case):.1f}" for m in TOKENS)]
        for name, metric in phases.items()
    ]
    return table(["µs; tokens a rank", *(f"{m // 1024}K" for m in TOKENS)], lines) + provenance("planner")


def layer() -> str:
    """The whole layer on two GPUs, planned on the device, sustained: fixed placement and replicas."""
    lines = []
    for shape in ("qwen3-30b-a3b", "deepseek-v3-e64"):
        for routing, routing_name in ROUTINGS.items():
            for tokens in (1024, 4096, 8192, 16384):
                case = {
                    "shape": shape,
                    "routing": routing,
                    "tokens_per_rank": tokens,
                    "ranks": 2,
                    "protocol": "sustained",
                }
                rates = [value("layer", "tflops_per_gpu", variant=v, **case) for v in ("fixed", "moving", "sticky")]
                gains = [value("layer", "speedup_over_fixed", variant=v, **case) for v in ("moving", "sticky", "gated")]
                cells = [SHAPES[shape], routing_name, f"{tokens // 1024}K"]
                lines.append([*cells, *(f"{rate:.0f}" for rate in rates), *(f"{gain:.2f}x" for gain in gains)])
    header = ["shape", "routing", "tokens", "fixed", "replicas", "sticky", "gain", "gain, sticky", "gain, gated"]
    return table(header, lines) + provenance("layer")


def peers() -> str:
    """The forward kernel at fixed placement beside an unfused layer on the same two GPUs, single launches."""
    case = {"routing": "balanced", "tokens_per_rank": 8192, "ranks": 2, "protocol": "burst"}
    variants = {"all-gather, grouped GEMM, reduce-scatter": "all-gather + grouped_mm", "one launch": "fixed"}
    lines = [
        [name, *(f"{value('layer_forward', 'tflops_per_gpu', shape=s, variant=v, **case):.0f}" for s in SHAPES)]
        for name, v in variants.items()
    ]
    return table(["TFLOP/s a GPU", *SHAPES.values()], lines) + provenance("layer_forward")


def routepack() -> str:
    """Placement and schedule on windows of the paper's shape and on the real one, the paper's figures in brackets."""
    names = {"tiny": "23 x 128, synthetic", "flash": "40 x 512, synthetic", "gptoss": "gpt-oss-20b, real"}
    placement = {"P50 of a placement, ms": "p50_ms", "layers at the CV target, %": "hit_pct", "experts moved": "moves"}
    schedule = {
        "cost saved, same placement, %": "joint_saving_pct",
        "cost saved in all, %": "full_saving_pct",
        "excess removed, %": "excess_removed_pct",
        "whole plan, s": "plan_s",
    }
    cases = [("routepack_placement", placement, {}), ("routepack_schedule", schedule, {"budget_s": 1.0})]
    lines = []
    for bench, metrics, case in cases:
        for name, metric in metrics.items():
            found = [rows(bench, metric, model=model, planner="routepack", **case)[0] for model in names]
            lines.append([name, *map(_beside_the_paper, found)])
    return table(["512 trajectories, 8 ranks", *names.values()], lines) + provenance("routepack_schedule")


def _beside_the_paper(row: Row) -> str:
    """The value with two digits and the paper's figure in brackets, where it gives one."""
    digits = 0 if row["metric"] in ("moves", "hit_pct") else 2
    paper = f" ({row['baseline']['value']:g})" if row["baseline"] else ""
    return f"{row['value']:.{digits}f}{paper}"


TABLES: dict[str, Callable[[], str]] = {
    "planner_cpu": planner_cpu,
    "planner": planner,
    "planner_phases": planner_phases,
    "layer": layer,
    "peers": peers,
    "routepack": routepack,
}


def filled(text: str) -> str:
    """The document with every block replaced by its table."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block['name']]()}\n{block[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the measured tables of the documents from benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a block is out of date")
    args = parser.parse_args()
    for document in DOCUMENTS:
        text = document.read_text()
        if args.check and filled(text) != text:
            sys.exit(f"error: {document.name} is out of date; run python benchmarks/figures.py")
        if not args.check:
            document.write_text(filled(text))


if __name__ == "__main__":
    main()
