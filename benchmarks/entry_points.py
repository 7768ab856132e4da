"""Make engines find this project's plugins where it lies on PYTHONPATH without being installed.

    python3 -m benchmarks.entry_points FOLDER        then put FOLDER on PYTHONPATH

Writes the metadata that an installation would leave: name, version and entry points, as pyproject.toml has them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def write_metadata(folder: Path) -> Path:
    """The ``.dist-info`` folder, made in ``folder``."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    return info


if __name__ == "__main__":
    print(write_metadata(Path(sys.argv[1])))
