"""Tables of RoutePack's results for README.md and docs/routepack.md, the paper's figures in brackets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.harness.documents import Row, provenance, results, rows, table

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
SUMMARY: dict[str, Column] = {
    "P50 of a placement, ms": ("routepack_placement", "p50_ms", percent),
    "layers at the CV target, %": ("routepack_placement", "hit_pct", whole),
    "experts moved": ("routepack_placement", "moves", whole),
    "cost saved, same placement, %": ("routepack_schedule", "joint_saving_pct", percent),
    "cost saved in all, %": ("routepack_schedule", "full_saving_pct", percent),
    "excess removed, %": ("routepack_schedule", "excess_removed_pct", percent),
    "whole plan, s": ("routepack_schedule", "plan_s", percent),
}
MODELS = {"tiny": "23 x 128, synthetic", "flash": "40 x 512, synthetic", "gptoss": "gpt-oss-20b, real"}


def summary() -> str:
    """Placement and schedule with a budget of one second, on windows of the paper's shape and on the real one."""
    lines = []
    for name, (bench, metric, form) in SUMMARY.items():
        case = {"planner": "routepack"} | ({"budget_s": 1.0} if bench == "routepack_schedule" else {})
        lines.append([name, *(beside_the_paper(rows(bench, metric, model=model, **case)[0], form) for model in MODELS)])
    return table(["512 trajectories, 8 ranks", *MODELS.values()], lines) + provenance("routepack_schedule")


def cases(file: str, bench: str, keys: Sequence[str], columns: Sequence[Column]) -> str:
    """One line a case of a benchmark."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in results(file):
        if row["bench"] == bench:
            line = lines.setdefault(tuple(str(row["case"][key]) for key in keys), [""] * len(columns))
            for place, (_, metric, form) in enumerate(columns):
                if row["metric"] == metric:
                    line[place] = beside_the_paper(row, form)
    header = [*keys, *(title for title, _, _ in columns)]
    return table(header, [[*case, *line] for case, line in lines.items()]) + provenance(file)


def beside_the_paper(row: Row, form: Callable[[float], str]) -> str:
    """The value, and the paper's figure in brackets, where it gives one."""
    paper = f" ({row['baseline']['value']:g})" if row["baseline"] else ""
    return form(row["value"]) + paper


MODEL_PLANNER = ("model", "planner")
BEYOND = "routepack_beyond"
TABLES: dict[str, Callable[[], str]] = {
    "routepack": summary,
    "routepack_placement": partial(cases, "routepack_placement", "routepack_placement", MODEL_PLANNER, PLACEMENT),
    "routepack_schedule": partial(
        cases, "routepack_schedule", "routepack_schedule", (*MODEL_PLANNER, "budget_s"), SCHEDULE
    ),
    "routepack_optimum": partial(cases, "routepack_optimum", "routepack_optimum", ("model", "trajectories"), OPTIMUM),
    "routepack_communication": partial(cases, BEYOND, "routepack_communication", MODEL_PLANNER, COMMUNICATION),
    "routepack_pipeline": partial(cases, BEYOND, "routepack_pipeline", MODEL_PLANNER, PIPELINE),
    "routepack_anytime": partial(cases, BEYOND, "routepack_anytime", MODEL_PLANNER, ANYTIME),
}
