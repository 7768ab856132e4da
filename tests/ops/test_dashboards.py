"""Dashboards and rules name only series that exist, say what they mean, and are what their code and tests say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import queries
from examples.prometheus_server import program
from megaflux_serve.metrics.catalogue import CATALOGUE, Kind, Metric

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "dashboards" / "prometheus"
SERIES = {name: metric for metric in CATALOGUE for name in metric.series}
SCRAPED = {"job", "instance"}
SEVERITIES = {"critical", "warning", "info"}


def rules() -> list[dict[str, Any]]:
    """Recording and alert rules."""
    files = [yaml.safe_load((RULES / name).read_text()) for name in ("recording.yml", "alerts.yml")]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


ALERTS = [rule for rule in rules() if "alert" in rule]
RECORDED = [rule["record"] for rule in rules() if "record" in rule]
EXPRESSIONS = [
    *((f"{target.dashboard}, {target.panel}", target.expression) for target in queries.all_targets()),
    *((f"variable {query}", query) for query in queries.variable_queries()),
    *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()),
]


@pytest.mark.parametrize("expression", [one for _, one in EXPRESSIONS], ids=[name for name, _ in EXPRESSIONS])
def test_an_expression_names_series_and_labels_of_the_catalogue(expression: str) -> None:
    for name in re.findall(r"(?<![\w:])megaflux_\w+", expression):
        assert name in SERIES
    for name in re.findall(r"\w+:megaflux_\w+:\w+", expression):
        assert name in RECORDED
    for name, selected in re.findall(r"(?<![\w:])(megaflux_\w+)\{([^}]*)\}", expression):
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', selected):
            assert label in {*SERIES[name].labels, *SCRAPED} or (label == "le" and is_bucket(SERIES[name], value))
            closed = SERIES[name].labels.get(label, ())
            assert not closed or value in closed or value.startswith("$")


def is_bucket(metric: Metric, bound: str) -> bool:
    return metric.kind is Kind.HISTOGRAM and float(bound) in metric.buckets


def test_the_committed_dashboards_are_what_the_code_builds() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk needs Python 3.11")
    from dashboards import build

    assert not build.stale(), "run python -m dashboards.build"


@pytest.mark.parametrize("dashboard", queries.dashboards(), ids=lambda board: board["uid"])
def test_every_panel_has_a_place_and_says_what_it_means(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in queries.panels(dashboard):
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_every_alert_is_explained_and_every_explanation_is_of_an_alert() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert re.findall(r"^### (Megaflux\w+)$", text, re.MULTILINE) == [rule["alert"] for rule in ALERTS]
    assert {rule["labels"]["severity"] for rule in ALERTS} <= SEVERITIES


def test_every_rule_is_tested() -> None:
    text = (ROOT / "tests" / "ops" / "rules.yml").read_text()
    fired = set(re.findall(r"alertname: (\w+)\n\s+eval_time:.*\n\s+exp_alerts:\n", text))
    assert fired == {rule["alert"] for rule in ALERTS}
    assert [name for name in RECORDED if name not in text] == []


def test_containers_find_every_file_and_variable_that_they_need() -> None:
    folder = ROOT / "dashboards"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    mounts = {}
    for name, service in compose["services"].items():
        for source, target, *_ in (volume.split(":") for volume in service["volumes"]):
            mounts[name, target] = source
            assert (folder / source).is_dir() if source.startswith(".") else source in compose["volumes"]
    (config,) = [word for word in compose["services"]["prometheus"]["command"] if "--config.file=" in word]
    path = Path(config.partition("=")[2])
    assert (folder / mounts["prometheus", str(path.parent)] / path.name).is_file()

    given = compose["services"]["grafana"]["environment"]
    (provisioned,) = [source for (_, target), source in mounts.items() if target == "/etc/grafana/provisioning"]
    files = sorted((folder / provisioned).glob("*/*.yml"))
    assert [file.parent.name for file in files] == ["dashboards", "datasources"]
    providers, sources = (yaml.safe_load(file.read_text()) for file in files)
    assert {name for file in files for name in re.findall(r"\$\{(\w+)\}", file.read_text())} <= given.keys()
    assert [provider["options"]["path"] for provider in providers["providers"]] == ["${DASHBOARDS}"]
    assert list((folder / mounts["grafana", given["DASHBOARDS"]]).glob("*.json"))
    assert [source["type"] for source in sources["datasources"] if source["isDefault"]] == ["prometheus"]


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", RULES / "prometheus.yml"), ("test", "rules", ROOT / "tests" / "ops" / "rules.yml")],
    ids=["configuration", "rules"],
)
def test_promtool_accepts(arguments: tuple[Any, ...]) -> None:
    promtool = program("promtool")
    if promtool is None:
        pytest.skip("no promtool; make prometheus fetches it where the distribution has one")
    done = subprocess.run([promtool, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
