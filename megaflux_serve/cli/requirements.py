"""What a command needs that the library alone does not bring: torch and the kernel language."""

from __future__ import annotations

from importlib.util import find_spec

from megaflux_kernels import language

from megaflux_serve.errors import UnsupportedError


def require_kernels(command: str) -> None:
    """Refuse a command where kernels cannot be compiled; imports neither torch nor the kernel language.

    Raises:
        UnsupportedError: naming what is missing, and how to get it.
    """
    if find_spec("torch") is None:
        raise UnsupportedError(command, "torch is not installed", "in a checkout: pip install -e '.[gpu]'")
    if (reason := language.obstacle(language.installed())) is not None:
        raise UnsupportedError(command, reason, language.REMEDY)


__all__ = ["require_kernels"]
