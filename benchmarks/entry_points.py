"""Make engines find this project's plugins where it lies on PYTHONPATH without being installed.

    python3 -m benchmarks.entry_points FOLDER        then put FOLDER on PYTHONPATH

Writes the metadata that an installation would leave: name, version and entry points, as pyproject.toml has them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import tomllib

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def write_metadata(folder: Path) -> Path:
    """This project's ``.dist-info`` folder, made in ``folder``."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    return write_dist_info(folder, project["name"], project["version"], project["entry-points"])


def write_dist_info(folder: Path, name: str, version: str, groups: Mapping[str, Mapping[str, str]]) -> Path:
    """The ``.dist-info`` folder of a distribution, made in ``folder``; ``groups`` of entry points by name."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


if __name__ == "__main__":
    print(write_metadata(Path(sys.argv[1])))
