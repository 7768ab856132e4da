"""Files and folders appear whole or not at all: what is flushed before what, and what a failure leaves behind."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from megaflux_serve.durable import locked, publish_folder, write_all, write_atomically
from tests.core.open_files import open_files

Event = tuple[str, Path, Any]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Every flush, with the bytes or names that the disk has then, and every renaming, in order."""
    noted: list[Event] = []
    fsync, replace, rename = os.fsync, os.replace, Path.rename

    def noted_fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        noted.append(("flush", path, sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()))
        fsync(file)

    def noted_replace(source: str, target: Path) -> None:
        noted.append(("rename", Path(source), target))
        replace(source, target)

    def noted_rename(source: Path, target: Path) -> Path:
        noted.append(("rename", source, target))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(Path, "rename", noted_rename)
    return noted


def test_a_file_is_on_the_disk_before_it_takes_its_name_and_the_name_before_the_call_ends(
    tmp_path: Path, events: list[Event]
) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, b"old")
    assert events[0] == ("flush", tmp_path, ["new"])
    events.clear()
    write_atomically(path, b"content")
    temporary = events[0][1]
    assert events == [
        ("flush", temporary, b"content"),
        ("rename", temporary, path),
        ("flush", path.parent, ["file"]),
    ]
    assert temporary.parent == path.parent  # a file system renames nothing that lies on another
    assert temporary.name.startswith(".file.")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"content", 0o644)


@pytest.mark.parametrize(("prefix", "begins"), [(None, ".folder."), (".unfinished-", ".unfinished-")])
def test_a_folder_is_on_the_disk_before_it_takes_its_name_and_the_name_before_the_call_ends(
    tmp_path: Path, events: list[Event], prefix: str | None, begins: str
) -> None:
    folder = tmp_path / "new" / "folder"
    publish_folder(folder, {"a": b"1", "b": b"2"}, prefix)
    temporary = events[1][1].parent
    assert events == [
        ("flush", tmp_path, ["new"]),
        ("flush", temporary / "a", b"1"),
        ("flush", temporary / "b", b"2"),
        ("flush", temporary, ["a", "b"]),
        ("rename", temporary, folder),
        ("flush", folder.parent, ["folder"]),
    ]
    assert temporary.parent == folder.parent
    assert temporary.name.startswith(begins)
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def failing(*arguments: Any) -> None:
        raise error

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing)
        with pytest.raises(type(error)):
            write_atomically(path, b"new")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])
    assert open_files(tmp_path) == []


def test_an_interrupt_right_behind_the_renaming_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def replace_then_stop(source: str, target: Path) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_then_stop)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_folder_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def failing(*arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing)
        with pytest.raises(type(error)):
            publish_folder(tmp_path / "folder", {"a": b"1"})
    assert os.listdir(tmp_path) == []


def test_every_byte_is_written_however_few_a_call_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os_write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: os_write(file, data[:3]))
    with (tmp_path / "file").open("wb", buffering=0) as file:
        write_all(file.fileno(), b"ten bytes.")
    assert (tmp_path / "file").read_bytes() == b"ten bytes."


def test_a_lock_excludes_others_and_is_let_go_of_whatever_happens(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def is_free() -> bool:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def fail_inside() -> None:
        with locked(path):
            assert not is_free()
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert is_free()
