"""Tables of capture, from rows as the benchmarks write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import capture_tables
from benchmarks.harness import documents
from benchmarks.serving.models import MODELS
from benchmarks.serving.rollout import CAPTURE, ROUTES, STOCK, RolloutSamples


@pytest.mark.parametrize(("rounds", "interval"), [(6, "+1.00 % | +2.00 %"), (5, "- | -")])
def test_overheads_of_rollouts_stand_beside_their_intervals(
    rounds: int, interval: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = RolloutSamples(MODELS["tiny"], 2, 16, (8, 16))
    capture = [10.1, 10.15, 10.15, 10.15, 10.15, 10.2]
    seconds = {STOCK: [10.0] * 6, ROUTES: [10.1] * 6, CAPTURE: capture}
    samples.seconds = {name: values[:rounds] for name, values in seconds.items()}
    made = {"device": "two GPUs", "commit": "abc", "date": "2026-11-30T12:00"}
    rows = [{"metric": row.metric, "case": row.case, "value": row.value, **made} for row in samples.rows()]
    (tmp_path / "capture_rollout.json").write_text(json.dumps(rows))
    monkeypatch.setattr(documents, "RESULTS", tmp_path)
    documents.results.cache_clear()
    try:
        text = capture_tables.rollouts()
    finally:
        documents.results.cache_clear()
    assert f"| the option `capture` | +1.50 % | {interval} |" in text
    assert "| vLLM's own flag | +1.00 % |" in text
    assert "| the option beside the flag: our part | +0.50 % |" in text
