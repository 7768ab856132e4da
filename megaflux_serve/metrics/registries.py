"""Where a server's layers are shown: in every answer of this process about the server's processes.

Decides what prometheus-client is taught. It answers from its default registry or, in multiprocess mode, from
registries that servers make anew, some of them for every answer, and that have one thing in common: a
``MultiProcessCollector``. So the default registry gets a collector of ours, and that class collects our series too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from megaflux_serve.metrics.exporter import LayerCollector
from megaflux_serve.metrics.snapshot import FOLDER_VARIABLE


def show_layers() -> None:
    """From now on, show the layers of the workers that write into the folder of the environment, if it names one."""
    if is_shown():
        return
    collect = MultiProcessCollector.collect

    @functools.wraps(collect)
    def collect_with_layers(self: MultiProcessCollector) -> Iterator[Family]:
        yield from collect(self)  # type: ignore[no-untyped-call]
        yield from layer_families()

    collect_with_layers.shows_megaflux_layers = True  # type: ignore[attr-defined]
    MultiProcessCollector.collect = collect_with_layers  # type: ignore[method-assign]
    REGISTRY.register(_Layers())


def is_shown() -> bool:
    """Whether ``show_layers`` has been called."""
    return hasattr(MultiProcessCollector.collect, "shows_megaflux_layers")


def layer_families() -> Iterator[Family]:
    """The families of the folder's workers; none where no folder is named."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        yield from _collector(folder).collect()


class _Layers(Collector):
    """``layer_families`` as a collector, whether or not a folder is named already."""

    def describe(self) -> Iterable[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        return layer_families()


@functools.cache
def _collector(folder: str) -> LayerCollector:
    return LayerCollector(Path(folder))


__all__ = ["is_shown", "layer_families", "show_layers"]
