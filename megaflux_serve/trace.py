"""Routing traces, read from files: expert counts of every layer and, where the file has them, every token's experts.

Decides which file formats are understood and what a valid trace is. Knows no ranks, homes, plans or engines: a caller
cuts a layer into batches and plans them. Formats:

======================  ==========================================================================================
``.csv``, long          header ``layer,expert,count``; a pair that is not listed counts 0
``.csv``, wide          header ``layer,0,1,2,...`` (or ``expert_0,...``), one row a layer
``.json``               a layer is a list of counts or an object expert -> count; layers sit in lists or objects, also
                        nested, and are named by their path: ``3``, ``olmoe/expert_counts/arxiv/0``
``.npy``                routed-expert ids, integer ``[tokens, layers, k]``, as vLLM and SGLang return them
``.npz``                the same under the key ``experts`` or ``routed_experts``; ``offsets`` (first token of each
                        request, then the number of tokens), if present, must fit
a folder                its ``.npy`` and ``.npz`` files in order of name, one after the other
======================  ==========================================================================================

Nothing is ever unpickled.
"""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.errors import InputError
from megaflux_serve.routing import CountArray, check_topk_ids, expert_counts

MAX_COUNT = 2**31 - 1
"""Largest count of one expert, so that token blocks always fit int32."""

MAX_EXPERTS = 2**16
"""Ids of this value or more are no expert ids: engines return uint8 or uint16."""

ARRAY_KEYS = ("experts", "routed_experts")
ARRAY_SUFFIXES = (".npy", ".npz")
DAMAGE = (ValueError, OSError, EOFError, KeyError, MemoryError, RuntimeError, TokenError, BadZipFile, zlib.error)
"""What numpy, zip and zlib raise on bytes that are no array, by trial with damaged files."""

FORMATS = "a .csv, .json, .npy or .npz file, or a folder of .npy and .npz files"


@dataclass(frozen=True)
class LayerTrace:
    """What the router of one MoE layer did.

    Attributes:
        name: the layer's name in the file.
        counts: int64 [E], token-expert assignments of the whole trace by expert.
        topk_ids: integer [tokens, k], the experts of every token in order; None where the file holds only totals.
    """

    name: str
    counts: CountArray
    topk_ids: NDArray[Any] | None = None

    @property
    def num_experts(self) -> int:
        """Logical experts E of the layer."""
        return int(self.counts.size)

    def num_batches(self, batch_tokens: int | None = None) -> int:
        """Batches of ``batch_tokens`` tokens that the trace fills; without it the whole trace is one batch.

        Raises:
            InputError: the layer has no token-level ids, or fewer than ``batch_tokens`` tokens.
        """
        if batch_tokens is None:
            return 1
        if self.topk_ids is None:
            raise InputError(f"layer {self.name}", "holds totals, not tokens", "routed-expert arrays for batches")
        num_tokens = len(self.topk_ids)
        if not 1 <= batch_tokens <= num_tokens:
            raise InputError(f"layer {self.name}", f"batches of {batch_tokens} tokens", f"1 to {num_tokens} tokens")
        return num_tokens // batch_tokens

    def batches(self, batch_tokens: int | None = None) -> Iterator[CountArray]:
        """Expert counts int64 [E] of consecutive batches; tokens that do not fill a last one are left out.

        Raises:
            InputError: as ``num_batches``.
        """
        for batch in range(self.num_batches(batch_tokens)):
            if batch_tokens is None or self.topk_ids is None:
                yield self.counts
            else:
                ids = self.topk_ids[batch * batch_tokens : (batch + 1) * batch_tokens]
                yield expert_counts(ids, self.num_experts)


@dataclass(frozen=True)
class Trace:
    """A routing trace: the layers that were read, in file order.

    Attributes:
        source: where it was read from.
        layers: at least one layer; their expert counts may differ (a file may hold several models).
        experts_inferred: True where the file does not say how many experts there are and the largest id was taken.
    """

    source: str
    layers: tuple[LayerTrace, ...]
    experts_inferred: bool = False

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the trace; None where it holds only totals."""
        ids = self.layers[0].topk_ids
        return None if ids is None else len(ids)

    @property
    def top_k(self) -> int | None:
        """Experts a token; None where the trace holds only totals."""
        ids = self.layers[0].topk_ids
        return None if ids is None else int(ids.shape[1])


def read_trace(path: Path, num_experts: int | None = None, layers: Sequence[str] = ()) -> Trace:
    """Read a routing trace; the format follows from the file's name.

    Args:
        path: file or folder in one of the formats above.
        num_experts: experts E of the model, at least 1; default: as many as the file lists, or its largest id + 1.
        layers: names or shell patterns of the layers to keep, such as ``3`` or ``olmoe/*``; default: all.

    Returns:
        The trace, checked as a whole.

    Raises:
        InputError: a file that is missing, empty, truncated or not in the format; ids out of range, negative counts, a
            pattern that fits no layer. The message names file, field, value and what is allowed.
    """
    if path.is_dir():
        return _from_arrays(path, _folder_arrays(path), num_experts, layers)
    if not path.is_file():
        raise InputError(str(path), "is not a file or folder", FORMATS)
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json", *ARRAY_SUFFIXES):
        raise InputError(str(path), f"has the suffix {path.suffix!r}", FORMATS)
    if path.stat().st_size == 0:
        raise InputError(str(path), "is empty", "a file with at least one layer")
    if suffix in ARRAY_SUFFIXES:
        return _from_arrays(path, [_read_array(path)], num_experts, layers)
    named = _read_csv(path) if suffix == ".csv" else _read_json(path)
    return _from_counts(path, named, num_experts, layers)


# ---- counts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Counts:
    """Counts of one layer as its file lists them: by expert id; ``listed`` experts, or None where zeros may be missing.

    ``group`` names the layers that belong to one model: the largest id among them tells how many experts it has.
    """

    name: str
    group: str
    by_expert: dict[int, int]
    listed: int | None


def _from_counts(path: Path, rows: list[_Counts], num_experts: int | None, patterns: Sequence[str]) -> Trace:
    """Bring every layer to int64 [E]."""
    if not rows:
        raise InputError(str(path), "holds no layer", "at least one layer")
    names = Counter(row.name for row in rows)
    if len(names) < len(rows):
        (name, times), *_ = names.most_common(1)
        raise InputError(f"{path}: layer {name}", f"is there {times} times", "every name once")
    kept = [rows[i] for i in _select(path, [row.name for row in rows], patterns)]
    largest: dict[str, int] = {}
    for row in rows:
        largest[row.group] = max(largest.get(row.group, 0), max(row.by_expert, default=0))
    layers = []
    for row in kept:
        size = num_experts or row.listed or largest[row.group] + 1
        if row.listed is not None and row.listed != size:
            raise InputError(f"{path}: layer {row.name}", f"lists {row.listed} experts", f"{size} experts")
        beyond = [expert for expert in row.by_expert if expert >= size]
        if beyond:
            raise InputError(f"{path}: layer {row.name}", f"holds expert id {max(beyond)}", f"ids 0 to {size - 1}")
        counts = np.zeros(size, dtype=np.int64)
        counts[list(row.by_expert)] = list(row.by_expert.values())
        layers.append(LayerTrace(row.name, counts))
    inferred = num_experts is None and any(row.listed is None for row in kept)
    return Trace(str(path), tuple(layers), inferred)


def _select(path: Path, names: Sequence[str], patterns: Sequence[str]) -> list[int]:
    """Indices of the layers that one of the patterns names; all without patterns."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise InputError(f"{path}: layer", f"none is called {pattern!r}", shown)
    return [i for i, name in enumerate(names) if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def _check_count(where: str, value: Any) -> int:
    """A count as JSON or CSV gave it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise InputError(where, f"count is {value!r}", f"whole numbers from 0 to {MAX_COUNT}")
    return value


def _check_expert(where: str, value: str) -> int:
    """An expert id as JSON keys and CSV fields give it."""
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) >= MAX_EXPERTS:
        raise InputError(where, f"expert is {value!r}", f"ids 0 to {MAX_EXPERTS - 1}")
    return int(value)


def _read_csv(path: Path) -> list[_Counts]:
    """Long or wide table, told apart by the header."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = [(number, row) for number, row in enumerate(csv.reader(file, strict=True), 1) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), f"is not a CSV file ({error})", "comma-separated UTF-8 text") from error
    header, rows = [name.strip() for name in table[0][1]] if table else [], table[1:]
    experts = [re.sub(r"^expert_", "", name) for name in header[1:]]
    is_long = header == ["layer", "expert", "count"]
    if not is_long and (header[:1] != ["layer"] or experts != [str(i) for i in range(len(experts))] or not experts):
        shown = ",".join(header)[:80]
        raise InputError(f"{path}: header", f"is {shown!r}", "'layer,expert,count', or 'layer,0,1,2,...' in order")
    if not rows:
        raise InputError(str(path), "holds a header and no rows", "at least one row")
    layers: dict[str, dict[int, int]] = {}
    for number, row in rows:
        where = f"{path}: line {number}"
        if len(row) != len(header):
            raise InputError(where, f"has {len(row)} fields", f"{len(header)} fields")
        name, *fields = [field.strip() for field in row]
        counts = layers.setdefault(name, {})
        for text_expert, text in [fields] if is_long else zip(experts, fields, strict=True):
            expert = _check_expert(where, text_expert)
            if expert in counts:
                raise InputError(where, f"repeats layer {name}, expert {expert}", "every pair once")
            counts[expert] = _check_count(where, int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text)
    listed = None if is_long else len(experts)
    return [_Counts(name, "", counts, listed) for name, counts in layers.items()]


def _read_json(path: Path) -> list[_Counts]:
    """Lists of counts or objects expert -> count, at any depth."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
        return list(_walk(path, document, ()))
    except InputError:
        raise
    except (ValueError, RecursionError, _RepeatedKey) as error:  # ValueError: also of numbers with thousands of digits
        raise InputError(str(path), f"is not a complete JSON file ({error})", "one JSON list or object") from error


class _RepeatedKey(Exception):
    """An object names a key twice."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which a repeated key is an error and not the last value."""
    names = [key for key, _ in pairs]
    if len(set(names)) != len(names):
        raise _RepeatedKey(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return dict(pairs)


def _walk(path: Path, node: Any, trail: tuple[str, ...]) -> Iterator[_Counts]:
    """Layers below a JSON node, in order. A node whose children hold nothing themselves is a layer."""
    where = f"{path}: {'/'.join(trail)}" if trail else str(path)
    if not isinstance(node, (list, dict)):
        raise InputError(where, f"is {str(node)[:40]!r}", "a list of counts, or an object expert -> count")
    if not node:
        raise InputError(where, "is empty", "at least one layer or expert")
    children = list(node.items()) if isinstance(node, dict) else [(str(i), child) for i, child in enumerate(node)]
    if any(isinstance(child, (list, dict)) for _, child in children):
        for key, child in children:
            yield from _walk(path, child, (*trail, key))
        return
    by_expert = {_check_expert(where, key): _check_count(f"{where}: expert {key}", child) for key, child in children}
    if len(by_expert) != len(children):
        raise InputError(where, "names an expert twice", "every expert once")
    listed = len(children) if isinstance(node, list) else None
    yield _Counts("/".join(trail) or "0", "/".join(trail[:-1]), by_expert, listed)


# ---- routed-expert arrays -------------------------------------------------------------------------------------------


def _from_arrays(path: Path, arrays: list[NDArray[Any]], num_experts: int | None, patterns: Sequence[str]) -> Trace:
    """One trace from arrays [tokens, layers, k] that follow each other."""
    if len({array.shape[1:] for array in arrays}) > 1:
        shapes = ", ".join(str(list(array.shape)) for array in arrays[:4])
        raise InputError(str(path), f"holds arrays of different layers or top_k: {shapes}", "one model a folder")
    ids = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    kept = _select(path, [str(i) for i in range(ids.shape[1])], patterns)
    size = num_experts or int(ids.max()) + 1
    layers = []
    for i in kept:
        layer_ids = ids[:, i]
        check_topk_ids(layer_ids, size, f"{path}: layer {i}")
        layers.append(LayerTrace(str(i), expert_counts(layer_ids, size), layer_ids))
    return Trace(str(path), tuple(layers), num_experts is None)


def _folder_arrays(path: Path) -> list[NDArray[Any]]:
    """The arrays of a folder, in order of name."""
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in ARRAY_SUFFIXES)
    if not files:
        raise InputError(str(path), "holds no .npy or .npz file", FORMATS)
    return [_read_array(file) for file in files]


def _read_array(path: Path) -> NDArray[Any]:
    """Routed ids [tokens, layers, k] of one file, as stored."""
    arrays = _load_arrays(path)
    keys = [key for key in arrays if key in ("", *ARRAY_KEYS)]
    if len(keys) != 1:
        raise InputError(f"{path}: keys", f"are {list(arrays)}", f"one of {' and '.join(ARRAY_KEYS)}")
    ids = arrays[keys[0]]
    where = f"{path}: {keys[0]}" if keys[0] else str(path)
    if ids.ndim != 3:
        raise InputError(where, f"has shape {list(ids.shape)}", "[tokens, layers, top_k]")
    if ids.dtype.kind not in "iu":
        raise InputError(where, f"has dtype {ids.dtype}", "an integer dtype")
    if ids.size == 0:
        raise InputError(where, f"is empty, shape {list(ids.shape)}", "at least one token, layer and expert")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= MAX_EXPERTS:
        raise InputError(where, f"holds expert id {low if low < 0 else high}", f"ids 0 to {MAX_EXPERTS - 1}")
    if "offsets" in arrays:
        _check_offsets(f"{path}: offsets", arrays["offsets"], len(ids))
    return ids


def _load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The routing arrays of a file by key; the array of an .npy file has the key ""."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"": loaded}
            if not set(ARRAY_KEYS) & set(loaded.files):
                return dict.fromkeys(loaded.files, np.empty(0))
            return {key: loaded[key] for key in loaded.files if key in (*ARRAY_KEYS, "offsets")}
    except DAMAGE as error:
        raise InputError(
            str(path), f"is damaged or truncated ({error})", "a complete array file, no pickles"
        ) from error


def _check_offsets(where: str, offsets: NDArray[Any], num_tokens: int) -> None:
    """Offsets must cut exactly the tokens that are there; a mismatch tells of a truncated file."""
    whole = offsets.ndim == 1 and offsets.size >= 2 and offsets.dtype.kind in "iu"
    if not whole or offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        raise InputError(where, "are not the ascending first tokens of requests", "integers that start at 0")
    if int(offsets[-1]) != num_tokens:
        raise InputError(where, f"end at token {int(offsets[-1])}", f"{num_tokens}, the tokens of the array")


__all__ = ["LayerTrace", "Trace", "read_trace"]
