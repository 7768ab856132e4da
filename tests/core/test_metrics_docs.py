"""docs/metrics.md is what the catalogue says, and its figures of size are true."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import documents
from megaflux_serve.metrics.catalogue import CATALOGUE, HOTTEST_EXPERTS, Kind, Source
from scripts.metrics_page import PAGE, layer_costs, page


def test_the_page_is_written_from_the_catalogue() -> None:
    assert PAGE.read_text() == page(), "run: python scripts/metrics_page.py"


def test_the_number_of_series_is_what_the_page_says() -> None:
    ranks, layers, workers, histograms = 3, 0, 0, 0
    for metric in CATALOGUE:
        size = 1
        for label, values in metric.labels.items():
            size *= len(values) or {"rank": ranks, "expert": HOTTEST_EXPERTS}.get(label, 1)
        if metric.kind is Kind.HISTOGRAM:
            size *= len(metric.buckets) + 3
        if metric.source is Source.WORKER:
            workers += size if metric.name != "megaflux_build_info" else ranks
        elif metric.source is Source.LAYERS:
            layers += size if metric.kind is Kind.COUNTER else 0
            histograms += size if metric.kind is Kind.HISTOGRAM else 0
    text = " ".join(page().split())
    assert layers == 23 + 2 * ranks
    assert "at most L * (23 + 2 P) counters" in text
    assert f"{histograms} series of histograms, each worker {workers // ranks} series" in text


def test_costs_of_a_layer_are_those_of_the_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "RESULTS", tmp_path)
    case = {"shape": "qwen3-30b-a3b", "tokens_per_rank": 8192, "ranks": 2, "mode": "graph"}
    made = {"device": "two GPUs", "commit": "abc", "date": "2026-11-30T12:00"}
    values = (("overhead_pct", case, 0.123), ("overhead_error_pct", case, 0.3))
    times = (("latency_ms", case | {"variant": name}, ms) for name, ms in (("with", 1.2521), ("without", 1.25)))
    rows = [{"metric": metric, "case": at, "value": value, **made} for metric, at, value in (*values, *times)]
    assert layer_costs() == "Not measured yet.\n"
    (tmp_path / "metrics_overhead.json").write_text(json.dumps(rows))
    documents.results.cache_clear()
    assert "| one captured graph | 8,192 | 1.250 | +0.12 % ± 0.30 |" in layer_costs()
    documents.results.cache_clear()
