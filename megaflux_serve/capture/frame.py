"""A record as bytes of a shard: header, description, counts, body. docs/replay-format.md is the specification.

Decides the byte layout, version 1, and what a damaged frame is; knows neither folders nor windows. The header has a
checksum of its own, so that a reader can trust its lengths, step over a damaged frame and go on behind it. Description
and counts have another, so that an index is made without reading a body.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megaflux_serve.capture.record import Int32Array, ModelShape, ReplayRecord
from megaflux_serve.errors import InputError

MAGIC = b"MFRR"
VERSION = 1
HEADER = struct.Struct("<4sHHIIQIII")
"""Magic, version, 0, bytes of description, counts and body, CRC-32 of description and counts, of body, of header."""
HEADER_CRC_AT = HEADER.size - 4
MAX_DESCRIPTION_BYTES = 2**20
SECTIONS = ("routes", "valid", "token_ids")
LABELS = ("group", "task", "weights_version", "engine", "engine_version")

# Level 1 of zstd, a record at a time: on gpt-oss-20b's routes 0.52 of the bytes at 0.16 GB/s of one busy core. Level 3
# gains 3 % at half the speed, lz4 keeps 0.80, and layer-major order gains nothing.
ZSTD = pa.Codec("zstd", 1)


@dataclass(frozen=True)
class Entry:
    """Where a record lies and what it says of itself, without its routes.

    Attributes:
        shard: file name below the store's ``shards``.
        offset, size: of the frame, in bytes.
        id, group, task, weights_version, engine, engine_version, prompt_tokens, output_tokens: as in the record.
        num_valid: rows that hold routes.
        checksum: CRC-32 of the record's uncompressed arrays; equal for equal content whoever wrote it.
        counts_at, body_at: offsets of counts and body in the file.
    """

    shard: str
    offset: int
    size: int
    id: str
    group: str
    task: str
    weights_version: str
    engine: str
    engine_version: str
    prompt_tokens: int
    output_tokens: int
    num_valid: int
    checksum: int
    counts_at: int
    body_at: int

    @property
    def end(self) -> int:
        """Offset of the first byte behind the frame."""
        return self.offset + self.size

    @property
    def num_tokens(self) -> int:
        """n, prompt and output."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Damage:
    """Bytes of a shard that hold no readable record.

    Attributes:
        shard: file name.
        offset, size: the bytes at fault.
        reason: what is wrong, as a phrase.
        record_id: the record that was lost, where its description can still be read, else empty.
        is_tail: the frame is cut off by the end of the file: a write that never ended, or one that still goes on.
    """

    shard: str
    offset: int
    size: int
    reason: str
    record_id: str = ""
    is_tail: bool = False

    def __str__(self) -> str:
        lost = f", record {self.record_id!r}" if self.record_id else ""
        return f"{self.shard}, bytes {self.offset} to {self.offset + self.size}{lost}: {self.reason}"


def encode(record: ReplayRecord) -> list[bytes]:
    """The frame of a record, in pieces to write one after the other; joining them would take as long as compressing."""
    raw = record.sections
    body = {name: ZSTD.compress(array, asbytes=True) if array.size else b"" for name, array in raw.items()}
    description = {
        "id": record.id,
        **{name: getattr(record, name) for name in LABELS},
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "num_valid": record.num_valid,
        "checksum": record.checksum,
        "sections": {name: len(data) for name, data in body.items()},
    }
    text = json.dumps(description, separators=(",", ":")).encode()
    counts = ZSTD.compress(record.counts.astype("<i4", copy=False), asbytes=True)
    crcs = zlib.crc32(counts, zlib.crc32(text)), _crc32(body.values())
    lengths = len(text), len(counts), sum(map(len, body.values()))
    header = HEADER.pack(MAGIC, VERSION, 0, *lengths, *crcs, 0)[:HEADER_CRC_AT]
    return [b"".join((header, struct.pack("<I", zlib.crc32(header)), text, counts)), *body.values()]


def decode(frame: bytes, model: ModelShape, shard: str, offset: int) -> ReplayRecord:
    """The record of a whole frame.

    Raises:
        InputError: naming shard, offset and what is damaged.
    """
    source = f"{shard}, byte {offset}"
    header = _header(frame[: HEADER.size], shard)
    if header is None:
        raise InputError(source, "the header is damaged", "an undamaged frame")
    if not is_sound(frame, shard):
        raise InputError(source, "the checksum does not match", "an undamaged frame")
    text_bytes, counts_bytes = header[:2]
    description = json.loads(frame[HEADER.size : HEADER.size + text_bytes])
    body = memoryview(frame)[HEADER.size + text_bytes + counts_bytes :]
    prompt, output = description["prompt_tokens"], description["output_tokens"]
    num_rows, sizes = prompt + output - 1, description["sections"]
    shape = (num_rows, *model.row_shape)
    raw = {
        "routes": int(np.prod(shape)) * model.id_dtype.itemsize,
        "valid": -(-num_rows // 8),
        "token_ids": 4 + 4 * num_rows,
    }
    arrays, at = {}, 0
    for name in SECTIONS:
        data = body[at : at + sizes[name]]
        arrays[name] = ZSTD.decompress(data, raw[name], asbytes=True) if data else b""
        at += sizes[name]
    record = ReplayRecord(
        description["id"],
        model,
        prompt,
        output,
        np.frombuffer(arrays["routes"], dtype=model.id_dtype).reshape(shape),
        np.unpackbits(np.frombuffer(arrays["valid"], dtype=np.uint8), count=num_rows).view(np.bool_),
        np.frombuffer(arrays["token_ids"], dtype="<i4") if arrays["token_ids"] else None,
        **{name: description[name] for name in LABELS},
    )
    if record.checksum != description["checksum"]:
        raise InputError(f"{source}, record {record.id!r}", "the checksum does not match", "an undamaged record")
    return record


def is_sound(frame: bytes, shard: str) -> bool:
    """Whether a whole frame matches its checksums; nothing is decompressed."""
    header = _header(frame[: HEADER.size], shard)
    if header is None:
        return False
    text_bytes, counts_bytes, _, crc_index, crc_body = header
    data, body_at = memoryview(frame), HEADER.size + text_bytes + counts_bytes
    return zlib.crc32(data[HEADER.size : body_at]) == crc_index and zlib.crc32(data[body_at:]) == crc_body


def decode_counts(data: bytes, model: ModelShape) -> Int32Array:
    """int32 [L, E] of a frame's counts."""
    num_layers, num_experts = model.row_shape[0], model.num_experts
    raw = ZSTD.decompress(data, num_layers * num_experts * 4, asbytes=True)
    counts: NDArray[np.int32] = np.frombuffer(raw, dtype="<i4").reshape(num_layers, num_experts)
    return counts


def scan(file: int, shard: str, start: int = 0) -> Iterator[Entry | Damage]:
    """Entries and damages of a shard in order of offset; bodies are not read.

    A writer may append meanwhile, or take a failed write back and put another frame there.

    Args:
        file: descriptor to read from.
        shard: name for entries and damages.
        start: offset of a frame.
    """
    while start < os.fstat(file).st_size:
        found = _entry(file, shard, start)
        yield found
        start += found.size


def _entry(file: int, shard: str, offset: int) -> Entry | Damage:
    head = os.pread(file, HEADER.size, offset)
    end = os.fstat(file).st_size  # asked behind the header, which may be of a frame that is written just now
    header = _header(head, shard)
    if header is None:
        if offset + HEADER.size > end and MAGIC.startswith(head[: len(MAGIC)]):
            return Damage(shard, offset, end - offset, "the file ends inside a header", is_tail=True)
        following = _next_header(file, shard, offset + 1, end)
        return Damage(shard, offset, following - offset, "a damaged header")
    text_bytes, counts_bytes, body_bytes, crc_index, _ = header
    size = HEADER.size + text_bytes + counts_bytes + body_bytes
    index = os.pread(file, text_bytes + counts_bytes, offset + HEADER.size)
    is_sound = len(index) == text_bytes + counts_bytes and zlib.crc32(index) == crc_index
    if not is_sound and offset + size <= end:
        if os.pread(file, HEADER.size, offset) != head:  # the write had failed, and another frame took its place
            return _entry(file, shard, offset)
        return Damage(shard, offset, size, "a damaged description", _id_of(index[:text_bytes]))
    if offset + size > end:
        return Damage(shard, offset, end - offset, "the file ends inside a record", _id_of(index[:text_bytes]), True)
    description = json.loads(index[:text_bytes])
    del description["sections"]
    counts_at = offset + HEADER.size + text_bytes
    return Entry(shard, offset, size, **description, counts_at=counts_at, body_at=counts_at + counts_bytes)


def _header(head: bytes, shard: str) -> tuple[int, int, int, int, int] | None:
    """Description, counts and body bytes, and the checksums of index and body; None where the header is damaged."""
    if len(head) < HEADER.size:
        return None
    magic, version, zero, text, counts, body, crc_index, crc_body, crc = HEADER.unpack_from(head)
    if (magic, zero) != (MAGIC, 0) or zlib.crc32(head[:HEADER_CRC_AT]) != crc or text > MAX_DESCRIPTION_BYTES:
        return None
    if version != VERSION:
        raise InputError(shard, f"holds frames of version {version}", f"version {VERSION}")
    return text, counts, body, crc_index, crc_body


def _next_header(file: int, shard: str, start: int, end: int, chunk: int = 2**20) -> int:
    """Offset of the next sound header, ``end`` where there is none."""
    while start < end:
        data = os.pread(file, chunk + len(MAGIC) - 1, start)
        at = data.find(MAGIC)
        while at >= 0:
            if _header(os.pread(file, HEADER.size, start + at), shard) is not None:
                return start + at
            at = data.find(MAGIC, at + 1)
        start += chunk
    return end


def _id_of(text: bytes) -> str:
    """The record id that stands first in a description, even in a damaged one; empty where it cannot be read."""
    start = b'{"id":'
    if not text.startswith(start):
        return ""
    try:
        value, _ = json.JSONDecoder().raw_decode(text[len(start) :].decode(errors="replace"))
    except json.JSONDecodeError:
        return ""
    return str(value)


def _crc32(pieces: Iterable[bytes]) -> int:
    crc = 0
    for data in pieces:
        crc = zlib.crc32(data, crc)
    return crc
