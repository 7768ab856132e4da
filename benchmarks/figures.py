"""Write the measured tables of README.md and docs/ from benchmarks/results; no figure in them is typed by hand.

Decides which rows of which result file a table shows. A block of a document starts with ``<!-- figures: NAME -->`` and
ends with ``<!-- end of figures -->``; what stands between is replaced by the table of that name.

    python benchmarks/figures.py            rewrite the blocks
    python benchmarks/figures.py --check    exit 1 if a block is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import capture_tables, ep8_tables, layer_tables, routepack_tables, serving_tables
from benchmarks.harness.documents import provenance, table, value

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("capture", "device-planner", "ep8", "forward-kernel", "routepack", "serving-benchmarks", "sglang")
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in PAGES))
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

TOKENS = (1024, 4096, 8192, 32768, 131072)
PLANNER = {"experts": 256, "routing": "zipf-k6"}


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


TABLES: dict[str, Callable[[], str]] = {
    "planner_cpu": planner_cpu,
    "planner": planner,
    "planner_phases": planner_phases,
    **layer_tables.TABLES,
    **ep8_tables.TABLES,
    **serving_tables.TABLES,
    **capture_tables.TABLES,
    **routepack_tables.TABLES,
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
