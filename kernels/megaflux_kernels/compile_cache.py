"""Compiled kernels kept on disk, so that a server does not compile at its first request.

``cached`` compiles what is missing and stores the object file that the kernel language exports (host entry and machine
code); ``megaflux_kernels.compile_cache.cached`` of the same key loads it in milliseconds. A key names kernel, every
compile-time choice, target, release of the language and the source of this package, so that a stale object is never
found. Object files are code: a directory that others can write is refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaflux_kernels.language import DISTRIBUTION
from megaflux_kernels.layout import ShapeError

CACHE_VARIABLE = "MEGAFLUX_KERNEL_CACHE"
"""Environment variable that names the directory; default ``~/.cache/megaflux/kernels``."""

_loaded: dict[str, Any] = {}


@dataclass
class CacheUse:
    """What getting kernels ready took in this process.

    Attributes:
        compiled: kernels that were compiled.
        loaded: kernels that came from disk.
        seconds: for both.
    """

    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0


cache_use = CacheUse()


def cache_directory() -> Path:
    """The directory of compiled kernels, created on demand.

    Raises:
        ShapeError: it belongs to another user or others can write it.
    """
    default = Path.home() / ".cache" / "megaflux" / "kernels"
    directory = Path(os.environ.get(CACHE_VARIABLE, default))
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = directory.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ShapeError(CACHE_VARIABLE, str(directory), "a directory that only this user can write")
    return directory


@cache
def source_digest() -> str:
    """Digest of this package's source: a change of any kernel makes new keys."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def target() -> str:
    """The architecture that is compiled for: ``CUTE_DSL_ARCH``, or that of the current device."""
    named = os.environ.get("CUTE_DSL_ARCH")
    if named:
        return named
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


def key_of(kernel: str, *choices: object) -> str:
    """File name of a compiled kernel.

    Args:
        kernel: its name, an identifier.
        choices: every compile-time choice; the ``repr`` must tell any two of them apart, as that of a frozen dataclass
            does.
    """
    facts = (target(), version(DISTRIBUTION), source_digest(), *map(repr, choices))
    return f"{kernel}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


def cached(compile_kernel: Callable[[], Any], kernel: str, *choices: object) -> Any:
    """The compiled kernel: from this process, from disk, or compiled now and stored.

    Args:
        compile_kernel: compiles it.
        kernel: its name.
        choices: see ``key_of``.

    Returns:
        What ``cute.compile`` returns, callable with the kernel's arguments.
    """
    key = key_of(kernel, *choices)
    if key in _loaded:
        return _loaded[key]
    path, begin = cache_directory() / f"{key}.o", time.perf_counter()
    if path.exists():
        from cutlass.runtime import load_module

        _loaded[key] = load_module(str(path))[kernel]
        cache_use.loaded += 1
    else:
        _loaded[key] = compile_kernel()
        store(path, _loaded[key].dump_to_object(kernel))
        cache_use.compiled += 1
    cache_use.seconds += time.perf_counter() - begin
    return _loaded[key]


def store(path: Path, content: bytes) -> None:
    """Write an object file whole or not at all: temporary name, flush, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


__all__ = ["CACHE_VARIABLE", "CacheUse", "cache_directory", "cache_use", "cached", "key_of", "store"]
