"""Which vLLM releases the hooks were tried on.

Decides what is refused for its version. Knows nothing of models or options.
"""

from __future__ import annotations

import importlib.metadata
import re

from megaflux_serve.errors import UnsupportedError

TESTED = ("0.26.0", "0.27.1", "0.28.0", "0.30.0", "0.32.0", "0.33.0")
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


__all__ = ["TESTED", "engine_version", "is_supported", "refusal"]
