"""Routes in the forms that training frameworks take, and back: verl, slime, miles, Megatron-core, engine responses.

Decides shapes, dtypes and places; docs/capture.md has the table. Knows no store. A row without routes is refused in
every form, since each framework would send its token somewhere; where a form has one, the import keeps it as such.

A route array has an entry for every layer of the model, dense ones included, except Megatron's, which has one for each
router. A request of n tokens has n - 1 rows.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from tokenize import TokenError
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.capture.record import ModelShape, ReplayRecord
from megaflux_serve.errors import InputError

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
NPY_MAGIC = b"\x93NUMPY"
STAGE, BLOCK = "pre_dispatch", "decoder"
"""What Megatron's trace calls the router of an ordinary layer; multi-token prediction layers are another block."""


def to_rollout(record: ReplayRecord, framework: str) -> Int32Array:
    """``rollout_routed_experts`` of a sample of ``framework``, slime or miles: int32 [n - 1, layers, k].

    Raises:
        InputError: a row has no routes. slime would take any filler for routes, and miles sends the -1 with which it
            pads to experts 0 to k - 1.
    """
    _check_every_row(record, framework)
    return record.expert_ids(np.int32, all_layers=True)


def to_verl(
    records: Sequence[ReplayRecord], prompt_length: int | None = None, response_length: int | None = None
) -> dict[str, NDArray[Any]]:
    """The part of a verl batch that R3 replays: prompts padded on the left, responses on the right.

    Args:
        records: N records.
        prompt_length, response_length: padded lengths P and R; default: the longest of each.

    Returns:
        ``routed_experts`` int16 [N, P + R, layers, k], with verl's filler 0 in padding and at the last token of a
        request; ``attention_mask`` int64 [N, P + R], 1 for each token; ``routes_mask`` bool [N, P + R], True where
        ``routed_experts`` holds routes.

    Raises:
        InputError: no records, a record longer than the padded lengths, expert ids beyond int16, or a row without
            routes: verl reads no mask of ours and replays every row but the last, so it would send 0 to expert 0.
    """
    if not records:
        raise InputError("records", "there are none", "at least one record")
    model = records[0].model
    if model.num_experts > np.iinfo(np.int16).max + 1:
        raise InputError("num_experts", f"is {model.num_experts}", "at most 32768: verl keeps ids in int16")
    prompt = max(record.prompt_tokens for record in records) if prompt_length is None else prompt_length
    response = max(record.output_tokens for record in records) if response_length is None else response_length
    routes = np.zeros((len(records), prompt + response, model.num_layers, model.top_k), dtype=np.int16)
    attention, mask = np.zeros(routes.shape[:2], dtype=np.int64), np.zeros(routes.shape[:2], dtype=np.bool_)
    for i, record in enumerate(records):
        if record.prompt_tokens > prompt or record.output_tokens > response:
            lengths = f"{record.prompt_tokens} and {record.output_tokens} tokens"
            raise InputError(
                f"record {record.id!r}", f"has {lengths}", f"{prompt} of prompt and {response} of response"
            )
        _check_every_row(record, "verl")
        first = prompt - record.prompt_tokens
        rows = slice(first, first + len(record.routes))
        attention[i, first : first + record.num_tokens] = 1
        routes[i, rows] = record.expert_ids(np.int16, all_layers=True)
        mask[i, rows] = True
    return {"routed_experts": routes, "attention_mask": attention, "routes_mask": mask}


def from_verl(batch: Mapping[str, NDArray[Any]]) -> Iterator[Int64Array]:
    """Routes [n - 1, layers, k] of each row of a verl batch, -1 where it holds none.

    Args:
        batch: as ``to_verl`` returns, or verl's own, which has no ``routes_mask``. There a row of zeros in every layer
            is verl's filler, as behind the last turn of a conversation; only with k = 1 it is read as routes.

    Raises:
        InputError: an array is missing or of another type, shapes differ, or a row's tokens are not one piece.
    """
    missing = {"routed_experts", "attention_mask"} - batch.keys()
    if missing:
        raise InputError("verl batch", f"lacks {sorted(missing)}", "routed_experts and attention_mask")
    routes, attention = batch["routed_experts"], batch["attention_mask"]
    if routes.ndim != 4 or routes.dtype.kind not in "iu":
        raise InputError("routed_experts", f"is {routes.dtype} {list(routes.shape)}", "integers [N, S, layers, k]")
    for name in sorted({"attention_mask", "routes_mask"} & batch.keys()):
        mask = batch[name]
        if mask.shape != routes.shape[:2] or mask.dtype.kind not in "biu":
            allowed = f"integers or bool {list(routes.shape[:2])}, as routed_experts"
            raise InputError(name, f"is {mask.dtype} {list(mask.shape)}", allowed)
    for i, tokens in enumerate(attention):
        places = np.flatnonzero(tokens)
        if not places.size or places[-1] - places[0] + 1 != places.size:
            raise InputError("attention_mask", f"row {i} is not one piece", "one run of tokens a row")
        rows = places[:-1]
        found = routes[i, rows].astype(np.int64)
        if "routes_mask" in batch:
            found[batch["routes_mask"][i, rows] == 0] = -1
        elif routes.shape[3] > 1:
            found[~found.any(axis=(1, 2))] = -1
        yield found


def verl_prompt_tokens(batch: Mapping[str, NDArray[Any]]) -> Int64Array:
    """Prompt length int64 [N] of each row of verl's own batch: the tokens below its ``prompts`` [N, P], padded left.

    Raises:
        InputError: ``prompts`` and ``attention_mask`` do not fit.
    """
    shape, attention = batch["prompts"].shape, batch["attention_mask"]
    if len(shape) != 2 or shape[0] != len(attention) or not 0 < shape[1] <= attention.shape[1]:
        raise InputError("prompts", f"is {list(shape)}", f"[N, P] of an attention_mask {list(attention.shape)}")
    tokens = attention[:, : shape[1]] != 0
    if not tokens[:, -1].all():
        row, column = int(tokens[:, -1].argmin()), shape[1] - 1
        raise InputError("attention_mask", f"row {row} has no token in column {column}", "prompts padded on the left")
    lengths: Int64Array = np.count_nonzero(tokens, axis=1)
    return lengths


def to_router_replay(records: Sequence[ReplayRecord]) -> list[Int64Array]:
    """What Megatron-core's ``RouterReplay.set_replay_data`` takes: L times int64 [tokens, k], record after record.

    Training forwards all n tokens of a request, so its last one gets a row too: the routes of the token before it,
    which load no expert that its text does not load. The loss does not see the last token's output.

    Raises:
        InputError: no records, a record of one token, or a row without routes.
    """
    if not records:
        raise InputError("records", "there are none", "at least one record")
    parts = []
    for record in records:
        _check_every_row(record, "RouterReplay")
        if not len(record.routes):
            raise InputError(f"record {record.id!r}", "has one token and so no routes", "two tokens or more")
        parts.append(np.concatenate([record.routes, record.routes[-1:]]).astype(np.int64))
    packed = np.concatenate(parts)
    return [np.ascontiguousarray(packed[:, layer]) for layer in range(packed.shape[1])]


def write_router_trace(records: Iterable[ReplayRecord], file: TextIO) -> int:
    """Megatron-core's ``router_trace`` JSONL: a step is a record, a line one layer of it. Returns the lines written.

    Raises:
        InputError: a row has no routes; readers of traces would count -1 as an expert.
    """
    num_lines = 0
    for step, record in enumerate(records):
        _check_every_row(record, "a router trace")
        ids = record.expert_ids(np.int32)
        for place, layer in enumerate(record.model.moe_layers):
            line = {
                "step": step,
                "stage": STAGE,
                "block": BLOCK,
                "layer": layer,
                "rank": 0,
                "num_tokens": len(ids),
                "topk": record.model.top_k,
                "top_indices": ids[:, place].tolist(),
            }
            file.write(json.dumps(line) + "\n")
            num_lines += 1
    return num_lines


def read_router_trace(file: Iterable[str], model: ModelShape) -> Iterator[tuple[int, Int64Array]]:
    """Steps of a ``router_trace`` JSONL of one rank, as pairs of step and routes [tokens, L, k].

    Megatron numbers layers from 0 where it traces training, and from 1 where it traces inference; a step may have
    either. Lines of multi-token prediction layers, which are no layers of the model, are passed over.

    Raises:
        InputError: naming the line: no JSON object, a layer twice or of another shape, or a step without a layer.
    """
    known = {layer + first for layer in model.moe_layers for first in (0, 1)}
    step, layers = None, {}
    for number, text in enumerate(file, 1):
        try:
            found, block, layer, ids = _trace_line(text)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"line {number}", f"cannot be read ({error})", "a line of a router trace") from error
        if block != BLOCK:
            continue
        if step is not None and found != step:
            yield step, _stack(layers, model, step)
            layers = {}
        if layer in layers or layer not in known:
            raise InputError(
                f"line {number}", f"layer {layer} again or unknown", f"one line for each of {model.moe_layers}"
            )
        step, layers[layer] = found, ids
    if step is not None:
        yield step, _stack(layers, model, step)


def decode_response(payload: str | bytes, model: ModelShape) -> NDArray[Any]:
    """The routes in a response of an engine: integers [rows, layers, k].

    Args:
        payload: base64 of an ``.npy`` file (vLLM's ``routed_experts``), base64 of int32 values for all layers
            (SGLang's ``meta_info["routed_experts"]``), or the bytes of an ``.npy`` file.
        model: shape that SGLang's values are read with.

    Raises:
        InputError: it is none of these.
    """
    try:
        data = (
            payload
            if isinstance(payload, bytes) and payload.startswith(NPY_MAGIC)
            else base64.b64decode(payload, validate=True)
        )
        if data.startswith(NPY_MAGIC):
            return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))
        return np.frombuffer(data, dtype="<i4").reshape(-1, model.num_layers, model.top_k)
    except (binascii.Error, ValueError, EOFError, TokenError) as error:
        raise InputError(
            "response", f"cannot be decoded ({error})", "base64 of .npy or int32 routes, or .npy"
        ) from error


def _check_every_row(record: ReplayRecord, form: str) -> None:
    """Refuse a record with a row without routes."""
    if not record.valid.all():
        row = int((~record.valid).argmax())
        raise InputError(f"record {record.id!r}", f"row {row} has no routes", f"routes in every row, for {form}")


def _trace_line(text: str) -> tuple[int, str, int, Int64Array]:
    """Step, block, layer and routes [tokens, k] of a line of a trace."""
    line = json.loads(text)
    for name in ("step", "layer", "num_tokens", "topk"):
        if type(line[name]) is not int:
            raise ValueError(f"{name} is {line[name]!r}, no integer")
    shape, rows = (line["num_tokens"], line["topk"]), line["top_indices"]
    ids = np.empty(shape, dtype=np.int64) if shape[0] == 0 and rows == [] else np.asarray(rows)
    if ids.shape != shape or ids.dtype != np.int64:
        raise ValueError(f"top_indices are {ids.dtype} {list(ids.shape)}, no integers {list(shape)}")
    return line["step"], line["block"], line["layer"], ids


def _stack(layers: Mapping[int, Int64Array], model: ModelShape, step: int) -> Int64Array:
    shapes, found = {ids.shape for ids in layers.values()}, sorted(layers)
    numberings = [list(model.moe_layers), [layer + 1 for layer in model.moe_layers]]
    if found not in numberings or len(shapes) != 1:
        raise InputError(
            f"step {step}",
            f"has layers {found} of shapes {sorted(shapes)}",
            f"equal shapes for {model.moe_layers}",
        )
    return np.stack([layers[layer] for layer in found], axis=1)


__all__ = [
    "decode_response",
    "from_verl",
    "read_router_trace",
    "to_rollout",
    "to_router_replay",
    "to_verl",
    "verl_prompt_tokens",
    "write_router_trace",
]
