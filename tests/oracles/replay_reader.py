"""docs/replay-format.md once more: a shard read by its specification alone. Imports nothing of the library."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


def read_store(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The description of an undamaged store, and its records by id: labels, and arrays as the format defines them."""
    store = json.loads((folder / "store.json").read_text())
    model = store["model"]
    num_layers, num_experts = len(model["moe_layers"]), model["num_experts"]
    wide = "<u1" if num_experts <= 256 else "<u2"
    records = {}
    for shard in sorted((folder / "shards").glob("*.shard")):
        data, at = shard.read_bytes(), 0
        while at < len(data):
            fields = struct.unpack_from("<4sHHIIQIII", data, at)
            magic, version, zero, text_bytes, counts_bytes, body_bytes, crc_index, crc_body, crc_header = fields
            assert (magic, version, zero) == (b"MFRR", 1, 0)
            assert crc_header == zlib.crc32(data[at : at + 32])
            text_at, counts_at = at + 36, at + 36 + text_bytes
            body_at = counts_at + counts_bytes
            assert crc_index == zlib.crc32(data[text_at:body_at])
            assert crc_body == zlib.crc32(data[body_at : body_at + body_bytes])
            record = json.loads(data[text_at:counts_at])
            record["counts"] = unpack(data[counts_at:body_at], "<i4", (num_layers, num_experts))
            tokens = record["prompt_tokens"] + record["output_tokens"]
            sizes, start, crc = record.pop("sections"), body_at, 0
            shapes = {
                "routes": (wide, (tokens - 1, num_layers, model["top_k"])),
                "valid": ("u1", (-(-(tokens - 1) // 8),)),
            }
            shapes["token_ids"] = ("<i4", (tokens,))
            for name, (dtype, shape) in shapes.items():
                part = data[start : start + sizes[name]]
                record[name] = unpack(part, dtype, shape) if part else None
                crc = zlib.crc32(record[name].tobytes() if part else b"", crc)
                start += sizes[name]
            assert start == body_at + body_bytes
            assert record.pop("checksum") == crc
            records[record["id"]] = record
            at = start
    return store, records


def unpack(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array from one zstd frame."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(pa.decompress(data, size, "zstd", asbytes=True), dtype).reshape(shape)


def count(routes: np.ndarray, valid: np.ndarray, num_experts: int) -> np.ndarray:
    """Demand [L, E] of routes [rows, L, k], one selection at a time."""
    counts = np.zeros((routes.shape[1], num_experts), dtype=np.int64)
    for row in np.flatnonzero(valid):
        for layer in range(routes.shape[1]):
            for expert in routes[row, layer]:
                counts[layer, expert] += 1
    return counts
