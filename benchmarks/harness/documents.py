"""Values of committed result files, and Markdown tables of them. Knows no benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from benchmarks.harness.rows import RESULTS

Row = dict[str, Any]


@cache
def results(bench: str) -> tuple[Row, ...]:
    """The rows of a result file."""
    return tuple(json.loads((RESULTS / f"{bench}.json").read_text()))


def rows(bench: str, metric: str, **case: Any) -> list[Row]:
    """The rows of a result file with this metric whose case has these values."""
    return [row for row in results(bench) if row["metric"] == metric and case.items() <= row["case"].items()]


def value(bench: str, metric: str, **case: Any) -> float:
    """The value of the one row that matches.

    Raises:
        LookupError: no row or several rows match.
    """
    found = rows(bench, metric, **case)
    if len(found) != 1:
        raise LookupError(f"{bench}: {len(found)} rows match {metric} {case}")
    return float(found[0]["value"])


def cell(form: str, bench: str, metric: str, **case: Any) -> str:
    """The value of the one row that matches, as ``form`` writes it; a dash where nothing was measured.

    Raises:
        LookupError: several rows match.
    """
    return form.format(value(bench, metric, **case)) if rows(bench, metric, **case) else "-"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    all_lines = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in all_lines)


def provenance(bench: str, **case: Any) -> str:
    """One line: machine, commits and days of a result file, or of its rows whose case has these values."""
    held = [row for row in results(bench) if case.items() <= row["case"].items()]
    devices, commits = (list(dict.fromkeys(row[key] for row in held)) for key in ("device", "commit"))
    days = list(dict.fromkeys(row["date"][:10] for row in held))
    words = f"{' and '.join(devices)}, commit {', '.join(f'`{commit}`' for commit in commits)}, {', '.join(days)}"
    return f"\n{words}; `benchmarks/results/{bench}.json`.\n"


__all__ = ["RESULTS", "Row", "cell", "provenance", "results", "rows", "table", "value"]
