"""Snapshot: what one worker process has added up so far, as it passes from the worker to whoever answers ``/metrics``.

Decides the bytes: two lines of JSON, what stays and what changes, then the totals of every layer as little-endian
int64. Workers write snapshots into one folder, a file a rank that is replaced as a whole; readers need nothing else, so
that an engine's own metrics keep the mode they are in. Knows neither engines nor names of metrics.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.durable import write_atomically
from megaflux_serve.errors import InputError
from megaflux_serve.executors import DeviceExecutor, Executor
from megaflux_serve.planning.totals import totals_map

LOGGER = logging.getLogger("megaflux")
FOLDER_VARIABLE = "MEGAFLUX_METRICS_DIR"
"""Environment variable that names the folder; the engine's front end sets it for its workers."""
SUFFIX = ".snapshot"
VERSION = 1


@dataclass(frozen=True)
class Worker:
    """Who reports.

    Attributes:
        engine: ``vllm`` or ``sglang``.
        engine_version: its release.
        model: the name that the model is served as.
        rank: expert-parallel rank; the first one where a process holds several.
        num_ranks: P.
        executor: ``reference``, ``staged`` or ``megakernel``.
        sticky, gate: whether replicas stay from batch to batch, whether a gate is set.
    """

    engine: str
    engine_version: str
    model: str
    rank: int
    num_ranks: int
    executor: str
    sticky: bool
    gate: bool

    @classmethod
    def of(
        cls,
        engine: str,
        engine_version: str,
        model: str,
        rank: int,
        executor: Executor | DeviceExecutor,
        options: MegaFluxConfig,
    ) -> Worker:
        """The worker that an executor and its options make; see the attributes."""
        switches = options.sticky, options.gate_costs is not None
        return cls(engine, engine_version, model, rank, executor.num_ranks, executor.kind, *switches)


@dataclass(frozen=True)
class LayerInfo:
    """What a layer's totals are totals of.

    Attributes:
        name: in the model.
        home_rank: the rank that owns each expert, [E].
        num_replica_slots: s.
        top_k: k.
        expert_bytes: weights of one expert.
    """

    name: str
    home_rank: tuple[int, ...]
    num_replica_slots: int
    top_k: int
    expert_bytes: int


@dataclass(frozen=True)
class Snapshot:
    """One worker at one moment.

    Attributes:
        worker: who reports.
        layers: its layers, in the model's order.
        totals: int64 [``totals_map(P, E).num_words``] a layer.
        memory: bytes by use, see ``catalogue.MEMORY_USES``.
        timeouts: what was waited for when a wait for another rank failed.
        time: Unix time, seconds.
    """

    worker: Worker
    layers: tuple[LayerInfo, ...]
    totals: Sequence[NDArray[np.int64]]
    memory: dict[str, int]
    timeouts: Sequence[str]
    time: float

    def encode(self) -> bytes:
        """The snapshot as bytes."""
        changing = {"memory": self.memory, "timeouts": list(self.timeouts), "time": self.time}
        words = [totals.astype("<i8", copy=False).tobytes() for totals in self.totals]
        return b"".join([_lasting(self.worker, self.layers), json.dumps(changing).encode(), b"\n", *words])

    @classmethod
    def decode(cls, data: bytes, source: str) -> Snapshot:
        """What ``encode`` wrote.

        Args:
            data: the bytes.
            source: where they come from, for the message.

        Raises:
            InputError: they are of another version, or no snapshot.
        """
        try:
            first, second, words = data.split(b"\n", 2)
            version, worker, layers = _read_lasting(first)
            if version != VERSION:
                raise InputError(source, f"has version {version}", f"version {VERSION}")
            changing: dict[str, Any] = json.loads(second)
            sizes = [totals_map(worker.num_ranks, len(layer.home_rank)).num_words for layer in layers]
            totals = np.frombuffer(words, dtype="<i8")
            if totals.size != sum(sizes):
                raise InputError(source, f"holds {totals.size} words", f"{sum(sizes)}")
            parts = np.split(totals, np.cumsum(sizes))[: len(layers)]
            return cls(worker, layers, parts, changing["memory"], changing["timeouts"], changing["time"])
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(source, f"is no snapshot ({error})", "what a worker wrote") from error

    def write(self, folder: Path) -> None:
        """Replace this rank's file in the folder."""
        write_atomically(folder / f"rank-{self.worker.rank}{SUFFIX}", self.encode())


@lru_cache(maxsize=1)
def _lasting(worker: Worker, layers: tuple[LayerInfo, ...]) -> bytes:
    """The first line, which is some ten thousand numbers: made once, so that a worker is not held up every second."""
    return (
        json.dumps({"version": VERSION, "worker": asdict(worker), "layers": list(map(asdict, layers))}).encode() + b"\n"
    )


@lru_cache(maxsize=128)
def _read_lasting(line: bytes) -> tuple[int, Worker, tuple[LayerInfo, ...]]:
    """Version, worker and layers of a first line; read once a worker, so that answers are not held up either."""
    head = json.loads(line)
    layers = tuple(LayerInfo(**layer | {"home_rank": tuple(layer["home_rank"])}) for layer in head["layers"])
    return head["version"], Worker(**head["worker"]), layers


def name_folder() -> Path:
    """The folder that ``FOLDER_VARIABLE`` names, made if need be; by default in memory, and removed by this process."""
    if FOLDER_VARIABLE not in os.environ:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # no disk is worth writing to every second
        folder, owner = tempfile.mkdtemp(prefix="megaflux-metrics-", dir=memory), os.getpid()

        def remove() -> None:
            if os.getpid() == owner:  # a forked child ends earlier
                shutil.rmtree(folder, ignore_errors=True)

        atexit.register(remove)
        os.environ[FOLDER_VARIABLE] = folder
    named = Path(os.environ[FOLDER_VARIABLE])
    named.mkdir(parents=True, exist_ok=True)
    return named


def read_snapshots(folder: Path) -> list[Snapshot]:
    """The snapshots in a folder, by rank; a file that cannot be read is named in the log and left out."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if path.name.startswith("."):  # not written whole yet
            continue
        try:
            found.append(Snapshot.decode(path.read_bytes(), str(path)))
        except (InputError, OSError) as error:
            LOGGER.error("metrics of a worker cannot be read: %s", error)
    return sorted(found, key=lambda snapshot: snapshot.worker.rank)


__all__ = ["FOLDER_VARIABLE", "LayerInfo", "Snapshot", "Worker", "name_folder", "read_snapshots"]
