"""From layers to series: catalogue, meter, snapshots and collector, on layers that run in this process."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from megaflux_kernels.totals_map import Total
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from megaflux_serve.capture import ModelShape, ReplayRecord, ReplayStore
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import InputError
from megaflux_serve.executors import ReferenceExecutor
from megaflux_serve.metrics import catalogue
from megaflux_serve.metrics.catalogue import BY_NAME, CATALOGUE, SERVER_LABELS, Kind, Metric, Source
from megaflux_serve.metrics.events import CaptureEvents, window_migrated, window_planned, window_sealed
from megaflux_serve.metrics.exporter import LATELY_S, LayerCollector, RecentRows, layer_labels
from megaflux_serve.metrics.meter import Meter
from megaflux_serve.metrics.registries import show_layers
from megaflux_serve.metrics.snapshot import FOLDER_VARIABLE, Snapshot, Worker, read_snapshots
from megaflux_serve.metrics.textfile import add_to_textfile
from megaflux_serve.migration import MigrationReport
from megaflux_serve.planning.gate import GateCosts
from megaflux_serve.planning.totals import totals_map
from megaflux_serve.routepack import PlanOptions, SearchOptions, Topology, plan_window
from megaflux_serve.routing import kappa
from megaflux_serve.workspace import Workspace, replica_bytes
from tests.core.moe_cases import make_case
from tests.core.routepack_cases import COST, window

WORKER = Worker("vllm", "0.27.1", "tiny", 0, 2, "reference", True, False)
CONFIG = MegaFluxConfig(block_rows=4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def served(config: MegaFluxConfig = CONFIG, batches: int = 3) -> tuple[Meter, list[Any]]:
    """A meter that watched two layers serve some batches, and the reports of the first."""
    case, reports = make_case([60, 20]), []
    if config.replica_slots == 0:
        case = case.without_replicas()
    layers = [case.reference_layer(config) for _ in range(2)]
    meter = Meter(WORKER, layers[0].executor)
    for index, layer in enumerate(layers):
        layer.name = f"model.layers.{index + 3}.mlp.experts"
        meter.watch(layer, top_k=2)
    layers[0].observers.append(reports.append)
    for _ in range(batches):
        for layer in layers:
            layer.forward(case.batches)
    return meter, reports


def scrape(folder: Path) -> dict[tuple[str, ...], float]:
    """What Prometheus would read: (series name, label values after engine and model) -> value."""
    found = {}
    for metric, family in families(folder):
        for sample in family.samples:
            engine, model, *labels = (
                sample.labels[label] for label in (*metric.labels, "le") if label in sample.labels
            )
            assert (engine, model) == ("vllm", "tiny")
            assert (sample.name, *labels) not in found
            found[(sample.name, *labels)] = sample.value
    return found


def families(folder: Path) -> Iterator[tuple[Metric, Any]]:
    """Each metric that a scrape shows, with its family."""
    registry = CollectorRegistry()
    registry.register(LayerCollector(folder))
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        yield BY_NAME[family.name if family.name in BY_NAME else f"{family.name}_total"], family


def test_series_are_those_of_the_reports(tmp_path: Path) -> None:
    meter, reports = served()
    meter.snapshot().write(tmp_path)
    series, plans = scrape(tmp_path), [report.plan for report in reports]
    assert series["megaflux_batches_total", "3"] == series["megaflux_batches_total", "4"] == 3
    assert series["megaflux_tokens_total", "3"] == sum(report.tokens for report in reports) == 240
    assert series["megaflux_blocks_total", "3"] == sum(plan.loads.sum() for plan in plans)
    assert series["megaflux_busiest_rank_blocks_total", "3", "planned"] == sum(plan.max_load for plan in plans)
    assert series["megaflux_busiest_rank_blocks_total", "3", "fixed"] == sum(max(p.fixed_loads) for p in plans)
    assert series["megaflux_mean_rank_blocks_total", "3"] == sum(plan.loads.mean() for plan in plans)
    for rank in range(2):
        assert series["megaflux_rank_blocks_total", "3", str(rank), "planned"] == sum(p.loads[rank] for p in plans)
        assert series["megaflux_rank_blocks_total", "3", str(rank), "fixed"] == sum(p.fixed_loads[rank] for p in plans)
    assert series["megaflux_balanced_rank_blocks_total", "3"] == sum(-(-plan.loads.sum() // 2) for plan in plans)
    assert series["megaflux_moved_blocks_total", "3"] == sum(plan.blocks_moved for plan in plans) > 0
    copied = sum(len(plan.transfers) for plan in plans)
    assert series["megaflux_replicas_total", "3", "copied"] == copied > 0
    assert series["megaflux_replicas_total", "3", "resident"] == sum(p.num_replicas for p in plans) - copied > 0
    assert series["megaflux_replica_bytes_total", "3"] == copied * 4 * 3 * 24 * 16
    assert series["megaflux_plan_decisions_total", "3", "replicated"] == 3
    assert series["megaflux_load_imbalance_ratio_count", "fixed"] == 6  # both layers
    assert series["megaflux_load_imbalance_ratio_bucket", "fixed", "1.1"] == 0
    assert series["megaflux_load_imbalance_ratio_bucket", "planned", "1.1"] == 6
    skew = kappa(plans[0].counts.sum(axis=0))
    assert skew > 1.2
    assert series[("megaflux_routing_kappa_ratio_sum",)] == pytest.approx(6 * skew, abs=0.006)
    assert series["megaflux_planner_seconds_count", "0"] == series["megaflux_layer_seconds_count", "0"] == 6
    assert 0 < series["megaflux_planner_seconds_sum", "0"] < series["megaflux_layer_seconds_sum", "0"] < 60
    assert series["megaflux_memory_bytes", "0", "home_slots"] == 2 * 8 * 4 * 3 * 24 * 16
    assert series["megaflux_memory_bytes", "0", "replica_slots"] == 2 * 2 * 2 * 4 * 3 * 24 * 16
    assert series["megaflux_layers", "0"] == series["megaflux_ranks", "0"] == 2
    rows = {labels[2]: value for labels, value in series.items() if labels[:2] == ("megaflux_expert_rows_total", "3")}
    assert rows == {str(e): n for e, n in enumerate(sum(plan.counts.sum(axis=0) for plan in plans)) if n}


def test_every_series_is_in_the_catalogue_with_its_labels_and_values(tmp_path: Path) -> None:
    served()[0].snapshot().write(tmp_path)
    shown = set()
    for metric, family in families(tmp_path):
        shown.add(metric.name)
        assert family.type == metric.kind.value
        assert family.documentation == metric.help
        for sample in family.samples:
            assert sample.name in metric.series
            assert {*sample.labels} - {"le"} == {*metric.labels}
            for label, value in sample.labels.items():
                assert value in (metric.labels.get(label) or (value,))
    assert shown == {metric.name for metric in CATALOGUE if metric.source in (Source.LAYERS, Source.WORKER)}


@pytest.mark.parametrize(
    ("config", "decision"),
    [
        (MegaFluxConfig(block_rows=4, replica_slots=0), "no_slots"),
        (MegaFluxConfig(block_rows=4, gate=GateCosts(1, 10**9, 0, 0)), "refused"),
        (MegaFluxConfig(block_rows=4, transfer_cost_blocks=1000), "not_needed"),
    ],
)
def test_decisions_say_why_nothing_was_replicated(tmp_path: Path, config: MegaFluxConfig, decision: str) -> None:
    served(config)[0].snapshot().write(tmp_path)
    series = scrape(tmp_path)
    decisions = {name: series["megaflux_plan_decisions_total", "3", name] for name in catalogue.DECISIONS}
    assert decisions == {name: 3 * (name == decision) for name in catalogue.DECISIONS}
    assert (
        series["megaflux_busiest_rank_blocks_total", "3", "planned"]
        == (series["megaflux_busiest_rank_blocks_total", "3", "fixed"])
    )


def test_plan_wide_series_come_from_rank_0_alone(tmp_path: Path) -> None:
    snapshot = served()[0].snapshot()
    for rank in (0, 1):
        replace(snapshot, worker=replace(WORKER, rank=rank)).write(tmp_path)
    series = scrape(tmp_path)
    assert series["megaflux_batches_total", "3"] == 3
    assert {labels[1] for labels in series if labels[0] == "megaflux_layers"} == {"0", "1"}


def test_a_snapshot_comes_back_as_it_was_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    snapshot = replace(served()[0].snapshot(), timeouts=["rows"])
    data = snapshot.encode()
    back = Snapshot.decode(data, "s")
    assert all(np.array_equal(a, b) for a, b in zip(back.totals, snapshot.totals, strict=True))
    assert replace(back, totals=[]) == replace(snapshot, totals=[])
    for damaged in (data[:-8], b"{}\n", b"", data.replace(b"{", b"", 1)):
        with pytest.raises(InputError, match=r"^s: "):
            Snapshot.decode(damaged, "s")


def test_a_snapshot_that_cannot_be_read_is_logged_and_the_rest_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served()[0].snapshot().write(tmp_path)
    whole = scrape(tmp_path)
    (tmp_path / "rank-8.snapshot").mkdir()
    (tmp_path / "rank-9.snapshot").write_bytes(b"nonsense")
    with caplog.at_level(logging.ERROR, "megaflux"):
        assert scrape(tmp_path) == whole
    assert "rank-8.snapshot" in caplog.text
    assert "rank-9.snapshot: is no snapshot" in caplog.text


def named_folder(environment: dict[str, str]) -> tuple[Path, str]:
    """The folder that a process with these variables named for its children, and its mode; the process has ended."""
    program = (
        "import os\n"
        "from megaflux_serve.metrics.snapshot import FOLDER_VARIABLE, name_folder\n"
        "folder = name_folder()\n"
        "assert name_folder() == folder and os.environ[FOLDER_VARIABLE] == str(folder)\n"
        "print(folder, oct(folder.stat().st_mode & 0o777))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
    folder, mode = done.stdout.split()
    return Path(folder), mode


def test_a_folder_of_our_own_is_this_user_s_alone_and_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    folder, mode = named_folder(environment)
    assert (mode, folder.exists()) == ("0o700", False)
    given = tmp_path / "given"
    folder, _ = named_folder(environment | {FOLDER_VARIABLE: str(given)})
    assert folder == given
    assert folder.exists()


def test_both_modes_of_prometheus_client_show_layers_where_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots, values = tmp_path / "snapshots", tmp_path / "values"
    values.mkdir()
    served()[0].snapshot().write(snapshots)
    show_layers()
    show_layers()
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(values))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    for shown_by in (REGISTRY, registry):
        assert b"megaflux_batches_total" not in generate_latest(shown_by)
    monkeypatch.setenv(FOLDER_VARIABLE, str(snapshots))
    for shown_by in (REGISTRY, registry):
        assert generate_latest(shown_by).count(b"# TYPE megaflux_batches_total") == 1


def test_no_worker_yet_is_no_series(tmp_path: Path) -> None:
    assert scrape(tmp_path) == {}


def test_the_thread_publishes_until_it_is_stopped(tmp_path: Path) -> None:
    meter, _ = served()
    thread = meter.publish_every(0.01, tmp_path)
    while not list(tmp_path.glob("*.snapshot")):
        thread.join(0.01)
    assert read_snapshots(tmp_path)[0].worker == WORKER
    meter.stop()
    assert not thread.is_alive()


def test_a_worker_without_layers_yet_is_there(tmp_path: Path) -> None:
    Meter(WORKER, ReferenceExecutor(2)).snapshot().write(tmp_path)
    series = scrape(tmp_path)
    assert series["megaflux_layers", "0"] == series["megaflux_planner_seconds_count", "0"] == 0
    assert not any(name.startswith("megaflux_batches") for name, *_ in series)


def test_the_thread_ends_with_the_server_s_folder_and_does_not_make_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    meter, _ = served()
    thread = meter.publish_every(0.01, folder)
    for _ in range(100):  # a report that is being written may make it once more
        shutil.rmtree(folder, ignore_errors=True)
        thread.join(timeout=0.05)
    assert not thread.is_alive()
    assert not folder.exists()


def test_timeouts_are_counted_by_what_was_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter, _ = served()
    monkeypatch.setattr(meter.executor, "timeouts", lambda: ["counts", "counts"])
    meter.snapshot().write(tmp_path)
    series = scrape(tmp_path)
    assert series["megaflux_wait_timeouts_total", "0", "counts"] == 2
    assert sum(v for labels, v in series.items() if labels[0] == "megaflux_wait_timeouts_total") == 2


@pytest.mark.parametrize(("sticky", "sets"), [(True, 3), (False, 2)])
def test_replica_slots_that_layers_share_are_counted_once(sticky: bool, sets: int) -> None:
    home = make_case([4]).home(0)
    workspace = Workspace(2, sticky)
    slots = [workspace.slots(home, rank) for rank in (0, 0, 1)]  # two layers of rank 0, one of rank 1
    assert sum(replica_bytes(slots).values()) == sets * 2 * 4 * 3 * 24 * 16


def test_the_hottest_experts_are_those_of_the_last_minutes() -> None:
    recent, rows = RecentRows(), np.arange(20)
    assert recent.hottest("3", rows, 0.0) == [19, 18, 17, 16, 15, 14, 13, 12]
    for minute in (1, 2, 3):
        rows = rows + np.eye(20, dtype=np.int64)[2] * 5
        hottest = recent.hottest("3", rows, minute * LATELY_S)
    assert hottest == [2]


def test_counters_do_not_fall_where_a_copy_of_the_totals_holds_half_a_batch(tmp_path: Path) -> None:
    snapshot, registry = served()[0].snapshot(), CollectorRegistry()
    registry.register(LayerCollector(tmp_path))

    def shown(**changes: int) -> tuple[float, float]:
        """Resident replicas and batches without any of a server whose totals are these."""
        words = [totals.copy() for totals in snapshot.totals]
        sums = totals_map(WORKER.num_ranks, len(snapshot.layers[0].home_rank)).split(words[0])["sums"]
        for name, value in changes.items():
            sums[Total[name]] = value
        replace(snapshot, totals=words).write(tmp_path)
        generate_latest(registry)
        layer = {"engine": "vllm", "model": "tiny", "layer": "3"}
        resident = registry.get_sample_value("megaflux_replicas_total", layer | {"weights": "resident"})
        others = registry.get_sample_value("megaflux_plan_decisions_total", layer | {"decision": "not_needed"})
        assert resident is not None
        assert others is not None
        return resident, others

    whole = {"BATCHES": 10, "REPLICAS": 20, "TRANSFERS": 8, "REPLICATED": 9, "REFUSED": 0}
    assert shown(**whole) == (12, 1)
    assert shown(**whole | {"BATCHES": 11, "REPLICAS": 25}) == (17, 2)  # the rest of the batch is not there yet
    assert shown(**whole | {"BATCHES": 11, "REPLICAS": 25, "TRANSFERS": 11, "REPLICATED": 10}) == (17, 2)
    assert shown(**whole | {"BATCHES": 13, "REPLICAS": 31, "TRANSFERS": 12, "REPLICATED": 10}) == (19, 3)
    started_anew = {"BATCHES": 1, "REPLICAS": 2, "TRANSFERS": 3, "REPLICATED": 1}
    assert shown(**started_anew) == (0, 0)


def test_the_hottest_experts_of_a_worker_that_started_anew_are_those_since_its_start() -> None:
    recent, rows = RecentRows(), np.array([100, 0, 0, 7])
    for minute in (0, 1, 2):
        recent.hottest("3", rows + minute, minute * LATELY_S)
    assert recent.hottest("3", np.array([0, 9, 0, 2]), 2 * LATELY_S + 1) == [1, 3]
    assert recent.hottest("3", np.array([0, 9, 0, 2, 0, 5]), 2 * LATELY_S + 2) == [1, 5, 3]  # another model


def test_layers_are_named_by_number_unless_that_is_ambiguous() -> None:
    assert layer_labels(["model.layers.0.mlp.experts", "model.layers.12.mlp.experts"]) == ["0", "12"]
    names = ["encoder.layers.0.mlp", "decoder.layers.0.mlp"]
    assert layer_labels(names) == names
    assert layer_labels(["model.layers.2.mlp", "experts"]) == ["2", "experts"]


def test_names_units_and_labels_follow_prometheus_conventions() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE) > 30
    for metric in CATALOGUE:
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total"), metric.name
        for unit in ("seconds", "bytes", "ratio"):
            assert (metric.unit == unit) == (f"_{unit}" in metric.name), metric.name
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith((".", "balanced", "uniform", "1."))
        if metric.source is not Source.WINDOW:
            assert tuple(metric.labels)[:2] == SERVER_LABELS


def test_wait_phases_are_those_of_the_kernels_and_of_the_executor_on_the_host() -> None:
    from megaflux_kernels.layout import Wait

    from megaflux_serve.executors.staged import Phase

    assert {wait.name.lower() for wait in Wait} | {*get_args(Phase)} == {*catalogue.WAIT_PHASES}


def shown(name: str, **labels: str) -> float:
    """A series of the process itself; 0 if it is not there."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_capture_events_move_their_counters() -> None:
    labels = {"engine": "vllm", "model": "tiny"}
    events = CaptureEvents("vllm", "tiny")
    assert shown("megaflux_capture_dropped_total", reason="storage", **labels) == 0
    events.stored(100, 2000)
    events.stored(50, 1000)
    events.dropped("storage")
    assert shown("megaflux_capture_records_total", **labels) == 2
    assert shown("megaflux_capture_tokens_total", **labels) == 150
    assert shown("megaflux_capture_bytes_total", **labels) == 3000
    assert shown("megaflux_capture_dropped_total", reason="storage", **labels) == 1


def test_a_planned_window_shows_its_decisions() -> None:
    options = PlanOptions(COST, search=SearchOptions(proposals=1000))
    before = shown("megaflux_window_trajectories_total")
    plan = plan_window(window(16), None, Topology(2, 4, 400), options)
    window_planned(plan)
    window_sealed(0.02)
    assert shown("megaflux_window_trajectories_total") == before + 16
    assert shown("megaflux_window_rows") == plan.layout.num_rows
    assert shown("megaflux_window_excess_removed_ratio") == plan.excess_removed
    assert shown("megaflux_window_expert_excess_ratio", scope="window") == plan.excess.window
    assert shown("megaflux_window_seal_seconds_bucket", le="0.025") >= 1
    assert shown("megaflux_window_planning_seconds_sum") >= shown("megaflux_window_placement_seconds_sum")


def test_a_migration_shows_its_time_and_what_this_rank_received() -> None:
    window_migrated(MigrationReport(num_moved=3, sent_bytes=10, received_bytes=20, num_steps=1, seconds=0.02))
    window_migrated(MigrationReport(num_moved=0, sent_bytes=0, received_bytes=0, num_steps=0, seconds=0.001))
    assert shown("megaflux_window_migrated_bytes_total") == 20
    assert shown("megaflux_window_migration_seconds_count") == 2
    assert shown("megaflux_window_migration_seconds_sum") == pytest.approx(0.021)


def test_commands_add_to_a_file_as_one_long_process_would(tmp_path: Path) -> None:
    store, file, demand = tmp_path / "replay", tmp_path / "megaflux.prom", window(16)
    rng = np.random.default_rng(0)
    model = ModelShape(num_experts=16, top_k=3, num_layers=2)
    for name in ("one", "two"):
        routes = np.argsort(rng.random((9, 2, 16)), axis=2)[:, :, :3]
        with ReplayStore.create(store, model).writer() as writer:
            writer.append(ReplayRecord.of(name, routes, model, prompt_tokens=5, output_tokens=5))
        run_command("replay", "seal", str(store), name, "--metrics-file", str(file))
    np.savez(tmp_path / "window.npz", counts=demand.counts, lengths=demand.lengths)
    topology = ["--ranks", "2", "--slots", "4", "--capacity", "400", "--stage", "linear=20"]
    for _ in range(2):
        run_command(
            *("routepack", "plan", str(tmp_path / "window.npz"), *topology, "--proposals", "1000", "--json"),
            *("--metrics-file", str(file)),
        )
    text = file.read_text()
    assert "megaflux_window_seal_seconds_count 2.0\n" in text
    assert "megaflux_window_planning_seconds_count 2.0\n" in text
    assert "megaflux_window_trajectories_total 32.0\n" in text
    assert "megaflux_window_rows 1.0\n" in text  # a gauge is replaced
    assert text.count("# TYPE") == len({line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")})


def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "node.prom"
    file.write_text("node_load1 0.5\n")
    with pytest.raises(InputError, match=r"node\.prom: cannot be added to"):
        add_to_textfile(file)
    assert file.read_text() == "node_load1 0.5\n"


def run_command(*arguments: str) -> None:
    program = "from megaflux_serve.cli import main; main()"
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, timeout=120)
