"""Plans on disk: a folder with ``plan.json`` and one ``.npy`` a table, whole or not there at all.

Decides the format, version 1, and checks what it reads. Holds no pickled objects. The folder is written under a
temporary name, flushed and renamed; ``plan.json`` names every table with its SHA-256, so that a damaged plan is
refused.

========================  ==================================================================
``plan.json``             version, topology, cost model, score, bounds, history, table hashes
``placement.npy``         int32 [L, E], slot of every logical expert during the window
``placement_before.npy``  int32 [L, E], slot of every logical expert before it
``cells.npy``             int32 [N], cell ``row * D + slot`` of every trajectory
========================  ==================================================================
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.durable import publish_folder
from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.routepack.bounds import ExpertExcess, LowerBound
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.placement import Placement
from megaflux_serve.routepack.plan import WindowPlan
from megaflux_serve.routepack.score import Score
from megaflux_serve.routepack.topology import CostModel, DenseStage, Topology

VERSION = 1


def save_plan(plan: WindowPlan, folder: Path) -> None:
    """Write a plan to ``folder``, which must not exist yet; parents are created.

    Raises:
        ConfigError: the folder exists.
    """
    if folder.exists():
        raise ConfigError("out", str(folder), "a folder that does not exist yet")
    tables = {
        "placement.npy": plan.placement.slots,
        "placement_before.npy": plan.before.slots,
        "cells.npy": plan.layout.cell,
    }
    files = {name: _npy_bytes(table) for name, table in tables.items()}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files["plan.json"] = (json.dumps(summary(plan) | {"tables": hashes}, indent=2, allow_nan=False) + "\n").encode()
    publish_folder(folder, files)


def load_plan(folder: Path) -> WindowPlan:
    """Read a plan that ``save_plan`` wrote.

    Raises:
        InputError: naming the file that is missing, damaged or of another version.
    """
    source = folder / "plan.json"
    try:
        stored = json.loads(source.read_bytes())
        if stored["version"] != VERSION:
            raise InputError(str(source), f"has version {stored['version']}", f"version {VERSION}")
        return _plan_of(stored, folder)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(str(source), f"cannot be read ({error!r})", "a plan written by this library") from error


def _plan_of(stored: dict[str, Any], folder: Path) -> WindowPlan:
    tables = {name: _read_table(folder / name, digest) for name, digest in stored["tables"].items()}
    topology = Topology(**stored["topology"])
    cost = stored["cost"]
    return WindowPlan(
        topology,
        CostModel(tuple(DenseStage(**s) for s in cost["stages"]), cost["communication"], cost["pipeline_bubble"]),
        Placement.of(tables["placement_before.npy"], topology.num_ranks),
        Placement.of(tables["placement.npy"], topology.num_ranks),
        Layout(tables["cells.npy"], stored["num_rows"], topology.num_slots),
        stored["rows_bound"],
        Score(**stored["score"]),
        Score(**stored["ffd_score"]),
        LowerBound(**stored["bound"]),
        ExpertExcess(**stored["excess"]),
        tuple(stored["proposals"]),
        tuple((count, value) for count, value in stored["history"]),
        stored["seconds"],
    )


def summary(plan: WindowPlan) -> dict[str, Any]:
    """Everything of a plan but its tables, as plain JSON values."""
    return {
        "version": VERSION,
        "topology": asdict(plan.topology),
        "cost": asdict(plan.cost),
        "num_rows": plan.layout.num_rows,
        "rows_bound": plan.rows_bound,
        "score": plan.score._asdict(),
        "ffd_score": plan.ffd_score._asdict(),
        "bound": asdict(plan.bound),
        "excess": asdict(plan.excess),
        "excess_removed": plan.excess_removed,
        "experts_moved": plan.num_moved,
        "proposals": list(plan.proposals),
        "history": [list(point) for point in plan.history],
        "seconds": plan.seconds,
    }


def _npy_bytes(table: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, table, allow_pickle=False)
    return buffer.getvalue()


def _read_table(path: Path, digest: str) -> NDArray[Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error})", "a table of the plan") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise InputError(str(path), "differs from the hash in plan.json", "the table that was saved")
    return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))
