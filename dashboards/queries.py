"""What the committed dashboards ask, read back from their JSON.

Decides how Grafana's variables are filled in outside Grafana. Draws nothing and asks nobody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
JSON_FOLDER = FOLDER / "grafana" / "dashboards"


@dataclass(frozen=True)
class Target:
    """One query of one panel.

    Attributes:
        dashboard: title of the dashboard.
        panel: title of the panel.
        expression: PromQL with Grafana's variables.
        legend: Grafana's template for the name of a series.
        instant: whether only the newest value is wanted.
    """

    dashboard: str
    panel: str
    expression: str
    legend: str
    instant: bool


def dashboards(folder: Path = JSON_FOLDER) -> list[dict[str, Any]]:
    """Every committed dashboard, in the order of the files' names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels of a dashboard that show something."""
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def targets(dashboard: dict[str, Any], panel: dict[str, Any]) -> list[Target]:
    """The queries of one panel."""
    return [
        Target(dashboard["title"], panel["title"], one["expr"], one.get("legendFormat", ""), one.get("instant", False))
        for one in panel["targets"]
    ]


def all_targets() -> list[Target]:
    """The queries of all dashboards."""
    return [target for board in dashboards() for panel in panels(board) for target in targets(board, panel)]


def variable_queries() -> list[str]:
    """The series that the dashboards' variables take their values from."""
    variables = (one for board in dashboards() for one in board["templating"]["list"] if one["type"] == "query")
    return sorted({re.fullmatch(r"label_values\((.*), \w+\)", one["query"]["query"])[1] for one in variables})  # type: ignore[index]


def filled(expression: str, interval: str) -> str:
    """The expression with every variable at "All" and rates over ``interval``, such as ``30s``."""
    expression = expression.replace("$__rate_interval", interval)
    return re.sub(r'"\$\w+"', '".*"', expression)


def named(legend: str, labels: dict[str, str]) -> str:
    """A series' name: Grafana's template filled in, or all labels where there is none."""
    if not legend:
        return ", ".join(f"{key} {value}" for key, value in sorted(labels.items()) if key != "__name__")
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), legend)
