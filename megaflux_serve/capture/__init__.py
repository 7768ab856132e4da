"""Rollout capture: the routes of finished requests, in a store that RL training can trust.

::

    store = ReplayStore.create(Path("replay"), ModelShape(num_experts=128, top_k=8, num_layers=24))
    with store.writer() as writer:  # one a process; a kill loses at most the record being written
        writer.append(ReplayRecord.of(id, routes, store.model, prompt_tokens=17, output_tokens=240))
    window = seal(store, "step-12")  # atomic; the demand was counted as the records finished
    demand = Demand.of(window.counts, window.lengths)  # what RoutePack plans from
    for record in window: ...  # streams

``record`` says what a valid record is, ``frame`` its bytes, ``store`` files and crashes, ``sealing`` and ``window`` the
windows, ``exchange`` and ``files`` the forms of training frameworks, ``profile`` and ``picture`` the figures.
docs/replay-format.md specifies the bytes.
"""

from megaflux_serve.capture.frame import Damage, Entry
from megaflux_serve.capture.record import ModelShape, ReplayRecord
from megaflux_serve.capture.sealing import seal
from megaflux_serve.capture.store import ReplayStore, StoreWriter
from megaflux_serve.capture.window import (
    SealedWindow,
    WindowRecord,
    open_window,
    window_demand,
    window_names,
)

__all__ = [
    "Damage",
    "Entry",
    "ModelShape",
    "ReplayRecord",
    "ReplayStore",
    "SealedWindow",
    "StoreWriter",
    "WindowRecord",
    "open_window",
    "seal",
    "window_demand",
    "window_names",
]
