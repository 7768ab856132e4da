"""The measured part of docs/routepack.md, written between its markers from the result files: no figure is typed.

Run: ``python -m benchmarks.routepack_report`` after the RoutePack benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, read_results
from megaflux_serve.durable import write_atomically

PAGE = Path(__file__).resolve().parents[1] / "docs" / "routepack.md"
START, END = "<!-- results -->", "<!-- end of results -->"
Rows = list[dict[str, Any]]
Column = tuple[str, str, Callable[[float], str]]


def percent(value: float) -> str:
    """Two decimals, never minus zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def whole(value: float) -> str:
    """No decimals."""
    return f"{value:.0f}"


PLACEMENT: tuple[Column, ...] = (
    ("P50, ms", "p50_ms", percent),
    ("layers at the target, %", "hit_pct", percent),
    ("moves a window", "moves", whole),
    ("excess left, %", "excess_pct", percent),
)
SCHEDULE: tuple[Column, ...] = (
    ("rows", "rows", percent),
    ("saved, same placement, %", "joint_saving_pct", percent),
    ("saved in all, %", "full_saving_pct", percent),
    ("excess removed, %", "excess_removed_pct", percent),
    ("row-local excess left, %", "row_local_excess_pct", percent),
    ("whole plan, s", "plan_s", percent),
)
COMMUNICATION: tuple[Column, ...] = (
    ("rho - 1, %", "rho_minus_1_pct", percent),
    ("remote copies, %", "remote_change_pct", percent),
    ("endpoint peak, %", "endpoint_peak_change_pct", percent),
)
PIPELINE: tuple[Column, ...] = (("makespan saved, %", "makespan_saving_pct", percent),)
ANYTIME: tuple[Column, ...] = (
    ("excess of the early placement, %", "early_excess_pct", percent),
    ("moves left", "late_moves", whole),
    ("moves of a repair that waits", "moves", whole),
)
OPTIMUM: tuple[Column, ...] = (
    ("gap to the optimum or bound, %", "gap_pct", percent),
    ("gap to CP-SAT's layout, %", "gap_to_cpsat_pct", percent),
    ("reduction from global FFD, %", "reduction_pct", percent),
)


def table(rows: Rows, bench: str, keys: Sequence[str], columns: Sequence[Column]) -> str:
    """A Markdown table, one line a case; a figure of the paper stands behind ours in brackets."""
    lines = [[*keys, *(title for title, _, _ in columns)], ["---"] * (len(keys) + len(columns))]
    cases: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["bench"] == bench:
            texts = cases.setdefault(tuple(str(row["case"][key]) for key in keys), {})
            for _, metric, form in columns:
                if row["metric"] == metric:
                    paper = f" ({row['baseline']['value']:g})" if row["baseline"] else ""
                    texts[metric] = form(row["value"]) + paper
    lines += [[*case, *(texts.get(metric, "") for _, metric, _ in columns)] for case, texts in cases.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render() -> str:
    """The part between the markers."""
    placement, schedule, beyond, optimum = (
        read_results(RESULTS / f"routepack_{name}.json") for name in ("placement", "schedule", "beyond", "optimum")
    )
    device, software = schedule[0]["device"], schedule[0]["software"]
    parts = (
        "Figures of the paper, on its corpus and 64 workers, stand in brackets.\n"
        f"{device}; Python {software['python']}, numba {software['numba']}.",
        "### Placement, 19 transitions (Table 5)",
        table(placement, "routepack_placement", ("model", "planner"), PLACEMENT),
        "### Schedules (Tables 6 and 21)",
        "Savings are of modelled cost against DP-local FFD, under the same placement and in all; `routepack-curve`\n"
        "are the first five windows at several budgets, `paper-population` is the paper's search (64 chains) on them.",
        table(schedule, "routepack_schedule", ("model", "planner", "budget_s"), SCHEDULE),
        "![Schedules](../benchmarks/results/routepack_schedule.png)",
        "### Small windows (section 4.3, Table 7)",
        "The worst of five windows. Up to 12 trajectories the gap is to the exact optimum, from 16 on to CP-SAT's\n"
        "bound after 20 s on one thread; negative gaps to its layout are windows where the search is better.",
        table(optimum, "routepack_optimum", ("model", "trajectories"), OPTIMUM),
        "### Communication (Table 11)",
        "Changes against Base. Weighing copies in the objective (`full+copies`) brings next to nothing: evening\n"
        "out expert rows already evens out copies. The paper's baseline routes within groups aligned to ranks, which\n"
        "keeps its copies low; these windows do not.",
        table(beyond, "routepack_communication", ("model", "planner"), COMMUNICATION),
        "### Pipeline term, four stages",
        table(beyond, "routepack_pipeline", ("model", "planner"), PIPELINE),
        "### Placement before the window is full",
        table(beyond, "routepack_anytime", ("model", "planner"), ANYTIME),
    )
    return "\n\n".join(parts)


def page(text: str) -> str:
    """The documentation page with the rendered part in place."""
    head, _, rest = text.partition(START)
    _, _, tail = rest.partition(END)
    return f"{head}{START}\n\n{render()}\n\n{END}{tail}"


def main() -> None:
    """Rewrite the page."""
    write_atomically(PAGE, page(PAGE.read_text(encoding="utf-8")).encode())


if __name__ == "__main__":
    main()
