"""Which releases of the kernel language the kernels are compiled with, and which one is here. Imports nothing of it.

An engine pins a release of its own, so that a process may find another one than ours.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "nvidia-cutlass-dsl"
RELEASES = ("4.8.0", "4.8.1")
"""Oldest first. Both make the same machine code of the kernels; 4.7.1 and older do not compile them."""

REMEDY = f"pip install '{DISTRIBUTION}[cu13]=={RELEASES[-1]}'"
"""With ``cu13``: where an engine has installed that part, another release of it must not stay behind."""


def installed() -> str | None:
    """The release in this environment, None if there is none."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def obstacle(found: str | None) -> str | None:
    """Why kernels cannot be compiled with a release, None if they can.

    Args:
        found: the release, None where none is installed.
    """
    if found is None:
        return f"{DISTRIBUTION} is not installed"
    return None if found in RELEASES else f"{DISTRIBUTION} is {found}, not {' or '.join(RELEASES)}"


__all__ = ["DISTRIBUTION", "RELEASES", "REMEDY", "installed", "obstacle"]
