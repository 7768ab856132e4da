"""Records to and from files of other frameworks' forms, for the command line and for handing windows on.

Decides names inside the files. The frameworks keep these arrays in memory and define no file for them, so an export is
an ``.npz`` with the framework's array and, beside it, what is needed to tell the records apart. Holds no pickled
objects.

=================  ==============================================================================================
``verl``           ``.npz``: ``routed_experts``, ``attention_mask``, ``routes_mask`` of ``exchange.to_verl``
``slime, miles``   ``.npz``: ``rollout_routed_experts`` int32 [rows, layers, k] of all records, and ``offsets``
                   [N + 1]: record i is rows ``offsets[i]:offsets[i + 1]``
``router-replay``  ``.npz``: ``topk_indices`` int64 [L, tokens, k] and ``offsets`` by tokens; not read back, because
                   filled rows cannot be told from routes
``router-trace``   ``.jsonl``, a step a record
``npy``            read only: ``.npy`` responses of an engine, one a request, or a folder of them
=================  ==============================================================================================

A batch of verl's own, with its ``prompts`` [N, P], says how long each prompt is.

Every ``.npz`` has ``ids``, ``prompt_tokens``, ``output_tokens`` and the records' labels as arrays [N].
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.capture.exchange import (
    decode_response,
    from_verl,
    read_router_trace,
    to_rollout,
    to_router_replay,
    to_verl,
    verl_prompt_tokens,
    write_router_trace,
)
from megaflux_serve.capture.frame import LABELS
from megaflux_serve.capture.record import ModelShape, ReplayRecord
from megaflux_serve.durable import write_atomically
from megaflux_serve.errors import ConfigError, InputError, read_from

EXPORTS = ("verl", "slime", "miles", "router-replay", "router-trace")
FIELDS = ("id", *LABELS, "prompt_tokens", "output_tokens")
"""Of a record, beside its routes."""
IMPORTS = ("verl", "slime", "miles", "router-trace", "npy")


def export_records(records: Sequence[ReplayRecord], form: str, path: Path) -> None:
    """Write records, all in memory at once, to a file that appears whole or not at all.

    Args:
        records: at least one.
        form: one of ``EXPORTS``.
        path: of the file; parents are created.

    Raises:
        ConfigError: an unknown form.
        InputError: no records, or records that the form cannot hold.
    """
    if form not in EXPORTS:
        raise ConfigError("form", form, f"one of {', '.join(EXPORTS)}")
    if not records:
        raise InputError("records", "there are none", "at least one record")
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "router-trace":
        text = io.StringIO()
        write_router_trace(records, text)
        write_atomically(path, text.getvalue().encode())
        return
    file = io.BytesIO()
    columns: dict[str, Any] = {**_arrays(records, form), **_labels(records)}
    np.savez(file, **columns)
    write_atomically(path, file.getvalue())


def import_records(
    path: Path, form: str, model: ModelShape, prompt_tokens: int | None = None, **labels: str
) -> Iterator[ReplayRecord]:
    """Read records one at a time.

    Args:
        path: a file that ``export_records`` wrote or one like it, or for ``npy`` a response or a folder of them.
        form: one of ``IMPORTS``.
        model: shape of the routes.
        prompt_tokens: prompt length of every request, for files that do not say.
        labels: of every record, where the file does not say: ``group``, ``task``, ``weights_version``, ``engine``.

    Raises:
        ConfigError: an unknown form, or no prompt length where the file has none.
        InputError: naming the file, what it lacks, or the record at fault; also where there is no request.
    """
    if form not in IMPORTS:
        raise ConfigError("form", form, f"one of {', '.join(IMPORTS)}")
    requests = _requests(path, form, model)
    first = next(requests, None)
    if first is None:
        raise InputError(str(path), "holds no request", f"at least one, as {form}")
    for id, routes, found in chain([first], requests):
        prompt = int(found.pop("prompt_tokens", prompt_tokens or 0))
        if prompt < 1:
            raise ConfigError(
                "prompt_tokens", prompt_tokens, f"the prompt length, 1 or more, which {path} does not say"
            )
        output = int(found.pop("output_tokens", len(routes) + 1 - prompt))
        yield ReplayRecord.of(id, routes, model, prompt_tokens=prompt, output_tokens=output, **(labels | found))


def _arrays(records: Sequence[ReplayRecord], form: str) -> dict[str, NDArray[Any]]:
    if form == "verl":
        return to_verl(records)
    if form == "router-replay":
        offsets = np.cumsum([0, *(record.num_tokens for record in records)])
        return {"topk_indices": np.stack(to_router_replay(records)), "offsets": offsets}
    offsets = np.cumsum([0, *(len(record.routes) for record in records)])
    return {
        "rollout_routed_experts": np.concatenate([to_rollout(record, form) for record in records]),
        "offsets": offsets,
    }


def _labels(records: Sequence[ReplayRecord]) -> dict[str, NDArray[Any]]:
    return {_column(name): np.array([getattr(record, name) for record in records]) for name in FIELDS}


def _column(name: str) -> str:
    """Name of the array that holds one field of all records."""
    return name if name.endswith("tokens") else f"{name}s"


def _requests(path: Path, form: str, model: ModelShape) -> Iterator[tuple[str, NDArray[Any], dict[str, Any]]]:
    """Id, routes, and the fields that the file knows, of each request."""
    if form == "npy":
        for file in sorted(path.glob("*.npy")) if path.is_dir() else [path]:
            with read_from(file):
                routes = decode_response(_read(file), model)
            yield file.stem, routes, {}
    elif form == "router-trace":
        text = _read(path).decode(errors="replace")
        with read_from(path):
            for step, routes in read_router_trace(text.splitlines(), model):
                yield f"{path.stem}-{step}", routes, {}
    else:
        arrays = _load(path)
        with read_from(path):
            parts = list(from_verl(arrays) if form == "verl" else _slices(arrays))
            if form == "verl" and "prompts" in arrays:
                arrays["prompt_tokens"] = verl_prompt_tokens(arrays)
        columns = _columns(arrays, len(parts), path)
        for i, routes in enumerate(parts):
            known = {name: values[i] for name, values in columns.items()}
            yield known.pop("id", f"{path.stem}-{i}"), routes, known


def _columns(arrays: dict[str, NDArray[Any]], num_records: int, path: Path) -> dict[str, list[Any]]:
    """The fields that a file has, each with a value for every record."""
    columns = {}
    for name in FIELDS:
        array = arrays.get(_column(name))
        if array is None:
            continue
        kind, kinds, allowed = (int, "iu", "integers") if name.endswith("tokens") else (str, "iuU", "texts")
        if array.shape != (num_records,) or array.dtype.kind not in kinds:
            problem = f"has {_column(name)} {array.dtype} {list(array.shape)}"
            raise InputError(str(path), problem, f"{allowed} [{num_records}], one a record")
        columns[name] = [kind(value) for value in array]
    return columns


def _slices(arrays: dict[str, NDArray[Any]]) -> Iterator[NDArray[Any]]:
    missing = {"rollout_routed_experts", "offsets"} - arrays.keys()
    if missing:
        raise InputError("arrays", f"lack {sorted(missing)}", "rollout_routed_experts and offsets")
    routes, offsets = arrays["rollout_routed_experts"], arrays["offsets"]
    if (
        offsets.ndim != 1
        or offsets.dtype.kind not in "iu"
        or not offsets.size
        or offsets[0] != 0
        or offsets[-1] != len(routes)
        or (np.diff(offsets) < 0).any()
    ):
        raise InputError("offsets", f"are {offsets[:1]} to {offsets[-1:]}", f"0 to {len(routes)}, rising")
    for start, stop in pairwise(offsets):
        yield routes[start:stop]


def _load(path: Path) -> dict[str, NDArray[Any]]:
    data = io.BytesIO(_read(path))
    try:
        with np.load(data, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # numpy, zipfile and zlib have a dozen kinds for damaged bytes
        raise InputError(str(path), f"cannot be read ({error})", "an .npz file without pickled objects") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error})", "a file of routes") from error


__all__ = ["EXPORTS", "IMPORTS", "export_records", "import_records"]
