"""Which SGLang releases the hooks were tried on, and whether they took in this process.

Decides what is refused for its version, and that a layer is never built on half of the hooks. Knows nothing of models
or options.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING, Any

from megaflux_serve.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST, BEFORE = (0, 5, 11), (0, 5, 24)
RANGE = "0.5.11 to 0.5.23"
TESTED = f"0.5.17, 0.5.19 and 0.5.23 with servers, {RANGE} without"

Hook = tuple[str, "Callable[..., Any]", str]
"""Dotted path of a function in SGLang, what to do there, and ``before``, ``after`` or ``around``."""

_hooked: list[tuple[str, Callable[..., Any]]] = []


def engine_version() -> str:
    """The installed SGLang release, such as ``0.5.17``."""
    return importlib.metadata.version("sglang")


def is_supported(version: str) -> bool:
    """Whether the release lies in the range whose internals the hooks rely on."""
    return FIRST <= release(version) < BEFORE


def release(version: str) -> tuple[int, int, int]:
    """The three numbers of a version, zeros where it has none."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2]), int(match[3])) if match is not None else (0, 0, 0)


def refusal(version: str) -> UnsupportedError:
    """Why this release does not get the backend."""
    return UnsupportedError(
        f"the megaflux backend on SGLang {version}",
        "its layer interface has not been tested",
        f"use a release from {RANGE} (tested: {TESTED})",
    )


def hook(target: str, function: Callable[..., Any], kind: str) -> None:
    """Register a hook that SGLang will apply, once however often it is asked for.

    Args:
        target: dotted path of a function or method in SGLang.
        function: of the signature that SGLang gives hooks of this kind.
        kind: ``before``, ``after`` or ``around``.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if (target, function) not in _hooked:
        _hooked.append((target, function))
        HookRegistry.register(target, function, HookType(kind))


def missing_hooks() -> list[str]:
    """Targets that do not run our hook."""
    import pkgutil

    def is_in_place(target: str, function: Callable[..., Any]) -> bool:
        try:
            wrapper = pkgutil.resolve_name(target)
        except (ImportError, AttributeError):
            return False
        while wrapper is not None:  # other plugins may have wrapped the same function
            if any(cell.cell_contents is function for cell in getattr(wrapper, "__closure__", None) or ()):
                return True
            wrapper = getattr(wrapper, "__wrapped__", None)
        return False

    return [target for target, function in _hooked if not is_in_place(target, function)]


def check_hooks_took() -> None:
    """Hold every hook to its place, so that a changed SGLang is an error here and never a silently wrong result.

    Raises:
        UnsupportedError: naming the hooks that did not take.
    """
    from megaflux_sglang import backend

    missing = missing_hooks() + ([] if backend.is_accepted() else ["the name of the backend"])
    if not _hooked or missing:
        raise UnsupportedError(
            f"megaflux on SGLang {engine_version()}",
            f"these hooks did not take: {', '.join(missing) or 'all of them'}",
            "see SGLang's log for the reason, and use SGLANG_PLUGINS to leave out plugins that replace the same parts",
        )


def server_args() -> Any:
    """The ``ServerArgs`` of this scheduler process."""
    try:
        from sglang.srt.runtime_context import get_server_args  # from 0.5.15
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    return get_server_args()


class Arguments:
    """A server's arguments as SGLang has resolved them. From 0.5.19 the record itself keeps what the user wrote.

    Args:
        record: the ``ServerArgs``.
    """

    def __init__(self, record: Any) -> None:
        from sglang.srt.arg_groups.model_override_base import resolved_view

        self._record, self._resolved = record, resolved_view(record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resolved, name)

    def get_model_config(self) -> Any:
        """SGLang's configuration of the model; before 0.5.19 a method of the record."""
        from sglang.srt.arg_groups.model_override_base import model_config_of

        return model_config_of(self._record)


def resolving_method() -> str:
    """Name of the method of ``ServerArgs`` before and after which the launcher's arguments are looked at.

    From 0.5.19 resolving them is an act of its own, and from 0.5.20 a method that replaces ``__post_init__`` is never
    called.
    """
    return "resolve_once" if release(engine_version()) >= (0, 5, 19) else "__post_init__"


def resolved(record: Any) -> Any:
    """The arguments of a ``ServerArgs`` as they count."""
    return Arguments(record) if resolving_method() == "resolve_once" else record


def num_attention_groups(server_args: Any) -> int:
    """Groups of ranks that each bring requests of their own, 1 without data-parallel attention.

    From 0.5.22 a flag gives their number, which two older flags only lead to.

    Args:
        server_args: as SGLang has resolved them.
    """
    if hasattr(server_args, "attn_dp_size"):
        return int(server_args.attn_dp_size)
    return int(server_args.dp_size) if server_args.enable_dp_attention else 1


__all__ = [
    "TESTED",
    "Hook",
    "check_hooks_took",
    "engine_version",
    "hook",
    "is_supported",
    "missing_hooks",
    "num_attention_groups",
    "refusal",
    "release",
    "resolved",
    "resolving_method",
    "server_args",
]
