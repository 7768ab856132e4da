"""The harness keeps exactly the promised form of results and computes exactly the promised statistics."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.harness import (
    ResultRow,
    RunContext,
    figure,
    merge_results,
    read_results,
    summarise,
    time_call,
    write_results,
)
from benchmarks.harness.rows import RESULTS
from benchmarks.harness.table import results_table
from megaflux_serve.durable import write_atomically

ROW = ResultRow("planner", {"experts": 128, "ranks": 8}, "plan_us", 52.0, "us", {"name": "loop", "value": 104.0})
CONTEXT = RunContext("a processor", {"numpy": "2.0"}, "abc123", "2026-01-02T03:04:05+00:00")


def test_a_row_is_written_with_exactly_the_documented_keys_and_values(tmp_path: Path) -> None:
    path = tmp_path / "new" / "planner.json"
    write_results(path, [ROW], CONTEXT)
    assert read_results(path) == [
        {
            "bench": "planner",
            "case": {"experts": 128, "ranks": 8},
            "metric": "plan_us",
            "value": 52.0,
            "unit": "us",
            "baseline": {"name": "loop", "value": 104.0},
            "device": "a processor",
            "software": {"numpy": "2.0"},
            "commit": "abc123",
            "date": "2026-01-02T03:04:05+00:00",
        }
    ]
    assert list(path.parent.iterdir()) == [path]


def test_a_value_that_is_not_finite_or_measured_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not finite"):
        ResultRow("planner", {}, "plan_us", float("nan"), "us")
    with pytest.raises(ValueError, match="measured twice"):
        write_results(tmp_path / "r.json", [ROW, ROW], CONTEXT)
    with pytest.raises(ValueError, match="no rows"):
        write_results(tmp_path / "r.json", [], CONTEXT)
    assert not list(tmp_path.iterdir())


def test_runs_of_one_benchmark_are_merged_as_they_were_written(tmp_path: Path) -> None:
    parts = [tmp_path / "a.json", tmp_path / "b.json"]
    write_results(parts[0], [ROW], CONTEXT)
    write_results(
        parts[1], [ResultRow("planner", {"experts": 64}, "plan_us", 9.0, "us")], replace(CONTEXT, date="later")
    )
    merge_results(tmp_path / "merged.json", parts)
    assert read_results(tmp_path / "merged.json") == [*read_results(parts[0]), *read_results(parts[1])]
    with pytest.raises(ValueError, match="measured twice"):
        merge_results(tmp_path / "merged.json", [parts[0], parts[0]])


def test_a_file_that_is_not_a_list_of_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{"bench": "planner"}]))
    with pytest.raises(ValueError, match="list of rows"):
        read_results(path)


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_current_context_names_this_process_and_checkout() -> None:
    context = RunContext.current("cpu", "numpy")
    assert context.software["numpy"] == np.__version__
    assert context.commit
    assert context.date.endswith("+00:00")


def test_every_committed_result_file_has_the_documented_form() -> None:
    for path in sorted(RESULTS.glob("*.json")):
        rows = read_results(path)
        assert rows, path.name
        assert all(np.isfinite(row["value"]) for row in rows), path.name


def test_several_ranks_count_by_the_slowest_of_each_iteration() -> None:
    timing = summarise([[1.0, 9.0, 3.0], [4.0, 2.0, 5.0]])
    assert (timing.median_us, timing.min_us, timing.iterations) == (5.0, 4.0, 3)
    assert timing.p99_us == pytest.approx(5 + 0.98 * 4)
    with pytest.raises(ValueError, match="not empty"):
        summarise([])


def test_warmup_calls_are_made_but_not_measured() -> None:
    calls: list[int] = []
    ticks = iter(range(0, 100_000, 500))
    samples = time_call(lambda: calls.append(1), iterations=3, warmup=2, clock_ns=lambda: next(ticks))
    assert len(calls) == 5
    assert samples.tolist() == [0.5, 0.5, 0.5]


def test_the_table_has_one_line_a_case_with_ratio_to_baseline_and_fraction_of_the_limit() -> None:
    other = ResultRow("planner", {"experts": 128, "ranks": 8}, "eta", 0.99, "1")
    table = results_table([ROW, other], roofline=lambda row: 0.25 if row.metric == "plan_us" else None)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    lines = [line for line in console.export_text().splitlines() if "52" in line or "plan_us" in line]
    assert len(lines) == 2
    assert [cell.strip() for cell in lines[0].strip("┃").split("┃")] == [
        "experts",
        "ranks",
        "plan_us [us]",
        "of limit",
        "eta",
    ]
    assert [cell.strip() for cell in lines[1].strip("│").split("│")] == ["128", "8", "52 (0.5x loop)", "25.0 %", "0.99"]


def test_a_picture_is_written_only_when_drawing_succeeded(tmp_path: Path) -> None:
    with figure(tmp_path / "a.png", columns=2, title="t") as axes:
        axes[0].plot([1, 2], [3, 4])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

    def fail() -> None:
        with figure(tmp_path / "b.png"):
            raise RuntimeError("drawing failed")

    with pytest.raises(RuntimeError):
        fail()
    assert not (tmp_path / "b.png").exists()
