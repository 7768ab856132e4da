"""Sealed windows, read: a list of records that never changes again, with its demand ready for RoutePack.

Decides what a window says and checks that it still says so. Knows no ranks and no plans. Routes stay in their shards;
the window lists them with their checksums. ``sealing`` makes windows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.capture import checked_json
from megaflux_serve.capture.record import Int32Array, ReplayRecord
from megaflux_serve.capture.store import ReplayStore
from megaflux_serve.errors import ConfigError, InputError

VERSION = 1


@dataclass(frozen=True)
class WindowRecord:
    """One record of a window: where it lies, and its labels.

    Attributes:
        shard, offset, size: its frame.
        checksum: of its content; a record that reads differently is refused.
        id, group, task, weights_version, prompt_tokens, output_tokens, num_valid: as in the record.
    """

    shard: str
    offset: int
    size: int
    checksum: int
    id: str
    group: str
    task: str
    weights_version: str
    prompt_tokens: int
    output_tokens: int
    num_valid: int


@dataclass(frozen=True)
class SealedWindow:
    """A window, ordered by record id.

    Attributes:
        store: where its records lie.
        name: of its folder below ``windows``.
        sequence: 1 for the first window of the store, then counting up.
        sealed_at: UTC, ISO 8601.
        records: N records.
        counts: int32 [N, L, E], the demand; mapped from the file, not writable.
        lengths: int64 [N], tokens, prompt and output.
        damages: what could not be read in the store when the window was sealed, as text.
    """

    store: ReplayStore
    name: str
    sequence: int
    sealed_at: str
    records: tuple[WindowRecord, ...]
    counts: Int32Array
    lengths: NDArray[np.int64]
    damages: tuple[str, ...]

    def read(self, index: int) -> ReplayRecord:
        """Record ``index`` with its routes.

        Raises:
            InputError: it is damaged, or no longer the record that was sealed.
        """
        wanted = self.records[index]
        record = self.store.read(wanted.shard, wanted.offset, wanted.size)
        if (record.id, record.checksum) != (wanted.id, wanted.checksum):
            source = f"window {self.name!r}, {wanted.shard}, byte {wanted.offset}"
            raise InputError(
                source, f"holds another content of record {record.id!r}", f"record {wanted.id!r} as sealed"
            )
        return record

    def __iter__(self) -> Iterator[ReplayRecord]:
        """Records with their routes, one in memory at a time."""
        return (self.read(index) for index in range(len(self.records)))

    def __len__(self) -> int:
        return len(self.records)


def window_names(store: ReplayStore) -> list[str]:
    """Names of the sealed windows, oldest first."""
    return list(manifests(store))


def open_window(store: ReplayStore, name: str | None = None) -> SealedWindow:
    """A sealed window; the newest where no name is given.

    Raises:
        ConfigError: there is no such window.
        InputError: there is no window at all, or it is damaged.
    """
    names = _folders(store)
    if not names:
        raise InputError(
            str(store.folder), "holds no sealed window", "a store with one, as megaflux replay seal makes it"
        )
    if name is not None and name not in names:
        raise ConfigError("window", name, f"one of {', '.join(sorted(names))}")
    if name is None:
        name = window_names(store)[-1]
    manifest = read_manifest(store, name)
    folder = store.folder / "windows" / name
    arrays = {file: _array(folder / file, digest) for file, digest in manifest["arrays"].items()}
    records = tuple(WindowRecord(**record) for record in manifest["records"])
    return SealedWindow(
        store,
        folder.name,
        manifest["sequence"],
        manifest["sealed_at"],
        records,
        arrays["counts.npy"],
        arrays["lengths.npy"],
        tuple(manifest["damages"]),
    )


def windows_of(store: ReplayStore) -> tuple[list[SealedWindow], list[str]]:
    """The windows that can be opened, oldest first, and what is wrong with each of the others."""
    windows, faults = [], []
    for name in sorted(_folders(store)):
        try:
            windows.append(open_window(store, name))
        except InputError as error:
            faults.append(f"window {name!r}: {error}")
    return sorted(windows, key=lambda window: window.sequence), faults


def window_demand(folder: Path, name: str | None = None) -> tuple[Int32Array, NDArray[np.int64]]:
    """What ``routepack.demand.Demand.of`` takes: counts int32 [N, L, E] and lengths int64 [N].

    Args:
        folder: a store, or the folder of one of its windows.
        name: of the window; the newest of the store by default.

    Raises:
        ConfigError: there is no such window.
        InputError: the folder is no store, or the window is damaged.
    """
    if name is None and (folder / "window.json").exists():
        folder, name = folder.resolve().parents[1], folder.resolve().name
    window = open_window(ReplayStore(folder), name)
    return np.array(window.counts), np.array(window.lengths)


def manifests(store: ReplayStore) -> dict[str, dict[str, Any]]:
    """What ``window.json`` says of every window, by name, oldest first.

    Raises:
        InputError: one cannot be read.
    """
    found = {name: read_manifest(store, name) for name in _folders(store)}
    return dict(sorted(found.items(), key=lambda item: int(item[1]["sequence"])))


def read_manifest(store: ReplayStore, name: str) -> dict[str, Any]:
    """What ``window.json`` says.

    Raises:
        InputError: it cannot be read, is damaged, or is of another version.
    """
    source = store.folder / "windows" / name / "window.json"
    try:
        data = source.read_bytes()
        manifest: dict[str, Any] = json.loads(data)
        version = manifest["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(str(source), f"cannot be read ({error})", "a sealed window") from error
    if version != VERSION:
        raise InputError(str(source), f"has version {version}", f"version {VERSION}")
    if not checked_json.is_sound(data):
        raise InputError(str(source), "is damaged: its SHA-256 is not the one it holds", "an undamaged file")
    return manifest


def _folders(store: ReplayStore) -> list[str]:
    """Names of the sealed windows, in no order; none is read."""
    paths = [path.parent for path in (store.folder / "windows").glob("*/window.json")]
    return [path.name for path in paths if not path.name.startswith(".")]


def _array(path: Path, digest: str) -> NDArray[Any]:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error})", "an array of a sealed window") from error
    if found != digest:
        raise InputError(str(path), "is damaged: its SHA-256 is not the one sealed", "an undamaged array")
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


__all__ = ["SealedWindow", "WindowRecord", "manifests", "open_window", "window_demand", "window_names", "windows_of"]
