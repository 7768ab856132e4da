"""Windows of a store under faults: kills, full disks, damage, two contents of one id, mixed weights."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from megaflux_serve.capture import (
    ModelShape,
    ReplayRecord,
    ReplayStore,
    checked_json,
    open_window,
    seal,
    window_demand,
    window_names,
)
from megaflux_serve.durable import locked
from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.routepack.demand import Demand
from tests.core.capture_cases import MODEL, filled, found_ids, in_killed_processes, record
from tests.oracles.replay_routes import random_routes


def test_a_window_holds_the_demand_of_its_records_in_order_of_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, "dacb")
    window = seal(store, "first")
    assert [entry.id for entry in window.records] == list("abcd")
    assert window.lengths.tolist() == [40] * 4
    for row, found in zip(window.counts, window, strict=True):
        assert np.array_equal(row, record(found.id, ord(found.id)).counts)
    demand = Demand.of(*window_demand(tmp_path))
    assert demand.counts.sum() == 4 * 39 * 4 * 3
    assert np.array_equal(window_demand(tmp_path / "windows" / "first")[0], window.counts)
    monkeypatch.chdir(tmp_path / "windows" / "first")
    assert np.array_equal(window_demand(Path())[0], window.counts)


def test_a_window_takes_what_no_window_holds(tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    seal(store, "z")
    filled(tmp_path, "cd")
    assert [entry.id for entry in seal(store, "a").records] == ["c", "d"]
    assert window_names(store) == ["z", "a"]
    assert open_window(store).name == "a"
    with pytest.raises(ConfigError, match="at least one record that no window holds"):
        seal(store, "b")
    with pytest.raises(ConfigError, match="a name that no window has"):
        seal(store, "z")
    assert [entry.id for entry in seal(store, "again", ids=["a", "d"]).records] == ["a", "d"]


def test_every_kill_inside_a_seal_leaves_no_window_and_the_next_seal_works(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc")
    num_syncs = 0
    while True:
        survived = tmp_path / "survived"

        def work(allowed: int = num_syncs, survived: Path = survived) -> None:
            fsync, done = os.fsync, []

            def counted(file: int) -> None:
                if len(done) == allowed:
                    os.kill(os.getpid(), signal.SIGKILL)
                done.append(file)
                fsync(file)

            os.fsync = counted  # type: ignore[assignment]
            seal(store, f"window {allowed}")
            survived.touch()

        in_killed_processes(work)
        if survived.exists():
            break
        is_whole = f"window {num_syncs}" in window_names(store)
        if is_whole:  # killed after the rename: all there, and nothing is left to seal
            assert len(open_window(store)) == 3
            survived.touch()
            break
        assert window_names(store) == []
        num_syncs += 1
    assert num_syncs >= 4
    assert not list((tmp_path / "windows").glob(".sealing-*"))
    assert [entry.id for entry in open_window(store).records] == list("abc")


def test_a_seal_waits_for_the_one_before_it(tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    with ThreadPoolExecutor(1) as threads:
        with locked(tmp_path / "seal.lock"):
            second = threads.submit(seal, store, "w")
            assert not wait([second], timeout=0.2).done
        assert len(second.result(timeout=60)) == 2


def test_a_full_disk_during_a_seal_leaves_no_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, "abc")

    def full(file: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megaflux_serve.durable.write_all", full)
    with pytest.raises(OSError, match="No space left"):
        seal(store, "w")
    assert list((tmp_path / "windows").iterdir()) == []
    monkeypatch.undo()
    assert len(seal(store, "w")) == 3


def test_one_id_with_one_content_from_two_writers_counts_once(tmp_path: Path) -> None:
    filled(tmp_path, "ab")
    store = filled(tmp_path, "bc")
    assert [entry.id for entry in seal(store, "w").records] == list("abc")


def test_one_id_with_two_contents_is_refused_and_both_are_named(tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    with store.writer() as writer:
        writer.append(record("b", seed=1))
    shards = {entry.shard for entry in store.scan()[0] if entry.id == "b"}
    with pytest.raises(InputError, match=r"record 'b': is in .* and with other content in ") as caught:
        seal(store, "w")
    assert all(shard in str(caught.value) for shard in shards)
    assert window_names(store) == []
    assert [entry.id for entry in seal(store, "w", ids=["a"]).records] == ["a"]


def test_an_id_that_a_window_holds_with_another_content_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    seal(store, "first")
    filled(tmp_path, "bc")  # b once more, a write that was tried again
    assert [entry.id for entry in seal(store, "second").records] == ["c"]
    with store.writer() as writer:
        writer.append(record("a", seed=1))
        writer.append(record("d"))
    with pytest.raises(InputError, match=r"record 'a': is in window 'first', .* and with other content in "):
        seal(store, "third")
    assert [entry.id for entry in seal(store, "third", ids=["d"]).records] == ["d"]


def test_one_id_of_two_weights_versions_is_refused_when_one_is_asked_for(tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    with store.writer() as writer:
        writer.append(record("b", ord("b"), version="8"))
    with pytest.raises(InputError, match=r"record 'b': is in .* and with other content in "):
        seal(store, "w", weights_versions=["8"])
    assert window_names(store) == []


def test_ids_may_come_from_an_iterator_and_must_not_be_none(tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    with pytest.raises(InputError, match="ids: z is not in the store"):
        seal(store, "w", ids=iter(["a", "z"]))
    with pytest.raises(ConfigError, match="at least one id"):
        seal(store, "w", ids=[])
    assert [entry.id for entry in seal(store, "w", ids=iter("ab")).records] == ["a", "b"]


@pytest.mark.parametrize("name", ["", ".w", "a/b", "a\0b", "a\ud800", 256 * "w", 128 * "\u00e4"])
def test_a_window_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a plain file name of at most 255 bytes"):
        seal(filled(tmp_path, "a"), name)


def test_mixed_weights_are_refused_unless_asked_for(tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    with store.writer() as writer:
        writer.append(record("c", version="8"))
    with pytest.raises(InputError, match="weights versions: '7' in 2 records, '8' in 1 records"):
        seal(store, "w")
    with pytest.raises(InputError, match="weights versions"):
        seal(store, "w", ids=["a", "c"], weights_versions=["7"])
    assert [entry.id for entry in seal(store, "new", weights_versions=["8"]).records] == ["c"]
    assert [entry.id for entry in seal(store, "both", ids="abc", weights_versions=["7", "8"]).records] == list("abc")


def test_a_missing_record_is_named_with_the_damage_of_the_store(tmp_path: Path) -> None:
    filled(tmp_path, "abc")
    shard = next((tmp_path / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"ids: c is not in the store.*record 'c': the file ends inside a record"):
        seal(ReplayStore(tmp_path), "w", ids="abc")
    window = seal(ReplayStore(tmp_path), "w")
    assert [entry.id for entry in window.records] == ["a", "b"]
    assert len(window.damages) == 1
    assert "record 'c'" in window.damages[0]


def test_damaged_bodies_are_found_when_sealing_and_when_reading(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc")
    entry = store.scan()[0][1]
    window = seal(store, "sound")
    shard = tmp_path / "shards" / entry.shard
    data = bytearray(shard.read_bytes())
    data[entry.body_at + 5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match=r"'b' in .* is damaged"):
        seal(store, "w", ids="abc")
    for unread in (window, seal(store, "not read", ids="abc", verify=False)):
        with pytest.raises(InputError, match=f"{entry.shard}, byte {entry.offset}"):
            unread.read(1)
    filled(tmp_path, "b")
    again = seal(store, "w", ids="abc")
    assert again.records[1].shard != entry.shard
    assert [found.id for found in again] == list("abc")
    assert window.read(2).id == "c"


def test_a_damaged_window_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc")
    seal(store, "w")
    counts = tmp_path / "windows" / "w" / "counts.npy"
    data = bytearray(counts.read_bytes())
    data[-1] ^= 1
    counts.write_bytes(data)
    with pytest.raises(InputError, match=r"counts.npy: is damaged"):
        open_window(store)
    counts.unlink()
    with pytest.raises(InputError, match=r"counts.npy: cannot be read .*No such file"):
        open_window(store)


def test_a_window_of_another_version_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc")
    seal(store, "w")
    path = tmp_path / "windows" / "w" / "window.json"
    path.write_bytes(checked_json.dumps(json.loads(path.read_bytes()) | {"version": 2}))
    with pytest.raises(InputError, match=r"window.json: has version 2; allowed: version 1"):
        open_window(store)


def test_a_changed_byte_of_a_description_is_never_read_as_another_value(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc")
    first = seal(store, "first")
    filled(tmp_path, "d")
    seal(store, "second")
    path = tmp_path / "windows" / "first" / "window.json"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with suppress(InputError):
            assert open_window(store, "first").records == first.records
    path.write_bytes(data.replace(b'"task": ""', b'"task": "x"'))
    with pytest.raises(InputError, match=r"window.json: is damaged"):
        open_window(store, "first")
    assert [found.id for found in open_window(store, "second")] == ["d"]
    with pytest.raises(InputError, match=r"window.json: is damaged"):
        seal(store, "third", ids="d")
    shape = tmp_path / "store.json"
    shape.write_bytes(shape.read_bytes().replace(b'"moe_layers": [0, 1, 2, 3]', b'"moe_layers": [0, 1, 2, 7]'))
    with pytest.raises(InputError):
        ReplayStore(tmp_path)


def test_descriptions_without_a_checksum_are_read_as_before(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc")
    sealed = seal(store, "w")
    for path in (tmp_path / "store.json", tmp_path / "windows" / "w" / "window.json"):
        content = json.loads(path.read_bytes())
        assert len(content.pop("sha256")) == 64
        path.write_text(json.dumps(content) + "\n")
    window = open_window(ReplayStore(tmp_path))
    assert window.records == sealed.records
    assert [found.id for found in window] == list("abc")


def test_a_store_of_another_model_or_version_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, "a")
    with pytest.raises(ConfigError, match="model"):
        ReplayStore.create(tmp_path, ModelShape(8, 2, 2))
    routes = random_routes(0, 3, 2, 8, 2)
    other = ReplayRecord.of("x", routes, ModelShape(8, 2, 2), prompt_tokens=2, output_tokens=2)
    with store.writer() as writer, pytest.raises(InputError, match="as the store"):
        writer.append(other)
    (tmp_path / "store.json").write_text((tmp_path / "store.json").read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(InputError, match="is megaflux-replay version 2"):
        ReplayStore(tmp_path)
    with pytest.raises(InputError, match="a replay store"):
        ReplayStore(tmp_path / "windows")


def test_sealing_goes_on_while_writers_append(tmp_path: Path) -> None:
    store = ReplayStore.create(tmp_path, MODEL)
    child = os.fork()
    if child == 0:
        with store.writer(shard_bytes=6000) as writer:
            for i in range(60):
                writer.append(record(f"{i:02}", i))
        os._exit(0)
    sealed: list[str] = []
    while True:
        ended = os.waitpid(child, os.WNOHANG)[0]
        if set(found_ids(store)) - set(sealed):
            sealed += [entry.id for entry in seal(store, f"w{len(sealed)}").records]
        if ended:
            break
        time.sleep(0.001)
    assert sealed == [f"{i:02}" for i in range(60)]
