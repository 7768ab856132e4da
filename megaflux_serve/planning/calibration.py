"""The gate's costs as measured on this machine: one small JSON file, an entry a layer shape.

Decides where the file is and what it may hold. Knows nothing of how costs are measured (``megaflux calibrate`` does).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megaflux_serve.durable import write_atomically
from megaflux_serve.errors import ConfigError
from megaflux_serve.planning.gate import GateCosts, estimate_costs

CALIBRATION_VARIABLE = "MEGAFLUX_CALIBRATION"
"""Environment variable that names the file; default ``~/.cache/megaflux/calibration.json``."""

TFLOP_PER_S, LINK_GB_PER_S, PLAN_NS = 600.0, 330.0, 25_000
"""Of an H200: sustained products of a layer, copies by SMs over NVLink, one plan for 8K tokens; see docs."""


def calibration_path() -> Path:
    """The file of this machine's measurements."""
    return Path(os.environ.get(CALIBRATION_VARIABLE) or Path.home() / ".cache" / "megaflux" / "calibration.json")


def layer_name(hidden: int, intermediate: int) -> str:
    """The name of a layer shape in the file and in the option ``gate``, such as ``2048x768``."""
    return f"{hidden}x{intermediate}"


def load_costs(layer: str) -> GateCosts:
    """The measured costs of a layer shape.

    Args:
        layer: see ``layer_name``.

    Raises:
        ConfigError: not measured on this machine, or the file is damaged.
    """
    path, measured = calibration_path(), _read()["layers"]
    if layer not in measured:
        names = ", ".join(sorted(measured)) or "none"
        raise ConfigError("layer", layer, f"a layer that `megaflux calibrate` has measured; {path} has {names}")
    costs = measured[layer]
    wanted = {field.name for field in fields(GateCosts)}
    if not isinstance(costs, dict) or costs.keys() != wanted or any(type(cost) is not int for cost in costs.values()):
        raise ConfigError("layer", layer, f"the four costs of a gate, integers, in {path}; measure it again")
    return GateCosts(**costs)


def costs_here(hidden: int, intermediate: int) -> tuple[GateCosts, str]:
    """Costs of a layer shape on this machine, and where they come from: ``measured`` or ``estimated``.

    What nobody has measured is estimated from the rates of an H200: nothing of a transfer counts as hidden, which is so
    for the small batches that the gate is for.

    Raises:
        ConfigError: the file of measurements is damaged.
    """
    layer = layer_name(hidden, intermediate)
    if layer in _read()["layers"]:
        return load_costs(layer), "measured"
    return estimate_costs(hidden, intermediate, TFLOP_PER_S, LINK_GB_PER_S, plan_ns=PLAN_NS), "estimated"


def store_costs(layer: str, costs: GateCosts, device: str) -> Path:
    """Add or replace the costs of a layer shape; those of another kind of device are dropped.

    Args:
        layer: see ``layer_name``.
        costs: what was measured.
        device: name of the GPU.

    Returns:
        The file.

    Raises:
        ConfigError: the file is damaged.
    """
    path, held = calibration_path(), _read()
    layers = held["layers"] if held["device"] == device else {}
    content = {"device": device, "layers": {**layers, layer: asdict(costs)}}
    write_atomically(path, json.dumps(content, indent=2).encode())
    return path


def _read() -> dict[str, Any]:
    path = calibration_path()
    if not path.exists():
        return {"device": None, "layers": {}}
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict) or set(held) != {"device", "layers"} or not isinstance(held["layers"], dict):
        raise ConfigError(CALIBRATION_VARIABLE, str(path), "a file that `megaflux calibrate` wrote; remove it")
    return held


__all__ = ["CALIBRATION_VARIABLE", "calibration_path", "costs_here", "layer_name", "load_costs", "store_costs"]
