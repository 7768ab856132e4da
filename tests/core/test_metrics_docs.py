"""docs/metrics.md is what the catalogue says, and its figures of size are true."""

from megaflux_serve.metrics.catalogue import CATALOGUE, HOTTEST_EXPERTS, Kind, Source
from scripts.metrics_page import PAGE, page


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
