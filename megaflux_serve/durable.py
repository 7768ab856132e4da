"""Files and folders that appear on disk whole or not at all, and stay there when the machine stops.

Decides the order of writing, flushing and renaming. Knows nothing of what is written.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name beside it, flush it and rename it: a reader sees the old file or the new one.

    Args:
        path: replaced if it exists; parent folders are created.
        data: the content.
    """
    make_folder(path.parent)
    file, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        try:
            write_all(file, data)
            os.fchmod(file, 0o644)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # an interrupt may come right behind the renaming
        raise
    sync_folder(path.parent)


def publish_folder(folder: Path, files: Mapping[str, bytes], prefix: str | None = None) -> None:
    """Write a new folder under a temporary name beside it, flush it and rename it.

    Args:
        folder: must not exist; parent folders are created.
        files: content by file name.
        prefix: how the temporary name begins; default: a dot and the folder's name.
    """
    make_folder(folder.parent)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=prefix or f".{folder.name}."))
    try:
        for name, data in files.items():
            with (temporary / name).open("wb", buffering=0) as file:
                write_all(file.fileno(), data)
                os.fsync(file.fileno())
        temporary.chmod(0o755)
        sync_folder(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # the error that counts is the first
        raise
    sync_folder(folder.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents where they are missing, and flush their names to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of an empty file, which is made; a killed process lets go of it."""
    with path.open("ab") as file:  # no bare descriptor: an interrupt at any place closes it
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_all(file: int, data: bytes) -> None:
    """Write every byte to a file descriptor, however many calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def sync_folder(folder: Path) -> None:
    """Flush names made or changed in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


__all__ = ["locked", "make_folder", "publish_folder", "sync_folder", "write_all", "write_atomically"]
