"""From an engine's finished requests to records of one store: what an engine plugin calls.

Decides what an engine's routes are made into and what becomes of those that cannot be right: the request is logged as
an error with its id, and not stored; serving goes on, and sealing a window by ids names what is missing. Knows
no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.capture.record import ModelShape, ReplayRecord
from megaflux_serve.capture.store import ReplayStore, StoreWriter
from megaflux_serve.errors import ConfigError, InputError

LABELS = ("group", "task", "weights_version")
"""Labels that a request may bring, each under its name with ``megaflux_`` before it."""


@dataclass(frozen=True, eq=False)
class FinishedRequest:
    """A request that came to its end, as an engine knows it.

    Attributes:
        id: unique within the store.
        prompt_tokens, output_tokens: their sum is n.
        routes: integers [n - 1 - skipped, layers, k] for all layers of the model, dense ones 0; None where there are
            none.
        skipped: first rows that the engine was asked to leave out; they become rows without routes.
        token_ids: integers [n], or None where the prompt had none.
        labels: ``group``, ``task`` and ``weights_version``, each optional.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    routes: NDArray[Any] | None
    skipped: int = 0
    token_ids: Sequence[int] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


class Observer(Protocol):
    """Who is told what became of requests, such as ``metrics.events.CaptureEvents``."""

    def stored(self, tokens: int, num_bytes: int) -> None:
        """A record of so many tokens and bytes is in the store."""

    def dropped(self, reason: str) -> None:
        """A request is not stored: ``refused``, what it brought cannot be right, or ``storage``, the disk failed."""


class Recorder:
    """Appends the finished requests of one engine process to one store.

    ::

        recorder = Recorder(Path("replay"), 128, 48, "vllm", "0.26.0", logging.getLogger("vllm.megaflux"))
        recorder.record(FinishedRequest(id, 17, 240, routes, token_ids=tokens))

    Attributes:
        observer: told of every request, or None.
    """

    def __init__(
        self, folder: Path, num_experts: int, num_layers: int, engine: str, engine_version: str, logger: logging.Logger
    ) -> None:
        """Nothing is written before the first request: its routes show which layers are MoE."""
        self.folder, self.num_experts, self.num_layers = folder, num_experts, num_layers
        self.engine, self.engine_version, self.logger = engine, engine_version, logger
        self.observer: Observer | None = None
        self._writer: StoreWriter | None = None

    def record(self, request: FinishedRequest) -> None:
        """Append the record of a request; when this returns, it is in the store or logged as an error."""
        try:
            num_bytes = self._append(request)
        except (InputError, ConfigError, OSError) as error:
            self.logger.error("routes of request %s are not recorded: %s", request.id, error)
            if self.observer is not None:
                self.observer.dropped("storage" if isinstance(error, OSError) else "refused")
            return
        if self.observer is not None:
            self.observer.stored(request.prompt_tokens + request.output_tokens, num_bytes)

    def _append(self, request: FinishedRequest) -> int:
        """Bytes of the request's record."""
        if request.routes is None:
            raise InputError(f"request {request.id}", "finished without routes", f"routes from {self.engine}")
        routes = request.routes
        if request.skipped:
            filler = np.full((request.skipped, *routes.shape[1:]), -1, dtype=np.int32)
            routes = np.concatenate([filler, routes])
        if self._writer is None:
            shape = shape_of(request.routes, self.num_experts, self.num_layers)
            self._writer = ReplayStore.create(self.folder, shape).writer()
        record = ReplayRecord.of(
            request.id,
            routes,
            self._writer.store.model,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            token_ids=request.token_ids,
            engine=self.engine,
            engine_version=self.engine_version,
            **request.labels,
        )
        return self._writer.append(record)


def shape_of(routes: NDArray[Any], num_experts: int, num_layers: int) -> ModelShape:
    """The model's shape from the first routes: engines leave the entries of dense layers 0 in every row.

    Args:
        routes: integers [rows, num_layers, k].
        num_experts: logical experts of a layer.
        num_layers: layers of the model.

    Raises:
        InputError: routes of another shape, no layer that has routes, or k is 1, where a dense layer looks like one
            that selects expert 0.
    """
    if routes.ndim != 3 or routes.shape[1] != num_layers:
        raise InputError("routed experts", f"are {list(routes.shape)}", f"[rows, {num_layers} layers, k]")
    moe_layers = tuple(np.flatnonzero(routes.any(axis=(0, 2))).tolist())
    if not moe_layers:
        raise InputError("routed experts", "are 0 in every layer", "routes; the engine captured none on this backend")
    if routes.shape[2] == 1:
        raise InputError("routed experts", "have one expert a token", "2 or more: else a dense layer looks like one")
    return ModelShape(num_experts, routes.shape[2], num_layers, moe_layers)


def labels_of(params: Mapping[str, Any] | None) -> dict[str, str]:
    """The labels among the free parameters that a client sent with a request."""
    given = params or {}
    return {name: str(given[f"megaflux_{name}"]) for name in LABELS if f"megaflux_{name}" in given}


__all__ = ["FinishedRequest", "Observer", "Recorder", "labels_of", "shape_of"]
