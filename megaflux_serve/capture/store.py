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

from megaflux_serve.capture import checked_json
from megaflux_serve.capture.frame import Damage, Entry, decode, decode_counts, encode, is_sound, scan
from megaflux_serve.capture.record import Int32Array, ModelShape, ReplayRecord
from megaflux_serve.durable import locked, make_folder, sync_folder, write_all, write_atomically
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

    def update(self, file: int, shard: str) -> Damage | None:
        """Read what is new.

        Returns:
            The frame that the end of the file cuts off, if nobody writes it any more.
        """
        for found in scan(file, shard, self.end):
            if isinstance(found, Damage) and found.is_tail:
                # Asked behind the reading, and in this order: a shard without a writer does not change any more.
                is_final = not is_locked(file) and os.fstat(file).st_size == found.offset + found.size
                return found if is_final else None
            self.found.append(found)
            self.end = found.offset + found.size
        return None


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
            InputError: the folder is none, damaged, or of another version.
        """
        source = folder / "store.json"
        try:
            data = source.read_bytes()
            stored = json.loads(data)
            found = stored["format"], stored["version"]
            shape = stored["model"] | {"moe_layers": tuple(stored["model"]["moe_layers"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(str(source), f"cannot be read ({error})", "a replay store") from error
        if found != (FORMAT, VERSION):
            raise InputError(str(source), f"is {found[0]} version {found[1]}", f"{FORMAT} version {VERSION}")
        if not checked_json.is_sound(data):
            raise InputError(str(source), "is damaged: its SHA-256 is not the one it holds", "an undamaged file")
        self.folder, self.model = folder, ModelShape(**shape)
        self._index: dict[str, _ShardIndex] = {}

    @classmethod
    def create(cls, folder: Path, model: ModelShape) -> ReplayStore:
        """Make a store, or open the one that is there; processes may do so at the same time.

        Raises:
            ConfigError: the folder is a store of another model.
        """
        for name in ("shards", "windows"):
            make_folder(folder / name)
        if not (folder / "store.json").exists():
            with locked(folder / "seal.lock"):
                if not (folder / "store.json").exists():
                    description = {"format": FORMAT, "version": VERSION, "model": asdict(model)}
                    write_atomically(folder / "store.json", checked_json.dumps(description))
        store = cls(folder)
        if store.model != model:
            raise ConfigError("model", model, f"{store.model}, the shape in {folder / 'store.json'}")
        return store

    def writer(self, shard_bytes: int = SHARD_BYTES) -> StoreWriter:
        """A writer with shards of its own."""
        return StoreWriter(self, shard_bytes)

    def scan(self) -> tuple[list[Entry], list[Damage]]:
        """Every record and every damage, by shard and offset. Bodies are not read, and known bytes not read again.

        A frame that its writer has not ended yet is neither. A shard that the disk does not give is a damage, and the
        rest is read.
        """
        entries: list[Entry] = []
        damages: list[Damage] = []
        for path in sorted((self.folder / "shards").glob("*.shard")):
            index = self._index.setdefault(path.name, _ShardIndex())
            try:
                with path.open("rb") as file:
                    tail = index.update(file.fileno(), path.name)
            except OSError as error:
                tail = Damage(path.name, index.end, 0, f"what follows cannot be read ({error})")
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

    def is_sound(self, entry: Entry) -> bool:
        """Whether every byte of a record can be read and matches its checksums."""
        try:
            return is_sound(self._bytes(entry.shard, entry.offset, entry.size), entry.shard)
        except InputError:
            return False

    def records(self) -> Iterator[ReplayRecord]:
        """Every readable record, one at a time."""
        for entry in self.scan()[0]:
            yield self.read(entry.shard, entry.offset, entry.size)

    def _bytes(self, shard: str, offset: int, size: int) -> bytes:
        try:
            with (self.folder / "shards" / shard).open("rb") as file:
                file.seek(offset)
                data = file.read(size)
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
        self._process = os.getpid()

    def append(self, record: ReplayRecord) -> int:
        """Write a record; when this returns, a kill of the process cannot lose it.

        Returns:
            Bytes of its frame.

        Raises:
            InputError: the record's routes have another shape than the store's.
            OSError: the disk is full or fails. The record is not in the store, and what was there before is.
        """
        if record.model != self.store.model:
            raise InputError(f"record {record.id!r}", f"is of {record.model}", f"{self.store.model}, as the store")
        frame = encode(record)
        size = sum(map(len, frame))
        with self._lock:
            file = self._shard()
            end = os.fstat(file).st_size
            try:
                for piece in frame:
                    write_all(file, piece)
            except BaseException:
                self._take_back(file, end, size)
                raise
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

    def _shard(self) -> int:
        """The shard to append to: the one that is open, unless it is full, deleted, or that of a parent process."""
        if self._file is not None:
            status = os.fstat(self._file)
            if not status.st_nlink or self._process != os.getpid():
                self._leave()
            elif status.st_size >= self.shard_bytes:
                self._close()
        return self._open() if self._file is None else self._file

    def _take_back(self, file: int, end: int, size: int) -> None:
        """Cut off what was written of a frame; nothing is appended behind one that cannot be cut off.

        A frame that an interrupt hit when it was whole stays: readers may know it already.
        """
        if os.fstat(file).st_size == end + size:
            return
        try:
            os.ftruncate(file, end)
        except BaseException:
            self._leave()
            raise

    def _open(self) -> int:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.shard"
        path = self.store.folder / "shards" / name
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            sync_folder(path.parent)
        except BaseException:
            path.unlink()
            os.close(file)
            raise
        self._file, self._process = file, os.getpid()
        return file

    def _close(self) -> None:
        assert self._file is not None
        try:
            os.fsync(self._file)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Close without flushing; the next record begins a new shard."""
        assert self._file is not None
        file, self._file = self._file, None
        os.close(file)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_locked(file: int) -> bool:
    """Whether a living process writes the shard of this descriptor."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
