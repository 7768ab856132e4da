"""Plugins of a checkout that is only on PYTHONPATH are found as those of an installation."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="needs Python 3.11")

from benchmarks.entry_points import write_metadata


def test_engines_find_the_plugins_in_the_folder(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    installed = importlib.metadata.distribution("megaflux-serve")
    assert (found.name, found.version) == (installed.name, installed.version)
    plugins = {(entry.group, entry.value) for entry in found.entry_points}
    assert ("vllm.general_plugins", "megaflux_vllm:register") in plugins
    assert ("sglang.srt.plugins", "megaflux_sglang:register") in plugins
