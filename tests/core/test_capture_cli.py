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


def test_damage_of_one_window_is_named_and_the_rest_is_shown(store: ReplayStore) -> None:
    with store.writer() as writer:
        routes = random_routes(9, 29, 3, 16, 3)
        writer.append(ReplayRecord.of("new", routes, MODEL, prompt_tokens=10, output_tokens=20, weights_version="8"))
    seal(store, "step-8")
    manifest = store.folder / "windows" / "step-7" / "window.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"math"', b'"meth"'))
    text = " ".join(run("inspect", store.folder).split())
    assert "step-8" in text
    assert "damage: window 'step-7':" in text
    found = json.loads(run("inspect", store.folder, "--json"))
    assert (found["windows"], len(found["damages"])) == ({"step-8": 1}, 1)
    assert "9 records, 2 windows with 1 records, 1 faults" in run("verify", store.folder, status=1)
    assert "window step-8: 1 records" in run("stats", store.folder, "--window", "step-8", "--ranks", 4)


@pytest.mark.parametrize("label", ["[/red]", "[bold]", "a$\\x$ b", "$ $"])
def test_labels_are_shown_as_they_are(tmp_path: Path, label: str) -> None:
    store = ReplayStore.create(tmp_path / "[red]", MODEL)
    with store.writer() as writer:
        for id, task in ((label, label), ("other", "code")):
            routes = random_routes(1, 29, 3, 16, 3)
            writer.append(ReplayRecord.of(id, routes, MODEL, prompt_tokens=10, output_tokens=20, task=task))
    seal(store, "[red]w")
    assert label in run("inspect", store.folder)
    assert "[red]" in run("inspect", store.folder)
    assert label in run("stats", store.folder, "--ranks", 4, "--png", tmp_path / "window.png")
    shard = next((store.folder / "shards").iterdir())
    data = bytearray(shard.read_bytes())
    data[store.scan()[0][0].body_at] ^= 1
    shard.write_bytes(data)
    assert f"record {label!r}" in " ".join(run("verify", store.folder, status=1).split())


def test_long_names_are_broken_and_not_cut(store: ReplayStore) -> None:
    with store.writer() as writer:
        for task in ("a" * 90, "b" * 90):
            record = ReplayRecord.of(
                task[0], random_routes(7, 29, 3, 16, 3), MODEL, prompt_tokens=10, output_tokens=20, task=task
            )
            writer.append(record)
    seal(store, "w" * 90)
    for shown in (run("inspect", store.folder), run("stats", store.folder, "--ranks", 2)):
        assert "…" not in shown
        assert shown.count("a") > 90
        assert shown.count("b") > 90


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


def test_a_file_of_another_form_is_named(store: ReplayStore, tmp_path: Path) -> None:
    slime = tmp_path / "batch.npz"
    run("export", store.folder, "slime", slime)
    responses = tmp_path / "responses"
    responses.mkdir()
    (responses / "a.npy").write_text("no array")
    for source, form, message in (
        (slime, "verl", f"{slime}: verl batch: lacks"),
        (slime, "router-trace", f"{slime}: line 1: cannot be read"),
        (responses, "npy", f"{responses / 'a.npy'}: response: cannot be decoded"),
    ):
        assert f"error: {message}" in run("import", source, form, tmp_path / "new", "--model", "16,3,4,1", status=2)


def test_an_import_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "responses").mkdir()
    for source, form in (("empty.jsonl", "router-trace"), ("responses", "npy")):
        message = f"error: {tmp_path / source}: holds no request; allowed: at least one, as {form}"
        assert message in run("import", tmp_path / source, form, tmp_path / "new", "--model", "16,3,4,1", status=2)
    assert not (tmp_path / "new").exists()


def test_results_are_all_that_is_written_to_standard_output(store: ReplayStore, tmp_path: Path) -> None:
    assert run("export", store.folder, "slime", tmp_path / "a.npz") == f"{tmp_path / 'a.npz'}: 8 records as slime\n"
    assert run("verify", store.folder).startswith("8 records, 1 windows")


def test_files_that_do_not_fit_themselves_are_refused(store: ReplayStore, tmp_path: Path) -> None:
    path, words = tmp_path / "batch.npz", ("slime", tmp_path / "new", "--model", "16,3,4,1")
    run("export", store.folder, "slime", path)
    data = path.read_bytes()
    with np.load(path) as arrays:
        columns = dict(arrays)
    for length in (len(data) - 1, len(data) // 2, 100):
        path.write_bytes(data[:length])
        assert f"{path}: cannot be read" in run("import", path, *words, status=2)
    for name, array in {
        "ids": columns["ids"][:3],
        "tasks": np.array("math"),
        "prompt_tokens": columns["prompt_tokens"] / 2,
        "output_tokens": columns["output_tokens"][1:],
    }.items():
        np.savez(path, **(columns | {name: array}))
        assert f"{path}: has {name} " in run("import", path, *words, status=2)
    np.savez(path, **(columns | {"output_tokens": columns["output_tokens"] + 1}))
    assert "record 'r0': has 29 rows of routes; allowed: 30" in run("import", path, *words, status=2)
    assert not (tmp_path / "new").exists()


def test_routepack_plans_the_newest_window_of_a_store(store: ReplayStore) -> None:
    words = ["routepack", "plan", str(store.folder), "--ranks", "4", "--slots", "2", "--capacity", "100"]
    words += ["--shape", "4,64,32,64", "--proposals", "1000", "--json"]
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_rows"] >= 2
