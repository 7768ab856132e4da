"""How every command explains itself, refuses its options, and names the files that it writes.

Help is filled to the width of the terminal. An option that is refused deep inside the library is named as the user
wrote it. What is to be written is looked at before any work starts.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from megaflux_serve.errors import ConfigError, renamed

Function = TypeVar("Function", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command whose refusals name flags."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:
        super().__init__(*args, help=filled(help or ""), **settings)

    def invoke(self, ctx: Any) -> Any:
        with renamed(self.flag):
            return super().invoke(ctx)

    def flag(self, field: str) -> str:
        """The option that set a field of the library: ``--ranks`` for ``num_ranks``, ``--budget`` for ``budget_s``."""
        name = field.removeprefix("num_")
        return next((param.opts[0] for param in self.params if f"{name}_".startswith(f"{param.name}_")), field)


class Commands(typer.Typer):
    """A group of them."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        return super().command(name, cls=Command, **settings)


def filled(text: str) -> str:
    """A docstring with every paragraph on one line, which the terminal then breaks; indented ones stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else part.replace("\n", " ") for part in paragraphs)


def file_to_write(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Callback of an option that names a file to write; its folders are created later.

    Raises:
        ConfigError: the path is a folder or a device, which a file must not replace, or no file can be made there.
    """
    if path is not None and not _can_be_written(path):
        raise ConfigError(param.opts[0], str(path), "a file, in a folder that can be written")
    return path


def prom_file(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Callback of the option that names a file for the node exporter's textfile collector.

    Raises:
        ConfigError: as ``file_to_write``, and a name that the collector passes over.
    """
    if path is not None and path.suffix != ".prom":
        raise ConfigError(param.opts[0], str(path), "a file whose name ends in .prom, as the node exporter wants it")
    return file_to_write(param, path)


MetricsFile = Annotated[
    Path | None,
    typer.Option(
        help="Add metrics of this command to a .prom file of the node exporter's collector.", callback=prom_file
    ),
]


def folder_to_make(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Callback of an option that names a folder to make.

    Raises:
        ConfigError: it is there, or cannot be made.
    """
    if path is not None and (path.exists() or not _can_be_written(path)):
        raise ConfigError(param.opts[0], str(path), "a folder that does not exist yet, in one that can be written")
    return path


def _can_be_written(path: Path) -> bool:
    if path.exists() and not path.is_file():
        return False
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)


__all__ = ["Command", "Commands", "MetricsFile", "file_to_write", "filled", "folder_to_make"]
