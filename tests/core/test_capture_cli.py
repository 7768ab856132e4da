"""``megaflux replay`` on a small store: what it prints, writes and answers with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megaflux_serve.capture import ModelShape, ReplayRecord, ReplayStore, open_window, seal
from megaflux_serve.cli.app import app
from tests.oracles.replay_routes import random_routes

MODEL = ModelShape(num_experts=16, top_k=3, num_layers=4, moe_layers=(1, 2, 3))
RUNNER = CliRunner()


@pytest.fixture
def store(tmp_path: Path) -> ReplayStore:
    """Two tasks with four records each, all in one window."""
    store = ReplayStore.create(tmp_path / "store", MODEL)
    with store.writer() as writer:
        for i in range(8):
            task = ("math", "code")[i % 2]
            routes = random_routes(i % 2, 29, 3, 16, 3)
            record = ReplayRecord.of(
                f"r{i}", routes, MODEL, prompt_tokens=10, output_tokens=20, task=task, group=task, weights_version="7"
            )
            writer.append(record)
    seal(store, "step-7")
    return store


def run(*words: object, status: int = 0) -> str:
    result = RUNNER.invoke(app, ["replay", *map(str, words)], env={"COLUMNS": "120", "TERM": "dumb"})
    assert result.exit_code == status, result.output
    return result.output


def test_inspect_says_what_is_there(store: ReplayStore) -> None:
    text = run("inspect", store.folder)
    assert "3 MoE layers of 4, 16 experts, top-3, ids in uint8" in text
    assert "step-7" in text
    found = json.loads(run("inspect", store.folder, "--json"))
    assert (found["records"], found["tokens"], found["windows"]) == (8, 240, {"step-7": 8})
    assert found["tasks"] == {"math": 4, "code": 4}


def test_verify_ends_with_status_1_and_names_the_record(store: ReplayStore) -> None:
    assert "8 records, 1 windows with 8 records, 0 faults" in run("verify", store.folder)
    entry = store.scan()[0][3]
    shard = store.folder / "shards" / entry.shard
    data = bytearray(shard.read_bytes())
    data[entry.body_at + 1] ^= 255
    shard.write_bytes(data)
    text = " ".join(run("verify", store.folder, status=1).split())
    assert "2 faults" in text
    assert "record 'r3': the checksum of the body does not match" in text
    assert f"window 'step-7': {entry.shard}, byte {entry.offset}" in text


def test_stats_prints_every_moe_layer_and_draws_a_picture(store: ReplayStore, tmp_path: Path) -> None:
    text = run("stats", store.folder, "--ranks", 4, "--png", tmp_path / "window.png")
    assert "length P50/P95 30/30" in text
    assert "root JSD" in text
    assert (tmp_path / "window.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(run("stats", store.folder, "--ranks", 4, "--json"))
    assert [layer["rows"] for layer in found["layers"]] == [8 * 29 * 3] * 3
    assert found["distances"][0][0] == pytest.approx(0)
    assert found["distances"][0][1] > 0.1


def test_what_is_exported_is_imported_again(store: ReplayStore, tmp_path: Path) -> None:
    run("export", store.folder, "verl", tmp_path / "batch.npz")
    run("import", tmp_path / "batch.npz", "verl", tmp_path / "other", "--model", "16,3,4,1")
    run("seal", tmp_path / "other", "again")
    again, first = open_window(ReplayStore(tmp_path / "other")), open_window(store)
    assert np.array_equal(again.counts, first.counts)
    assert [record.task for record in again.records] == [record.task for record in first.records]


def test_a_wrong_argument_is_one_line_and_status_2(store: ReplayStore, tmp_path: Path) -> None:
    assert "window = 'none' is not allowed; allowed: one of step-7" in run(
        "stats", store.folder, "--window", "none", status=2
    )
    empty = ReplayStore.create(tmp_path / "empty", MODEL).folder
    assert f"{empty}: holds no sealed window" in run("stats", empty, status=2)
    assert "--ranks = 5" in run("stats", store.folder, "--ranks", 5, status=2)
    assert "form = 'csv'" in run("export", store.folder, "csv", tmp_path / "x", status=2)
    assert "at least one record that no window holds" in run("seal", store.folder, "more", status=2)
    assert "--model = '16,3'" in run("import", tmp_path, "npy", tmp_path / "new", "--model", "16,3", status=2)
    assert "--model = '16,3,4,4'" in run("import", tmp_path, "npy", tmp_path / "new", "--model", "16,3,4,4", status=2)
    assert "--model: is missing" in run("import", tmp_path, "npy", tmp_path / "new", status=2)
    assert "--png = " in run("stats", store.folder, "--png", tmp_path, status=2)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("source", "model"), [("batch.npz", "8,3,4,1"), ("text.npz", "16,3,4,1"), ("missing.npz", "16,3,4,1")]
)
def test_an_import_that_is_refused_makes_no_store(store: ReplayStore, tmp_path: Path, source: str, model: str) -> None:
    run("export", store.folder, "slime", tmp_path / "batch.npz")
    (tmp_path / "text.npz").write_text("no archive")
    run("import", tmp_path / source, "slime", tmp_path / "new", "--model", model, status=2)
    assert not (tmp_path / "new").exists()


def test_routepack_plans_the_newest_window_of_a_store(store: ReplayStore) -> None:
    words = ["routepack", "plan", str(store.folder), "--ranks", "4", "--slots", "2", "--capacity", "100"]
    words += ["--shape", "4,64,32,64", "--proposals", "1000", "--json"]
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_rows"] >= 2
