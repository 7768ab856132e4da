"""The store and its windows under faults: kills, full disks, damaged bytes, two contents of one id, mixed weights."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from megaflux_serve.capture.frame import HEADER, MAGIC, _next_header, encode
from megaflux_serve.durable import locked
from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.routepack.demand import Demand
from tests.oracles.replay_routes import random_routes

MODEL = ModelShape(num_experts=16, top_k=3, num_layers=4)
ROOT = Path(__file__).resolve().parents[2]


def record(id: str, seed: int = 0, tokens: int = 40, version: str = "7", task: str = "") -> ReplayRecord:
    routes = random_routes(seed, tokens - 1, 4, 16, 3)
    return ReplayRecord.of(
        id, routes, MODEL, prompt_tokens=5, output_tokens=tokens - 5, weights_version=version, task=task
    )


def filled(folder: Path, ids: str = "abcdef") -> ReplayStore:
    """A store with a record for each letter, whose routes are seeded by the letter."""
    store = ReplayStore.create(folder, MODEL)
    with store.writer() as writer:
        for id in ids:
            writer.append(record(id, ord(id)))
    return store


def found_ids(store: ReplayStore) -> list[str]:
    return [entry.id for entry in store.scan()[0]]


def in_killed_processes(*works: Callable[[], None]) -> None:
    """Run each of ``works`` in a process of its own that ends by SIGKILL, at the latest when the work is done."""
    children = []
    for work in works:
        children.append(os.fork())
        if children[-1] == 0:
            try:
                work()
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
    assert all(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL for child in children)


def test_records_of_many_processes_are_all_there(tmp_path: Path) -> None:
    store = ReplayStore.create(tmp_path, MODEL)

    def write(process: int) -> None:
        with store.writer(shard_bytes=4000) as writer:
            for i in range(20):
                writer.append(record(f"{process}-{i}", process * 20 + i))

    in_killed_processes(*(partial(write, process) for process in range(3)))
    entries, damages = store.scan()
    assert sorted(entry.id for entry in entries) == sorted(f"{p}-{i}" for p in range(3) for i in range(20))
    assert damages == []
    assert len({entry.shard for entry in entries}) > 3
    assert entries == sorted(entries, key=lambda entry: (entry.shard, entry.offset))
    for found in store.records():
        process, i = map(int, found.id.split("-"))
        assert np.array_equal(found.routes, record(found.id, process * 20 + i).routes)


def test_threads_that_share_a_writer_do_not_write_into_each_other_s_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_write = os.write

    def write_a_part(file: int, data: bytes) -> int:
        time.sleep(0.0001)  # another thread's turn
        return os_write(file, data[:100])

    monkeypatch.setattr(os, "write", write_a_part)
    store = ReplayStore.create(tmp_path, MODEL)
    with store.writer() as writer, ThreadPoolExecutor(4) as threads:
        sizes = list(threads.map(writer.append, [record(str(i), i) for i in range(12)]))
    assert (sorted(found_ids(store), key=int), store.scan()[1]) == (list(map(str, range(12))), [])
    (shard,) = (tmp_path / "shards").iterdir()
    assert (writer.num_records, writer.num_bytes) == (12, sum(sizes)) == (12, shard.stat().st_size)


@pytest.mark.parametrize("written", [1, 30, 36, 90, 400, -1])
def test_a_kill_inside_a_write_loses_that_record_only_and_names_it(tmp_path: Path, written: int) -> None:
    store = filled(tmp_path, "ab")

    def work() -> None:
        with store.writer() as writer:
            writer.append(record("c"))
            os_write = os.write

            def write_a_part(file: int, data: bytes) -> int:
                os_write(file, data[:written])
                os.kill(os.getpid(), signal.SIGKILL)
                return 0

            os.write = write_a_part  # type: ignore[assignment]
            writer.append(record("the last"))

    in_killed_processes(work)
    entries, damages = store.scan()
    assert [entry.id for entry in entries if entry.id != "c"] == ["a", "b"]
    assert "c" in found_ids(store)
    assert len(damages) == 1
    assert damages[0].is_tail
    assert damages[0].record_id == ("the last" if written not in (1, 30, 36) else "")
    filled(tmp_path, "d")
    assert sorted(found_ids(store)) == ["a", "b", "c", "d"]


def test_a_kill_at_any_time_keeps_every_record_that_was_appended(tmp_path: Path) -> None:
    script = (
        "import sys, itertools; from pathlib import Path; from tests.core.test_capture_store import *\n"
        "writer = ReplayStore.create(Path(sys.argv[1]), MODEL).writer(shard_bytes=20000)\n"
        "for i in itertools.count(): writer.append(record(str(i), i)); print(i, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(30)]
    process.kill()
    said += process.stdout.readlines()
    process.wait()
    store = ReplayStore(tmp_path)
    entries, damages = store.scan()
    appended = [int(line) for line in said if line.endswith(b"\n")]
    assert set(map(str, appended)) <= {entry.id for entry in entries}
    assert len(entries) - len(appended) <= 1
    assert len(damages) <= 1
    assert all(np.array_equal(found.routes, record(found.id, int(found.id)).routes) for found in store.records())


def test_a_record_still_being_written_is_no_damage(tmp_path: Path) -> None:
    store = filled(tmp_path, "a")
    writer = store.writer()
    writer.append(record("b"))
    file = writer._file
    assert file is not None
    os.write(file, b"MFRR half a frame")
    assert (sorted(found_ids(store)), store.scan()[1]) == (["a", "b"], [])
    os.close(file)
    assert len(store.scan()[1]) == 1


def test_a_full_disk_leaves_the_store_as_it_was_and_the_writer_usable(tmp_path: Path) -> None:
    store = ReplayStore.create(tmp_path, MODEL)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with store.writer() as writer:
        writer.append(record("a"))
        writer.append(record("b"))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (writer.num_bytes + 100, limits[1]))
            with pytest.raises(OSError, match="File too large"):
                writer.append(record("c"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        shard = next((tmp_path / "shards").iterdir())
        assert shard.stat().st_size == writer.num_bytes
        assert (found_ids(store), store.scan()[1]) == (["a", "b"], [])
        writer.append(record("d"))
    assert (found_ids(store), store.scan()[1]) == (["a", "b", "d"], [])


def fail_after_a_part(monkeypatch: pytest.MonkeyPatch, error: BaseException, part: int = 200) -> None:
    """Have the next write put ``part`` bytes of its data on the disk, and the one after it fail."""
    os_write, calls = os.write, []

    def write(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) > 1:
            raise error
        return os_write(file, data[:part])

    monkeypatch.setattr(os, "write", write)


def test_nothing_is_appended_behind_a_part_that_cannot_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(file: int, length: int) -> None:
        raise OSError(5, "Input/output error")

    store = filled(tmp_path, "a")
    with store.writer() as writer:
        writer.append(record("b"))
        monkeypatch.setattr(os, "ftruncate", failing)
        fail_after_a_part(monkeypatch, OSError(28, "No space left on device"))
        with pytest.raises(OSError, match="Input/output error"):
            writer.append(record("lost"))
        monkeypatch.undo()
        writer.append(record("c"))
        writer.append(record("d"))
    entries, damages = store.scan()
    assert sorted(entry.id for entry in entries) == list("abcd")
    assert [damage.record_id for damage in damages] == ["lost"]
    assert [found.id for found in seal(store, "w")] == list("abcd")


def test_an_interrupt_takes_back_a_part_and_never_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ReplayStore.create(tmp_path, MODEL)
    with store.writer() as writer:
        fail_after_a_part(monkeypatch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            writer.append(record("a"))
        monkeypatch.undo()
        assert store.scan() == ([], [])
        os_write, written = os.write, []

        def write_then_stop(file: int, data: bytes) -> int:
            written.append(os_write(file, data))
            if os.fstat(file).st_size == size:
                raise KeyboardInterrupt
            return written[-1]

        size = writer.append(record("b"))
        size += len(b"".join(encode(record("c"))))
        monkeypatch.setattr(os, "write", write_then_stop)
        with pytest.raises(KeyboardInterrupt):
            writer.append(record("c"))
        monkeypatch.undo()
        window = seal(store, "w")  # another process may have listed the record in that instant
        writer.append(record("d"))
        fail_after_a_part(monkeypatch, OSError(28, "No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            writer.append(record("e"))
        monkeypatch.undo()
    assert [found.id for found in window] == ["b", "c"]
    assert (found_ids(store), store.scan()[1]) == (["b", "c", "d"], [])


def test_a_reader_is_not_misled_by_a_record_in_the_place_of_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, "a")
    writer = store.writer()
    writer.append(record("b"))
    shard = tmp_path / "shards" / next(entry.shard for entry in store.scan()[0] if entry.id == "b")
    failed, follower = (b"".join(encode(record(id, tokens=tokens))) for id, tokens in (("long", 90), ("c", 40)))
    end, pread, steps = shard.stat().st_size, os.pread, iter(range(100))
    file = os.open(shard, os.O_WRONLY)
    os.pwrite(file, failed[:-1], end)  # the disk is full here

    def meanwhile(file_read: int, size: int, offset: int) -> bytes:
        if offset == end and next(steps) == 0:  # between two steps of the reader: taken back, and half a frame more
            os.ftruncate(file, end)
            os.pwrite(file, follower[: len(follower) // 2], end)
        return pread(file_read, size, offset)

    monkeypatch.setattr(os, "pread", meanwhile)
    assert sorted(entry.id for entry in store.scan()[0]) == ["a", "b"]
    os.pwrite(file, follower, end)
    os.close(file)
    assert (sorted(found_ids(store)), store.scan()[1]) == (["a", "b", "c"], [])
    writer.close()


def test_a_shard_that_was_deleted_is_not_written_any_more(tmp_path: Path) -> None:
    store = ReplayStore.create(tmp_path, MODEL)
    with store.writer() as writer:
        writer.append(record("a"))
        next((tmp_path / "shards").iterdir()).unlink()
        writer.append(record("b"))
        assert found_ids(ReplayStore(tmp_path)) == ["b"]
        shutil.rmtree(tmp_path / "shards")
        with pytest.raises(FileNotFoundError):
            writer.append(record("c"))


def test_a_child_process_that_goes_on_with_a_writer_has_a_shard_of_its_own(tmp_path: Path) -> None:
    store = ReplayStore.create(tmp_path, MODEL)
    writer = store.writer()
    writer.append(record("a"))
    in_killed_processes(lambda: print(writer.append(record("b"))))
    writer.append(record("c"))
    writer.close()
    shards = {entry.id: entry.shard for entry in store.scan()[0]}
    assert shards["a"] == shards["c"] != shards["b"]


def test_a_writer_that_cannot_begin_a_shard_leaves_none_and_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    store = ReplayStore.create(tmp_path, MODEL)
    writer, num_open = store.writer(), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr("megaflux_serve.capture.store.sync_folder", failing)
        with pytest.raises(OSError, match="Input/output error"):
            writer.append(record("a"))
    assert list((tmp_path / "shards").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_open
    writer.append(record("a"))
    writer.close()
    assert found_ids(store) == ["a"]


def test_a_shard_that_the_disk_does_not_give_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, "ab")
    store = filled(tmp_path, "cd")
    bad = tmp_path / "shards" / next(entry.shard for entry in store.scan()[0] if entry.id == "b")
    second = next(entry for entry in store.scan()[0] if entry.id == "b")
    pread = os.pread

    def failing(file: int, size: int, offset: int) -> bytes:
        if os.path.samestat(os.fstat(file), bad.stat()) and offset + size > second.offset:
            raise OSError(5, "Input/output error")
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", failing)
    fresh = ReplayStore(tmp_path)
    entries, damages = fresh.scan()
    assert sorted(entry.id for entry in entries) == ["a", "c", "d"]
    assert [(damage.shard, damage.offset) for damage in damages] == [(bad.name, second.offset)]
    assert "Input/output error" in str(damages[0])
    assert len(seal(fresh, "w").damages) == 1
    monkeypatch.undo()
    assert [entry.id for entry in seal(fresh, "the rest").records] == ["b"]


def test_a_shard_that_is_cut_or_deleted_behind_the_index_is_named_by_whoever_reads_it(tmp_path: Path) -> None:
    store = filled(tmp_path, "a")
    (entry,) = store.scan()[0]
    os.truncate(tmp_path / "shards" / entry.shard, entry.size - 1)
    with pytest.raises(InputError, match=f"{entry.shard}, byte 0: {entry.size - 1} of {entry.size} bytes are there"):
        store.read(entry.shard, entry.offset, entry.size)
    assert not store.is_sound(entry)
    (tmp_path / "shards" / entry.shard).unlink()
    with pytest.raises(InputError, match=f"{entry.shard}: cannot be read .*No such file"):
        store.read(entry.shard, entry.offset, entry.size)
    assert not store.is_sound(entry)


def test_new_names_are_flushed_at_once_and_records_on_sync_close_and_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = set(), os.fsync

    def noted(file: int) -> None:
        flushed.add(Path(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    folder = tmp_path / "new" / "store"
    store = ReplayStore.create(folder, MODEL)
    assert flushed >= {tmp_path, tmp_path / "new", folder}
    with store.writer() as writer:
        writer.sync()  # nothing is there yet
        writer.append(record("a"))
        (shard,) = (folder / "shards").iterdir()
        assert folder / "shards" in flushed
        assert shard not in flushed
        writer.sync()
        assert shard in flushed
        writer.append(record("b"))
        flushed.clear()
    assert shard in flushed
    flushed.clear()
    seal(store, "w")
    assert flushed >= {shard, folder / "windows"}


def test_two_processes_cannot_make_one_store_of_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModelShape(8, 2, 2)
    exists, asked = Path.exists, []

    def exists_after_another_made_it(path: Path) -> bool:
        found = exists(path)
        if path.name == "store.json" and not asked:  # answered, and then the other process comes first
            asked.append(path)
            ReplayStore.create(tmp_path, other)
        return found

    monkeypatch.setattr(Path, "exists", exists_after_another_made_it)
    with pytest.raises(ConfigError, match="model"):
        ReplayStore.create(tmp_path, MODEL)
    assert ReplayStore(tmp_path).model == other


def test_a_shard_cut_anywhere_keeps_what_is_whole(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc")
    shard = next((tmp_path / "shards").iterdir())
    data, ends = shard.read_bytes(), [entry.end for entry in store.scan()[0]]
    for length in [*range(0, len(data), 37), *ends, *(end - 1 for end in ends)]:
        shard.write_bytes(data[:length])
        entries, damages = ReplayStore(tmp_path).scan()
        assert [entry.id for entry in entries] == list("abc"[: sum(end <= length for end in ends)])
        assert len(damages) == (length not in (0, *ends))
        assert all(damage.is_tail for damage in damages)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_flipped_byte_costs_one_record_which_is_named(
    where: float, mask: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    before = filled(folder).scan()[0]
    shard = next((folder / "shards").iterdir())
    data = bytearray(shard.read_bytes())
    at = int(where * len(data))
    data[at] ^= mask
    shard.write_bytes(data)
    hit = next(entry for entry in before if entry.offset <= at < entry.end)
    store = ReplayStore(folder)
    entries, damages = store.scan()
    for entry in entries:
        if entry.id == hit.id:
            with pytest.raises(InputError, match=f"{shard.name}, byte {hit.offset}"):
                store.read(entry.shard, entry.offset, entry.size)
        else:
            found = store.read(entry.shard, entry.offset, entry.size)
            assert np.array_equal(found.routes, record(entry.id, ord(entry.id)).routes)
    assert {entry.id for entry in entries} | {hit.id} == set("abcdef")
    if hit.id not in {entry.id for entry in entries}:
        assert [(damage.offset, damage.size) for damage in damages] == [(hit.offset, hit.size)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 16, 4096])
def test_the_next_header_is_found_wherever_one_reading_ends_and_the_next_begins(tmp_path: Path, chunk: int) -> None:
    header = b"".join(encode(record("a")))[: HEADER.size]
    noise = MAGIC + MAGIC[:3] + MAGIC  # looks like a header, and is none
    (tmp_path / "shard").write_bytes(noise + header + noise + header)
    second = 2 * len(noise) + len(header)
    end = second + len(header)
    with (tmp_path / "shard").open("rb") as file:
        found = [_next_header(file.fileno(), "shard", start, end, chunk) for start in range(end + 1)]
    first = len(noise)
    assert found == [first] * (first + 1) + [second] * (second - first) + [end] * (end - second)


def test_frames_of_another_version_are_refused_and_not_taken_for_damage(tmp_path: Path) -> None:
    filled(tmp_path, "a")
    (shard,) = (tmp_path / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[4] = 2
    data[HEADER.size - 4 : HEADER.size] = zlib.crc32(data[: HEADER.size - 4]).to_bytes(4, "little")
    shard.write_bytes(data)
    with pytest.raises(InputError, match="holds frames of version 2; allowed: version 1"):
        ReplayStore(tmp_path).scan()


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
