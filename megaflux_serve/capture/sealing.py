"""Sealing: choose the records of a window, refuse what must not be mixed, make the window appear whole or not at all.

Decides what may be sealed together. Knows no ranks and no plans. No routes are written: the window lists records beside
the demand that was counted as they finished, so that its time does not grow with what they routed.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.capture.frame import Damage, Entry
from megaflux_serve.capture.store import ReplayStore
from megaflux_serve.capture.window import VERSION, SealedWindow, WindowRecord, open_window, read_manifest, window_names
from megaflux_serve.durable import publish_folder
from megaflux_serve.errors import ConfigError, InputError

UNFINISHED = ".sealing-"
"""How the name of a seal that is being written begins; one that stays behind was killed and is removed."""
NAMED_IN_ERRORS = 5


def seal(
    store: ReplayStore,
    name: str,
    *,
    ids: Collection[str] | None = None,
    weights_versions: Collection[str] | None = None,
    verify: bool = True,
) -> SealedWindow:
    """Seal a window; it is there whole when this returns, whatever happens before.

    1. Choose records: those of ``ids``, else every one that no window holds, of ``weights_versions`` where given.
    2. Read every body and leave out damaged copies of records that have a sound one. 3. Refuse missing and damaged
    records, two contents under one id, and weights versions that were not asked for. 4. Write demand and list under a
    temporary name, flush, rename.

    Args:
        store: an open store; writers may go on writing.
        name: of the window, a plain file name that no window has.
        ids: the records to seal; one that another window holds may be sealed again.
        weights_versions: versions that may be in the window; None allows one version, whichever.
        verify: read every body (2). Without it damage shows when a record is read.

    Raises:
        ConfigError: the name is taken or no plain file name, or there is nothing to seal.
        InputError: a refusal of (3), naming records.
    """
    if not name or name.startswith(".") or "/" in name:
        raise ConfigError("window", name, "a plain file name that does not begin with a dot")
    folder = store.folder / "windows" / name
    with _seal_lock(store):
        if folder.exists():
            raise ConfigError("window", name, "a name that no window has")
        for leftover in folder.parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover)
        entries, damages = store.scan()
        earlier = [read_manifest(store, other) for other in window_names(store)]
        sealed = {record["id"] for manifest in earlier for record in manifest["records"]} if ids is None else set()
        chosen = _choose(entries, sealed, ids, weights_versions)
        _refuse_missing(chosen, ids, damages)
        unique = _unique(_sound(store, chosen) if verify else chosen)
        _refuse_mixed_versions(unique, weights_versions)
        sequence = 1 + max((manifest["sequence"] for manifest in earlier), default=0)
        _write(store, folder, sequence, unique, damages)
    return open_window(store, name)


def _choose(
    entries: Sequence[Entry], sealed: set[str], ids: Collection[str] | None, versions: Collection[str] | None
) -> list[Entry]:
    if ids is not None:
        wanted = set(ids)
        return [entry for entry in entries if entry.id in wanted]
    pending = [entry for entry in entries if entry.id not in sealed]
    return pending if versions is None else [entry for entry in pending if entry.weights_version in set(versions)]


def _refuse_missing(chosen: Sequence[Entry], ids: Collection[str] | None, damages: Sequence[Damage]) -> None:
    lost = "; ".join(map(str, damages[:NAMED_IN_ERRORS]))
    lost = f"; the store has damage: {lost}" if lost else ""
    if ids is None and not chosen:
        raise ConfigError("window", [], f"at least one record that no window holds{lost}")
    missing = sorted(set(ids or ()) - {entry.id for entry in chosen})
    if missing:
        raise InputError("ids", f"{_some(missing)} not in the store", f"records of the store{lost}")


def _unique(chosen: Sequence[Entry]) -> list[Entry]:
    """One entry an id, by id; a record that was written twice with the same content counts once."""
    by_id: dict[str, Entry] = {}
    for entry in chosen:
        first = by_id.setdefault(entry.id, entry)
        if _content(first) != _content(entry):
            raise InputError(
                f"record {entry.id!r}",
                f"is in {first.shard}, byte {first.offset}, and with other content in {entry.shard}, "
                f"byte {entry.offset}",
                "one content an id",
            )
    return [by_id[id] for id in sorted(by_id)]


def _content(entry: Entry) -> tuple[Any, ...]:
    labels = entry.group, entry.task, entry.weights_version
    return (*labels, entry.prompt_tokens, entry.output_tokens, entry.num_valid, entry.checksum)


def _refuse_mixed_versions(entries: Sequence[Entry], versions: Collection[str] | None) -> None:
    found = Counter(entry.weights_version for entry in entries)
    allowed = set(versions) if versions is not None else {next(iter(found))}
    if set(found) - allowed:
        counted = ", ".join(f"{version!r} in {count} records" for version, count in sorted(found.items()))
        wanted = ", ".join(map(repr, sorted(versions))) if versions is not None else "one version, or weights_versions"
        raise InputError("weights versions", counted, wanted)


def _sound(store: ReplayStore, chosen: Sequence[Entry]) -> list[Entry]:
    """The entries whose body matches its checksum; each id has at least one."""
    sound = [entry for entry in chosen if zlib.crc32(store.read_body(entry)) == entry.crc_body]
    ids = {entry.id for entry in sound}
    damaged = [f"{entry.id!r} in {entry.shard}, byte {entry.offset}" for entry in chosen if entry.id not in ids]
    if damaged:
        raise InputError("records", f"{_some(damaged)} damaged", "undamaged records; seal the others by their ids")
    return sound


def _write(
    store: ReplayStore, folder: Path, sequence: int, entries: Sequence[Entry], damages: Sequence[Damage]
) -> None:
    counts = np.empty((len(entries), store.model.row_shape[0], store.model.num_experts), dtype="<i4")
    for row, entry in zip(counts, entries, strict=True):
        row[:] = store.read_counts(entry)
    lengths = np.array([entry.num_tokens for entry in entries], dtype="<i8")
    files = {"counts.npy": _npy(counts), "lengths.npy": _npy(lengths)}
    manifest = {
        "version": VERSION,
        "sequence": sequence,
        "sealed_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "arrays": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "damages": list(map(str, damages)),
        "records": [{name: getattr(entry, name) for name in WindowRecord.__annotations__} for entry in entries],
    }
    files["window.json"] = (json.dumps(manifest) + "\n").encode()
    for shard in {entry.shard for entry in entries}:
        _sync(store.folder / "shards" / shard)
    publish_folder(folder, files, prefix=UNFINISHED)


def _npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _seal_lock(store: ReplayStore) -> Iterator[None]:
    """One seal at a time; a killed process lets go of the lock."""
    file = os.open(store.folder / "seal.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _some(names: Sequence[str]) -> str:
    """The first few of a list, and how many more."""
    more = f" and {len(names) - NAMED_IN_ERRORS} more" if len(names) > NAMED_IN_ERRORS else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names[:NAMED_IN_ERRORS])}{more} {verb}"


__all__ = ["seal"]
