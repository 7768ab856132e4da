"""The replay record: the routes of one finished request, checked row by row and counted once.

Decides what a record holds and what makes it valid; knows neither files nor engines. Every silent fault of routing
replay that the data itself can show is an error here: rows missing or left over, filler that looks like routes to
expert 0, an expert selected twice, ids out of range, layers that the model does not have.
"""

from __future__ import annotations

import operator
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaflux_serve.errors import ConfigError, InputError

IdArray = NDArray[np.uint8] | NDArray[np.uint16]
Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]

MAX_EXPERTS = 2**16
MAX_TEXT = 512
"""Longest label of a record, in UTF-8 bytes."""


@dataclass(frozen=True)
class ModelShape:
    """What routes of a model look like; one store holds routes of one shape.

    Attributes:
        num_experts: logical experts E of a layer, 1 to 65536.
        top_k: experts k that a token selects in every MoE layer, 1 to E.
        num_layers: transformer layers of the model, dense ones included.
        moe_layers: absolute indices of the L MoE layers, from 0, ascending; default: every layer.
    """

    num_experts: int
    top_k: int
    num_layers: int
    moe_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ConfigError("num_experts", self.num_experts, f"1 to {MAX_EXPERTS}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError("top_k", self.top_k, f"1 to the {self.num_experts} experts")
        if self.num_layers < 1:
            raise ConfigError("num_layers", self.num_layers, "1 or more")
        layers = tuple(int(layer) for layer in self.moe_layers) or tuple(range(self.num_layers))
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers:
            raise ConfigError("moe_layers", list(layers), f"ascending layer indices, 0 to {self.num_layers - 1}")
        object.__setattr__(self, "moe_layers", layers)

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """The narrowest unsigned integer that holds an expert id: uint8 or uint16, little-endian."""
        return np.dtype("<u1" if self.num_experts <= 256 else "<u2")

    @property
    def layer_index(self) -> slice | list[int]:
        """The MoE layers as an index of all layers: a slice where they are evenly spaced, which copies nothing."""
        layers = self.moe_layers
        step = layers[1] - layers[0] if len(layers) > 1 else 1
        evenly = range(layers[0], layers[-1] + 1, step)
        return slice(evenly.start, evenly.stop, step) if tuple(evenly) == layers else list(layers)

    @property
    def row_shape(self) -> tuple[int, int]:
        """(L, k)."""
        return len(self.moe_layers), self.top_k


@dataclass(frozen=True, eq=False)
class ReplayRecord:
    """One finished request or trajectory. Build it with ``of``, which checks everything.

    A request of n tokens has n - 1 rows: row j holds the routes of token j, and the last token was sampled but never
    forwarded.

    Attributes:
        id: unique within a store, 1 to 512 bytes of UTF-8.
        model: shape of the routes.
        prompt_tokens: 1 or more.
        output_tokens: 0 or more.
        routes: uint8 or uint16 [n - 1, L, k], logical expert ids in the router's order; rows that are not valid are 0.
        valid: bool [n - 1]; False where the engine gave no routes.
        token_ids: int32 [n], or None.
        group: prompt group, such as the prompt whose rollouts are compared; may be empty.
        task: label of the task family; may be empty.
        weights_version: the weights that the request finished with.
        engine, engine_version: who computed the routes.
    """

    id: str
    model: ModelShape
    prompt_tokens: int
    output_tokens: int
    routes: IdArray
    valid: BoolArray
    token_ids: Int32Array | None = None
    group: str = ""
    task: str = ""
    weights_version: str = ""
    engine: str = ""
    engine_version: str = ""

    @classmethod
    def of(
        cls,
        id: str,
        routes: NDArray[Any],
        model: ModelShape,
        *,
        prompt_tokens: int,
        output_tokens: int,
        token_ids: ArrayLike | None = None,
        **labels: str,
    ) -> ReplayRecord:
        """Check and narrow the routes of a request.

        Args:
            id: unique within the store.
            routes: integers [n - 1, layers, k], where layers is the L MoE layers or all layers of the model, of which
                the dense ones are left out. A row of -1 everywhere has no routes.
            model: shape of the routes.
            prompt_tokens: 1 or more.
            output_tokens: 0 or more; n is the sum of both.
            token_ids: integers [n].
            labels: ``group``, ``task``, ``weights_version``, ``engine``, ``engine_version``.

        Raises:
            InputError: naming the record and the first offending row, layer or field.
        """
        name = f"record {id!r}"
        for field, text in {"id": id, **labels}.items():
            _check_text(field, text, name)
        prompt_tokens, output_tokens = _lengths(prompt_tokens, output_tokens, name)
        num_rows = prompt_tokens + output_tokens - 1
        ids = _moe_layers(np.asarray(routes), model, name)
        if len(ids) != num_rows:
            raise InputError(
                name,
                f"has {len(ids)} rows of routes",
                f"{num_rows}: one for each of its {num_rows + 1} tokens but the last, which is never forwarded",
            )
        valid = _valid_rows(ids, model, name)
        narrow = np.array(ids, dtype=model.id_dtype, order="C")
        narrow[~valid] = 0
        tokens = None if token_ids is None else _token_ids(token_ids, num_rows + 1, name)
        record = cls(id, model, prompt_tokens, output_tokens, narrow, valid, tokens, **labels)
        _ = record.counts  # finds an expert selected twice
        return record

    @property
    def num_tokens(self) -> int:
        """n, prompt and output."""
        return self.prompt_tokens + self.output_tokens

    @property
    def num_valid(self) -> int:
        """Rows that hold routes."""
        return int(self.valid.sum())

    @cached_property
    def counts(self) -> Int32Array:
        """int32 [L, E]: A of RoutePack's section 2.1, valid rows that selected each expert of each MoE layer.

        Raises:
            InputError: a row that selects an expert twice, as filler of zeros does.
        """
        from megaflux_serve.capture.tally import tally  # loads a compiler, which processes that only read do without

        counts = np.zeros((self.routes.shape[1], self.model.num_experts), dtype=np.int32)
        fault = tally(self.routes, self.valid, counts)
        if fault >= 0:
            row, layer = divmod(fault, self.routes.shape[1])
            raise InputError(
                f"record {self.id!r}",
                f"row {row}, layer {self.model.moe_layers[layer]} is {self.routes[row, layer].tolist()}",
                "distinct experts; rows without routes hold -1",
            )
        return counts

    @property
    def sections(self) -> dict[str, Any]:
        """``routes``, ``valid`` and ``token_ids`` as arrays to be stored, contiguous; no token ids, no elements."""
        tokens = np.empty(0, dtype="<i4") if self.token_ids is None else self.token_ids
        return {
            "routes": self.routes,
            "valid": np.packbits(self.valid),
            "token_ids": tokens.astype("<i4", copy=False),
        }

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the sections, one after the other: equal for equal content, whoever wrote or read it."""
        crc = 0
        for array in self.sections.values():
            crc = zlib.crc32(array, crc)
        return crc

    def expert_ids(self, dtype: Any = np.int32, *, all_layers: bool = False, filler: int = -1) -> NDArray[Any]:
        """A copy of the routes in another integer type, [n - 1, layers, k].

        Args:
            dtype: wide enough for every id, and signed where the filler is -1.
            all_layers: keep an entry for every layer of the model; dense ones hold 0, as engines give them.
            filler: stands in rows without routes, in every layer.

        Raises:
            ConfigError: ids or filler do not fit the dtype.
        """
        limits = np.iinfo(dtype)
        if self.model.num_experts - 1 > limits.max or not limits.min <= filler <= limits.max:
            raise ConfigError(
                "dtype", np.dtype(dtype).name, f"one that holds 0 to {self.model.num_experts - 1}, {filler}"
            )
        num_layers = self.model.num_layers if all_layers else self.routes.shape[1]
        layers = self.model.layer_index if all_layers else slice(None)
        out = np.zeros((len(self.routes), num_layers, self.model.top_k), dtype=dtype)
        out[:, layers] = self.routes
        out[~self.valid] = filler
        return out


def _check_text(field: str, text: str, name: str) -> None:
    if not isinstance(text, str):
        raise InputError(name, f"{field} is {text!r}", "a text")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InputError(name, f"{field} is {text!r}, which UTF-8 cannot hold", "Unicode text") from error
    if num_bytes > MAX_TEXT or (field == "id" and not text):
        raise InputError(name, f"{field} has {num_bytes} bytes", f"{int(field == 'id')} to {MAX_TEXT}")


def _lengths(prompt_tokens: int, output_tokens: int, name: str) -> tuple[int, int]:
    """Prompt and output tokens as Python's integers, whatever integers they were."""
    try:
        lengths = operator.index(prompt_tokens), operator.index(output_tokens)
    except TypeError as error:
        raise InputError(name, f"{prompt_tokens!r} prompt and {output_tokens!r} output tokens", "integers") from error
    if lengths[0] < 1 or lengths[1] < 0:
        raise InputError(name, f"{lengths[0]} prompt and {lengths[1]} output tokens", "at least 1 and 0")
    return lengths


def _moe_layers(routes: NDArray[Any], model: ModelShape, name: str) -> NDArray[Any]:
    """Integers [rows, L, k], without dense layers."""
    num_layers, top_k = model.row_shape
    if routes.ndim != 3 or routes.dtype.kind not in "iu" or routes.shape[2] != top_k:
        raise InputError(name, f"routes are {routes.dtype} {list(routes.shape)}", f"integers [rows, layers, {top_k}]")
    if routes.shape[1] == num_layers:
        return routes
    if routes.shape[1] == model.num_layers:
        return routes[:, model.layer_index]
    raise InputError(
        name,
        f"routes have {routes.shape[1]} layers",
        f"the {num_layers} MoE layers or all {model.num_layers} layers",
    )


def _valid_rows(ids: NDArray[Any], model: ModelShape, name: str) -> BoolArray:
    """bool [rows]: which rows hold ids; the others hold -1 everywhere."""
    if ids.size and ids.max() >= model.num_experts:
        row, layer, _ = np.argwhere(ids >= model.num_experts)[0]
        raise InputError(
            name,
            f"row {row}, layer {model.moe_layers[layer]} is {ids[row, layer].tolist()}",
            f"experts 0 to {model.num_experts - 1}",
        )
    if ids.dtype.kind == "u" or not ids.size or ids.min() >= 0:
        return np.ones(len(ids), dtype=np.bool_)
    negative = ids < 0
    valid = np.asarray(~negative.any(axis=(1, 2)))
    mixed = ~valid & (ids != -1).any(axis=(1, 2))
    if mixed.any():
        raise InputError(name, f"row {int(mixed.argmax())} holds ids and negative numbers", "ids, or -1 everywhere")
    return valid


def _token_ids(token_ids: ArrayLike, num_tokens: int, name: str) -> Int32Array:
    tokens = np.asarray(token_ids)
    if tokens.shape != (num_tokens,) or tokens.dtype.kind not in "iu":
        raise InputError(name, f"token ids are {tokens.dtype} {list(tokens.shape)}", f"integers [{num_tokens}]")
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
        raise InputError(name, f"token ids go from {tokens.min()} to {tokens.max()}", "0 to 2**31 - 1")
    return np.ascontiguousarray(tokens, dtype=np.int32)
