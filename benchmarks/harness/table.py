"""Result rows as a terminal table: one line a case, one column a metric. Knows no benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.harness.rows import ResultRow


def results_table(
    rows: Sequence[ResultRow], title: str | None = None, roofline: Callable[[ResultRow], float | None] | None = None
) -> Table:
    """One line a case (its keys first, in order of appearance) and one column a metric.

    A value with a baseline is followed by its ratio to it, ``52.1 (0.43x loop)``.

    Args:
        rows: the rows of a run.
        title: printed above.
        roofline: the fraction of the hardware's limit that a row reaches (1 is the limit), None where that has no
            meaning; adds a column for every metric that has a fraction anywhere.
    """
    case_keys = list(dict.fromkeys(key for row in rows for key in row.case))
    metrics = list(dict.fromkeys((row.metric, row.unit) for row in rows))
    fractions = {id(row): roofline(row) if roofline else None for row in rows}
    limited = {row.metric for row in rows if fractions[id(row)] is not None}

    table = Table(title=title, title_justify="left", header_style="bold")
    for key in case_keys:
        table.add_column(key)
    for metric, unit in metrics:
        table.add_column(metric if unit == "1" else f"{metric} [{unit}]".replace("[", r"\["), justify="right")
        if metric in limited:
            table.add_column("of limit", justify="right")

    by_case: dict[tuple[str, ...], dict[str, ResultRow]] = {}
    for row in rows:
        by_case.setdefault(tuple(str(row.case.get(key, "")) for key in case_keys), {})[row.metric] = row
    for case, measured in by_case.items():
        cells = list(case)
        for metric, _ in metrics:
            cells.append(_value(measured[metric]) if metric in measured else "")
            if metric in limited:
                fraction = fractions[id(measured[metric])] if metric in measured else None
                cells.append("" if fraction is None else f"{100 * fraction:.1f} %")
        table.add_row(*cells)
    return table


def _value(row: ResultRow) -> str:
    text = f"{row.value:.5g}" if abs(row.value) < 1e5 else f"{row.value:,.0f}"
    if row.baseline is None:
        return text
    ratio = f"{row.value / row.baseline['value']:.3g}x " if row.baseline["value"] else ""
    return f"{text} ({ratio}{row.baseline['name']})"


def print_table(
    rows: Sequence[ResultRow], title: str | None = None, roofline: Callable[[ResultRow], float | None] | None = None
) -> None:
    """Print ``results_table``; its columns are never cut, whatever the terminal's width."""
    table = results_table(rows, title, roofline)
    console = Console()
    console.width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)
