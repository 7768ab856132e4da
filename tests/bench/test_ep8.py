"""Eight ranks without GPUs: the grid, what fits, what a run keeps and lists, and what reports make of measurements."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from benchmarks import bench_layer_ep8 as bench  # noqa: E402
from benchmarks import ep8_report, ep8_tables  # noqa: E402
from benchmarks.ep8_grid import EXPERTS, RANKS, ROUTINGS, SEEDS, TOKENS, Point, points, replica_slots, spread  # noqa: E402
from benchmarks.harness import documents  # noqa: E402
from benchmarks.harness.rows import RunContext, read_results, write_results  # noqa: E402
from benchmarks.layer_compile import EP8_LARGEST, jobs  # noqa: E402

GIB = 1 << 30
H200_FREE = 138 * GIB
MS = {"fixed": 3.0, "staged": 2.5, "pipelined": 2.0, "resident": 1.8}
CONTEXT = RunContext("2 x made up", {"torch": "0"}, "abc", "2026-01-01T00:00:00+00:00")


def test_the_grid_is_the_paper_s_and_figure_5_adds_a_size_where_it_lies_within() -> None:
    assert [len(points(experts, TOKENS, ROUTINGS, 3)) for experts in EXPERTS] == [147, 147, 150]
    assert {point.tokens for point in points(256, TOKENS, ROUTINGS, 3)} - set(TOKENS) == {6144}
    assert 6144 not in {point.tokens for point in points(256, (1024, 4096), ROUTINGS, 3)}
    sizes = [point.tokens for point in points(256, TOKENS, ROUTINGS, 1)]
    assert sizes == sorted(sizes)


def test_routes_of_a_point_are_those_of_its_seed() -> None:
    first, second = (Point(64, 1024, "zipf-k3", seed).routes() for seed in SEEDS[:2])
    assert first.shape == (RANKS, 1024, 8)
    assert (first != second).any()
    assert (Point(64, 1024, "zipf-k3", SEEDS[0]).routes() == first).all()


def test_eight_gpus_are_not_emulated() -> None:
    assert spread(8) == {"ranks": 8, "gpus": 8}
    assert spread(2) == {"ranks": 8, "gpus": 2, "emulated": True}


@pytest.mark.parametrize(("gpus", "largest"), EP8_LARGEST.items())
def test_kernels_are_compiled_for_the_largest_batch_that_fits(gpus: int, largest: int) -> None:
    for experts in EXPERTS:
        need = [bench.gpu_bytes(experts, replica_slots(experts), m, RANKS // gpus) for m in (largest, 2 * largest)]
        assert need[0] < H200_FREE
        assert need[1] > H200_FREE or largest == max(TOKENS)
    shapes = {
        (job.shape.num_experts, job.shape.num_replica_slots) for job in jobs(["ep8"], gpus) if job.kernel == "planner"
    }
    assert {(experts, slots) for experts in EXPERTS for slots in (0, replica_slots(experts))} <= shapes


def test_hashes_tell_every_bit_and_its_place() -> None:
    output = torch.randn(5000, 16, dtype=torch.bfloat16)
    flipped, swapped = output.clone(), output.flip(0)
    flipped.view(torch.int16)[4500, 7] ^= 1
    hashes = bench.digest([output, output.clone(), flipped, swapped, output.flip(1)])
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


class MadeUpLayer:
    """Answers as a layer does; a step of replicated variants differs if ``broken``."""

    broken = False

    def __init__(self, experts: int, slots: int, max_tokens: int) -> None:
        self.slots = slots

    def step(self, variant: str, batches: object) -> list[Any]:
        return [torch.full((3, 4), float(self.broken and self.slots > 0), dtype=torch.bfloat16)] * 4

    def last_plan(self) -> SimpleNamespace:
        moved = [0] * (0 if MadeUpRun.variant == "resident" else 3)
        return SimpleNamespace(max_load=10 if self.slots else 15, transfers=moved, blocks=[[1]])


class MadeUpRun:
    """The machine of a run: two GPUs, 105 GiB free, and a clock that each measurement moves on by a second."""

    variant, clock = "", 0.0

    @classmethod
    def step_ms(cls, step: Any) -> float:
        cls.variant, cls.clock = step.args[0], cls.clock + 1
        return MS[cls.variant]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[MadeUpRun]]:
    MadeUpRun.clock, MadeUpLayer.broken = 0.0, False
    monkeypatch.setattr(bench.dist, "get_world_size", lambda *group: 2)
    monkeypatch.setattr(bench.torch.cuda, "mem_get_info", lambda: (105 * GIB, 141 * GIB))
    for name, made_up in {
        "local_ranks": lambda ranks, group: range(4, 8),
        "gather": lambda value: [value, value],
        "say": print,
        "free_memory": lambda: None,
        "elapsed": lambda: MadeUpRun.clock,
        "make_batches": lambda point, local: [],
        "step_ms": MadeUpRun.step_ms,
        "Layer": MadeUpLayer,
    }.items():
        monkeypatch.setattr(bench, name, made_up)
    return MadeUpRun


def made_up_run(seconds: float, process: int = 1) -> bench.Run:
    options = SimpleNamespace(tokens=TOKENS, routings=["balanced", "real-high"], realisations=3, process=process)
    run = bench.Run(options)
    run.measure(256, seconds)
    return run


def test_a_run_measures_what_fits_and_lists_the_rest(two_gpus: type[MadeUpRun]) -> None:
    rows = made_up_run(seconds=1000).rows()
    latency = [row for row in rows if row.metric == "latency_ms"]
    assert max(row.case["tokens_per_rank"] for row in latency) == 16384  # 101 of 105 GiB
    assert all(row.case["emulated"] and row.case["gpus"] == 2 for row in rows)
    by_variant = {v: sum(row.case["variant"] == v for row in latency) for v in MS}
    assert by_variant == {"fixed": 33, "staged": 33, "pipelined": 33, "resident": 18}  # 5 sizes x 2 x 3, and 6K
    left = {(r.case["tokens_per_rank"], r.case["reason"]): r.value for r in rows if r.metric == "left_out_points"}
    assert left == {
        (32768, "memory: 183 GiB a GPU, 105 free"): 6,
        (65536, "memory: 346 GiB a GPU, 105 free"): 6,
    }
    assert {row.value for row in rows if row.metric == "ideal_speedup"} == {1.5}


def test_what_a_run_has_no_time_for_is_listed_once_a_size(two_gpus: type[MadeUpRun]) -> None:
    rows = made_up_run(seconds=30).rows()
    fixed, pipelined = (
        {
            (row.case["tokens_per_rank"], row.case["routing"], row.case["realisation"])
            for row in rows
            if row.metric == "latency_ms" and row.case["variant"] == variant
        }
        for variant in ("fixed", "pipelined")
    )
    assert pipelined < fixed
    left = {
        r.case["tokens_per_rank"]: r.value for r in rows if r.metric == "left_out_points" and r.case["reason"] == "time"
    }
    assert sum(left.values()) == 33 - len(pipelined)
    assert max(m for m, *_ in pipelined) <= min(left)


def test_an_output_that_differs_ends_the_run(two_gpus: type[MadeUpRun], monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUpLayer.broken = True
    with pytest.raises(SystemExit, match=r"staged: process 0: rank 4 differs from fixed"):
        made_up_run(seconds=1000)


@pytest.fixture
def runs(two_gpus: type[MadeUpRun], tmp_path: Path) -> list[Path]:
    paths = []
    for process in (1, 2):
        two_gpus.clock = 0.0
        paths.append(tmp_path / f"256_{process}.json")
        write_results(paths[-1], made_up_run(1000, process).rows(), CONTEXT)
    return paths


def test_a_result_is_the_median_of_what_was_measured_whole(runs: list[Path]) -> None:
    rows = [row for path in runs for row in read_results(path)]
    key = {"tokens_per_rank": 1024, "routing": "balanced"}
    latencies = [row for row in rows if row["metric"] == "latency_ms" and key.items() <= row["case"].items()]
    values = iter(range(1, 100))
    for row in latencies:
        row["value"] = float(next(values))
    lost = next(row for row in latencies if row["case"]["variant"] == "staged")
    rows.remove(lost)
    same = ("realisation", "process")
    whole = [row for row in latencies if any(row["case"][name] != lost["case"][name] for name in same)]
    found = {
        (row["case"]["variant"], row["metric"]): row["value"]
        for row in ep8_report.results(rows)
        if key.items() <= row["case"].items()
    }
    expected = {
        variant: statistics.median(row["value"] for row in whole if row["case"]["variant"] == variant)
        for variant in ep8_report.VARIANTS
    }
    assert {variant: found[variant, "latency_ms"] for variant in ep8_report.VARIANTS} == expected
    assert found["fixed", "measurements"] == 5
    assert found["pipelined", "speedup_over_fixed"] == expected["fixed"] / expected["pipelined"]


def test_the_hidden_share_is_one_minus_what_pipelining_leaves_of_the_transfer(runs: list[Path]) -> None:
    rows = ep8_report.results([row for path in runs for row in read_results(path)])
    hidden = {row["case"]["tokens_per_rank"]: row for row in rows if row["metric"] == "hidden_pct"}
    assert set(hidden) == {1024, 2048, 4096, 6144, 8192, 16384}
    assert hidden[6144]["value"] == pytest.approx(100 * (1 - (2.0 - 1.8) / (2.5 - 1.8)))
    assert hidden[6144]["baseline"] == {"name": "paper, 8 x B200", "value": 56}
    assert hidden[8192]["baseline"] is None


def test_runs_on_different_numbers_of_gpus_are_not_mixed(runs: list[Path]) -> None:
    rows = read_results(runs[0]) + read_results(runs[1])
    rows[-1]["case"]["gpus"] = 4
    with pytest.raises(ValueError, match=r"runs on \[2, 4\] GPUs"):
        ep8_report.results(rows)


@pytest.fixture
def tables(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of results that the report has written, which tables are made of."""
    folder = tmp_path / "results"
    monkeypatch.setattr(sys, "argv", ["ep8_report", str(folder / "layer_ep8.json"), *map(str, runs)])
    ep8_report.main()
    for module in (documents, ep8_tables):
        monkeypatch.setattr(module, "RESULTS", folder)
    documents.results.cache_clear()
    yield folder
    documents.results.cache_clear()


def test_the_report_writes_results_and_three_pictures(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {path.name for path in tables.iterdir()}
    pictures = {f"layer_ep8_figure{number}.png" for number in (3, 4, 5)}
    assert names == {"layer_ep8.json", "layer_ep8_runs.json", *pictures}
    assert all(row["bench"] == "layer_ep8" for row in read_results(tables / "layer_ep8.json"))


def test_tables_show_ours_beside_the_paper_s_numbers(tables: Path) -> None:
    shown = ep8_tables.TABLES["ep8_paper"]()
    assert "| geometric mean of the grid | 1.45x | 1.50x (11 configurations) |" in shown
    assert "| real, high, E 256, 1K tokens | 1.29x | 1.50x |" in shown
    assert "| real, high, E 256, 64K tokens | 1.77x | - |" in shown
    assert "| hidden, real, high, E 256, 6K tokens | 56 % | 71 % |" in shown
    assert "Eight ranks on 2 GPUs: 4 virtual ranks each, emulated." in shown
    assert "| 256 | 1K | 1.50 (1.50) | 1.50 (1.50) |" in ep8_tables.TABLES["ep8_layer"]()
    assert "| real, high | 6K | 3.00 | 1.20x | 1.50x | 71 % |" in ep8_tables.TABLES["ep8_stages"]()
    assert "| 256 | 65536 | 2 | 6 | memory: 346 GiB a GPU, 105 free |" in ep8_tables.TABLES["ep8_left_out"]()


def test_planner_and_prefill_stand_beside_the_paper_s(tables: Path) -> None:
    record = read_results(tables / "layer_ep8.json")[0]
    planner = record | {"bench": "planner_ep8", "metric": "total_us", "value": 40.04}
    planner["case"] = {"experts": 128, "tokens_per_rank": 1024, "routing": "real-high", **spread(8)}
    case = {"batch": 8, "chunk": 16384, "routing": "real", "ranks": 8}
    skew = record | {"metric": "fixed_max_over_mean", "case": case, "value": 1.3}
    gain = record | {"metric": "speedup_over_fixed", "case": case | {"backend": "pipelined"}, "value": 1.2}
    (tables / "planner_ep8.json").write_text(json.dumps([planner]))
    (tables / "prefill_ep8.json").write_text(json.dumps([skew, gain]))
    shown = ep8_tables.TABLES["ep8_planner"]()
    assert "| 128 | 40.0 | 42.6 to 65.9 |" in shown
    assert "Eight ranks on 8 GPUs.\n" in shown
    assert "| 8 x 16K | 1.30 | 1.20x | 1.128x |" in ep8_tables.TABLES["ep8_prefill"]()


def test_a_table_without_its_file_says_that_nothing_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ep8_tables, "RESULTS", tmp_path)
    assert {write() for write in ep8_tables.TABLES.values()} == {"Not run yet.\n"}
