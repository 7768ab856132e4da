"""Which vLLM releases the hooks were tried on, and whether they took in this process.

Decides what is refused for its version. Knows nothing of models or options.
"""

from __future__ import annotations

import importlib.metadata
import re

from megaflux_serve.errors import UnsupportedError

TESTED = ("0.26.0", "0.27.1", "0.32.0", "0.33.0")
FIRST, BEFORE = (0, 26), (0, 34)


def engine_version() -> str:
    """The installed vLLM release, such as ``0.27.1+cpu``."""
    return importlib.metadata.version("vllm")


def is_supported(version: str) -> bool:
    """Whether the release lies in the range whose internals the hooks rely on."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and FIRST <= (int(match[1]), int(match[2])) < BEFORE


def refusal(version: str) -> UnsupportedError:
    """Why this release does not get the backend."""
    return UnsupportedError(
        f"--moe-backend megaflux on vLLM {version}",
        "its layer interface has not been tested",
        f"use a release from 0.26 to 0.33 (tested: {', '.join(TESTED)})",
    )


def check_hooks_took(version: str) -> None:
    """Hold every hook to what it is for, so that a changed vLLM is an error here and never a silent other backend.

    Raises:
        UnsupportedError: naming the hook that did not take.
    """
    from megaflux_vllm import backend_name, capture, checks, layer, metrics

    hooks = {
        "the name of the backend": backend_name.is_accepted(),
        "checks before weights load": checks.is_installed(),
        "capture of routes": capture.is_installed(),
        "metrics of layers": metrics.is_installed(),
        "the layer of routed experts": layer.is_replaced(),
    }
    missing = [what for what, took in hooks.items() if not took]
    if missing:
        raise UnsupportedError(
            f"megaflux on vLLM {version}",
            f"these hooks did not take: {', '.join(missing)}",
            "remove other plugins that replace the same parts, or disable this one with VLLM_PLUGINS",
        )


__all__ = ["TESTED", "check_hooks_took", "engine_version", "is_supported", "refusal"]
