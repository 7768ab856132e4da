"""Result rows and the files that hold them.

Decides the form of a committed result: a JSON list of rows with exactly the keys of ``KEYS``. Knows no benchmark.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaflux_serve.durable import write_atomically

RESULTS = Path(__file__).resolve().parents[1] / "results"
"""Folder of the committed results, ``benchmarks/results``."""

Plain = str | int | float | bool
"""What a case may hold under a key."""

KEYS = ("bench", "case", "metric", "value", "unit", "baseline", "device", "software", "commit", "date")


@dataclass(frozen=True)
class ResultRow:
    """One measured value.

    Attributes:
        bench: benchmark, the stem of its file.
        case: plain keys that say what was measured (shape, tokens_per_rank, routing, ranks, variant, emulated ...).
        metric: what was measured, with its unit as suffix where it has one (``plan_us``).
        value: the number; finite.
        unit: its unit (``us``, ``%``, ``TFLOP/s``, ``1`` for a ratio or a count).
        baseline: the peer of the same run as ``{"name": ..., "value": ...}`` in the same unit, or None.
    """

    bench: str
    case: Mapping[str, Plain]
    metric: str
    value: float
    unit: str
    baseline: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.bench}/{self.metric} {dict(self.case)}: value {self.value} is not finite")


@dataclass(frozen=True)
class RunContext:
    """Where and when the rows of one run were measured.

    Attributes:
        device: the processor in words, such as ``cpu_name()`` or ``torch.cuda.get_device_name()``.
        software: versions by package name.
        commit: the checked-out commit, with ``-dirty`` appended when tracked files differ from it.
        date: UTC, ISO 8601, seconds.
    """

    device: str
    software: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""

    @classmethod
    def current(cls, device: str, *packages: str) -> RunContext:
        """The context of this process; ``packages`` are distribution names whose versions matter here."""
        software = {"python": platform.python_version(), **{name: version(name) for name in packages}}
        return cls(device, software, _commit(), datetime.now(timezone.utc).isoformat(timespec="seconds"))


def _commit() -> str:
    """The commit of these sources: what ``MEGAFLUX_COMMIT`` says of a copy, else the checkout's, else ``unknown``."""
    if "MEGAFLUX_COMMIT" in os.environ:
        return os.environ["MEGAFLUX_COMMIT"]
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    """Model of this processor and the cores that this process may use."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = models[0] if models else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


def write_results(path: Path, rows: Sequence[ResultRow], context: RunContext) -> None:
    """Write the rows of one run as JSON, one row a line; the file appears whole or not at all.

    Args:
        path: ``benchmarks/results/<name>.json``; parents are created.
        rows: at least one row.
        context: where and when they were measured.

    Raises:
        ValueError: no rows, or the same case and metric twice.
    """
    records = []
    for row in rows:
        values = {**row.__dict__, **context.__dict__}
        records.append(
            {name: dict(values[name]) if isinstance(values[name], Mapping) else values[name] for name in KEYS}
        )
    write_records(path, records)


def merge_results(path: Path, parts: Sequence[Path]) -> None:
    """Write the rows of several runs of a benchmark, each with its own date and commit, as one file.

    Args:
        path: the file to write.
        parts: files that ``write_results`` has written, in the order of their rows.

    Raises:
        ValueError: no rows, or the same case and metric twice.
    """
    write_records(path, [record for part in parts for record in read_results(part)])


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records with the keys of ``KEYS``, one a line; the file appears whole or not at all.

    Raises:
        ValueError: no records, or the same case and metric twice.
    """
    if not records:
        raise ValueError(f"{path.name}: there are no rows to write")
    seen: set[str] = set()
    for record in records:
        key = json.dumps([record["bench"], record["case"], record["metric"]], sort_keys=True)
        if key in seen:
            raise ValueError(f"{path.name}: measured twice: {key}")
        seen.add(key)
    lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records]
    write_atomically(path, ("[\n" + ",\n".join(lines) + "\n]\n").encode())


def read_results(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file as dictionaries with the keys of ``KEYS``.

    Raises:
        ValueError: the file does not hold a list of such rows.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or any(not isinstance(row, dict) or tuple(row) != KEYS for row in rows):
        raise ValueError(f"{path}: is not a list of rows with the keys {', '.join(KEYS)}")
    return rows
