"""The store: a folder where many processes append records, one file a writer, and any process reads.

Decides files, locks and what survives a crash; docs/replay-format.md says it for others. A record is in the store when
``append`` returns: the process may be killed at any instant after. ``sync`` makes it survive the machine too. A kill
during ``append`` leaves a frame that the end of the file cuts off; readers step over it and name it.

::

    store.json             format, version and the shape of the model's routes
    shards/<writer>.shard  frames, only ever appended, by the one process that holds the file's lock
    windows/<name>/        sealed windows (window.py)
    seal.lock              held while a window is sealed
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from megaflux_serve.capture.frame import Damage, Entry, decode, decode_counts, encode, scan
from megaflux_serve.capture.record import Int32Array, ModelShape, ReplayRecord
from megaflux_serve.durable import sync_folder, write_all, write_atomically
from megaflux_serve.errors import ConfigError, InputError

FORMAT = "megaflux-replay"
VERSION = 1
SHARD_BYTES = 2**30
"""A writer begins a new shard once this many bytes are in the last."""


@dataclass
class _ShardIndex:
    """What is known of a shard: everything before ``end``."""

    end: int = 0
    found: list[Entry | Damage] = field(default_factory=list)


class ReplayStore:
    """An open store. Reading and writing need no more than the folder; several may be open on one.

    ::

        store = ReplayStore.create(Path("replay"), model)
        with store.writer() as writer:
            writer.append(record)

    Attributes:
        folder: where it lies.
        model: shape of the routes of every record.
    """

    def __init__(self, folder: Path) -> None:
        """Open a store.

        Raises:
            InputError: the folder is none, or of another version.
        """
        source = folder / "store.json"
        try:
            stored = json.loads(source.read_bytes())
            found = stored["format"], stored["version"]
            shape = stored["model"] | {"moe_layers": tuple(stored["model"]["moe_layers"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(str(source), f"cannot be read ({error})", "a replay store") from error
        if found != (FORMAT, VERSION):
            raise InputError(str(source), f"is {found[0]} version {found[1]}", f"{FORMAT} version {VERSION}")
        self.folder, self.model = folder, ModelShape(**shape)
        self._index: dict[str, _ShardIndex] = {}

    @classmethod
    def create(cls, folder: Path, model: ModelShape) -> ReplayStore:
        """Make a store, or open the one that is there; processes may do so at the same time.

        Raises:
            ConfigError: the folder is a store of another model.
        """
        for name in ("shards", "windows"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if not (folder / "store.json").exists():
            description = {"format": FORMAT, "version": VERSION, "model": asdict(model)}
            write_atomically(folder / "store.json", (json.dumps(description) + "\n").encode())
        store = cls(folder)
        if store.model != model:
            raise ConfigError("model", model, f"{store.model}, the shape in {folder / 'store.json'}")
        return store

    def writer(self, shard_bytes: int = SHARD_BYTES) -> StoreWriter:
        """A writer with shards of its own."""
        return StoreWriter(self, shard_bytes)

    def scan(self) -> tuple[list[Entry], list[Damage]]:
        """Every record and every damage, by shard and offset. Bodies are not read, and known bytes not read again.

        A frame that its writer has not ended yet is neither.
        """
        entries: list[Entry] = []
        damages: list[Damage] = []
        for path in sorted((self.folder / "shards").glob("*.shard")):
            index = self._index.setdefault(path.name, _ShardIndex())
            is_live = is_locked(path)  # asked before reading: what a writer ends meanwhile is read next time
            tail: Damage | None = None
            with path.open("rb") as file:
                for found in scan(file.fileno(), path.name, index.end):
                    if isinstance(found, Damage) and found.is_tail:
                        tail = None if is_live else found
                        break
                    index.found.append(found)
                    index.end = found.offset + found.size
            entries += [found for found in index.found if isinstance(found, Entry)]
            damages += [found for found in index.found if isinstance(found, Damage)] + ([tail] if tail else [])
        return entries, damages

    def read(self, shard: str, offset: int, size: int) -> ReplayRecord:
        """The record of a frame.

        Raises:
            InputError: naming shard, offset and what is damaged or missing.
        """
        return decode(self._bytes(shard, offset, size), self.model, shard, offset)

    def read_counts(self, entry: Entry) -> Int32Array:
        """int32 [L, E], the demand of a record, without reading its routes."""
        return decode_counts(self._bytes(entry.shard, entry.counts_at, entry.body_at - entry.counts_at), self.model)

    def read_body(self, entry: Entry) -> bytes:
        """The compressed body of a record, as stored."""
        return self._bytes(entry.shard, entry.body_at, entry.end - entry.body_at)

    def records(self) -> Iterator[ReplayRecord]:
        """Every readable record, one at a time."""
        for entry in self.scan()[0]:
            yield self.read(entry.shard, entry.offset, entry.size)

    def _bytes(self, shard: str, offset: int, size: int) -> bytes:
        try:
            with (self.folder / "shards" / shard).open("rb") as file:
                data = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise InputError(shard, f"cannot be read ({error})", "a shard of the store") from error
        if len(data) != size:
            raise InputError(f"{shard}, byte {offset}", f"{len(data)} of {size} bytes are there", "an undamaged shard")
        return data


class StoreWriter:
    """Appends records to shards that nobody else writes. Threads may share it; processes make their own.

    Args:
        store: an open store.
        shard_bytes: when to begin a new shard.
    """

    def __init__(self, store: ReplayStore, shard_bytes: int = SHARD_BYTES) -> None:
        self.store, self.shard_bytes = store, shard_bytes
        self.num_records = self.num_bytes = 0
        self._lock = threading.Lock()
        self._file: int | None = None
        self._end = 0

    def append(self, record: ReplayRecord) -> int:
        """Write a record; when this returns, a kill of the process cannot lose it.

        Returns:
            Bytes of its frame.

        Raises:
            InputError: the record's routes have another shape than the store's.
            OSError: the disk is full or fails. The record is not in the store and the shard is as it was before.
        """
        if record.model != self.store.model:
            raise InputError(f"record {record.id!r}", f"is of {record.model}", f"{self.store.model}, as the store")
        frame = encode(record)
        with self._lock:
            if self._file is not None and self._end >= self.shard_bytes:
                self._close()
            file = self._open() if self._file is None else self._file
            try:
                for piece in frame:
                    write_all(file, piece)
            except BaseException:
                os.ftruncate(file, self._end)
                raise
            size = sum(map(len, frame))
            self._end += size
            self.num_records += 1
            self.num_bytes += size
            return size

    def sync(self) -> None:
        """Flush to the disk: what was appended survives a crash of the machine."""
        with self._lock:
            if self._file is not None:
                os.fsync(self._file)

    def close(self) -> None:
        """Flush and close; a later ``append`` begins a new shard."""
        with self._lock:
            if self._file is not None:
                self._close()

    def _open(self) -> int:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.shard"
        path = self.store.folder / "shards" / name
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        sync_folder(path.parent)
        self._file, self._end = file, 0
        return file

    def _close(self) -> None:
        assert self._file is not None
        os.fsync(self._file)
        os.close(self._file)
        self._file = None

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_locked(path: Path) -> bool:
    """Whether a living process writes this shard."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
