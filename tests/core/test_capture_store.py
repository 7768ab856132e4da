"""The store under faults: kills, full disks, damaged bytes, writers beside each other."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflux_serve.capture import ModelShape, ReplayStore, seal
from megaflux_serve.capture.frame import HEADER, MAGIC, _next_header, encode
from megaflux_serve.errors import ConfigError, InputError
from tests.core.capture_cases import MODEL, ROOT, filled, found_ids, in_killed_processes, record
from tests.core.open_files import open_files


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
        "import sys, itertools; from pathlib import Path; from tests.core.capture_cases import *\n"
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
    writer = store.writer()
    with monkeypatch.context() as patch:
        patch.setattr("megaflux_serve.capture.store.sync_folder", failing)
        with pytest.raises(OSError, match="Input/output error"):
            writer.append(record("a"))
    assert list((tmp_path / "shards").iterdir()) == []
    assert open_files(tmp_path) == []
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
