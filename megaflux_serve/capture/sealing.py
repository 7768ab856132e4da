"""Sealing: choose the records of a window, refuse what must not be mixed, make the window appear whole or not at all.

Decides what may be sealed together. Knows no ranks and no plans. No routes are written: the window lists records beside
the demand that was counted as they finished, so that its time does not grow with what they routed.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.capture import checked_json
from megaflux_serve.capture.frame import Damage, Entry
from megaflux_serve.capture.store import ReplayStore
from megaflux_serve.capture.window import VERSION, SealedWindow, WindowRecord, manifests, open_window
from megaflux_serve.durable import locked, publish_folder
from megaflux_serve.errors import ConfigError, InputError

UNFINISHED = ".sealing-"
"""How the name of a seal that is being written begins; one that stays behind was killed and is removed."""
NAMED_IN_ERRORS = 5
MAX_NAME = 255
"""Longest name of a window, in UTF-8 bytes, as file systems have it."""


def seal(
    store: ReplayStore,
    name: str,
    *,
    ids: Iterable[str] | None = None,
    weights_versions: Collection[str] | None = None,
    verify: bool = True,
) -> SealedWindow:
    """Seal a window; it is there whole when this returns, whatever happens before.

    1. Choose records: those of ``ids``, else every one that no window holds, of ``weights_versions`` where given.
    2. Read them whole and leave out damaged copies of records that have a sound one. 3. Refuse missing and damaged
    records, two contents under one id, in the window or in it and an earlier one, and weights versions that were not
    asked for. 4. Write demand and list under a temporary name, flush, rename.

    Args:
        store: an open store; writers may go on writing.
        name: of the window, a plain file name that no window has.
        ids: the records to seal; one that another window holds may be sealed again.
        weights_versions: versions that may be in the window; None allows one version, whichever.
        verify: read records whole (2). Without it damage shows when a record is read.

    Raises:
        ConfigError: the name is taken or no plain file name, or there is nothing to seal.
        InputError: a refusal of (3), naming records, or an earlier window is damaged.
    """
    if not _is_plain(name):
        raise ConfigError(
            "window", name, f"a plain file name of at most {MAX_NAME} bytes that does not begin with a dot"
        )
    wanted = None if ids is None else set(ids)
    if wanted is not None and not wanted:
        raise ConfigError("ids", [], "at least one id")
    folder = store.folder / "windows" / name
    with locked(store.folder / "seal.lock"):
        if folder.exists():
            raise ConfigError("window", name, "a name that no window has")
        for leftover in folder.parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover)
        entries, damages = store.scan()
        earlier = manifests(store)
        if wanted is None:
            chosen = _of_versions(_pending(entries, earlier), weights_versions)
        else:
            chosen = [entry for entry in entries if entry.id in wanted]
        _refuse_missing(chosen, wanted, damages)
        unique = _unique(_sound(store, chosen) if verify else chosen)
        _refuse_mixed_versions(unique, weights_versions)
        sequence = 1 + max((manifest["sequence"] for manifest in earlier.values()), default=0)
        _write(store, folder, sequence, unique, damages)
    return open_window(store, name)


def _is_plain(name: str) -> bool:
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    return 0 < num_bytes <= MAX_NAME and not name.startswith(".") and not set(name) & {"/", "\0"}


def _pending(entries: Sequence[Entry], earlier: Mapping[str, dict[str, Any]]) -> list[Entry]:
    """What no earlier window holds; an id that one holds with another content would be lost without a word."""
    sealed = {
        record["id"]: (f"window {name!r}, {record['shard']}", WindowRecord(**record))
        for name, manifest in earlier.items()
        for record in manifest["records"]
    }
    for entry in entries:
        if entry.id in sealed:
            _refuse_other_content(*sealed[entry.id], entry)
    return [entry for entry in entries if entry.id not in sealed]


def _of_versions(pending: Sequence[Entry], versions: Collection[str] | None) -> list[Entry]:
    """Every copy of the records of which one is of the versions; None stands for all versions."""
    if versions is None:
        return list(pending)
    ids = {entry.id for entry in pending if entry.weights_version in set(versions)}
    return [entry for entry in pending if entry.id in ids]


def _refuse_missing(chosen: Sequence[Entry], ids: set[str] | None, damages: Sequence[Damage]) -> None:
    lost = "; ".join(map(str, damages[:NAMED_IN_ERRORS]))
    lost = f"; the store has damage: {lost}" if lost else ""
    if ids is None and not chosen:
        raise ConfigError("window", [], f"at least one record that no window holds{lost}")
    missing = sorted((ids or set()) - {entry.id for entry in chosen})
    if missing:
        raise InputError("ids", f"{_some(missing)} not in the store", f"records of the store{lost}")


def _unique(chosen: Sequence[Entry]) -> list[Entry]:
    """One entry an id, by id; a record that was written twice with the same content counts once."""
    by_id: dict[str, Entry] = {}
    for entry in chosen:
        first = by_id.setdefault(entry.id, entry)
        _refuse_other_content(first.shard, first, entry)
    return [by_id[id] for id in sorted(by_id)]


def _refuse_other_content(place: str, first: Entry | WindowRecord, entry: Entry) -> None:
    if _content(first) != _content(entry):
        raise InputError(
            f"record {entry.id!r}",
            f"is in {place}, byte {first.offset}, and with other content in {entry.shard}, byte {entry.offset}",
            "one content an id",
        )


def _content(entry: Entry | WindowRecord) -> tuple[Any, ...]:
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
    """The entries that match their checksums; each id has at least one."""
    sound = [entry for entry in chosen if store.is_sound(entry)]
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
    files["window.json"] = checked_json.dumps(manifest)
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


def _some(names: Sequence[str]) -> str:
    """The first few of a list, and how many more."""
    more = f" and {len(names) - NAMED_IN_ERRORS} more" if len(names) > NAMED_IN_ERRORS else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names[:NAMED_IN_ERRORS])}{more} {verb}"


__all__ = ["seal"]
