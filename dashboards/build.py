"""Write the dashboards' JSON, which Grafana reads, from the code beside this file.

python -m dashboards.build            rewrite dashboards/grafana/dashboards
python -m dashboards.build --check    exit 1 if a file is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import experts, replay, replication, serving
from dashboards.queries import JSON_FOLDER
from megaflux_serve.durable import write_atomically

BUILDERS = {"serving": serving, "experts": experts, "replication": replication, "replay": replay}


def built() -> dict[str, str]:
    """The JSON of every dashboard by the name of its file."""
    return {name: _as_json(module.build()) for name, module in BUILDERS.items()}


def stale() -> list[str]:
    """Names of the files that do not say what the code says, or that no code writes."""
    files = {path.stem: path.read_text() for path in JSON_FOLDER.glob("*.json")}
    wanted = built()
    return sorted(name for name in files.keys() | wanted.keys() if files.get(name) != wanted.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the dashboards' JSON.")
    parser.add_argument("--check", action="store_true", help="only say which files are out of date")
    if parser.parse_args().check:
        if names := stale():
            sys.exit(f"out of date: {', '.join(names)}; run python -m dashboards.build")
        return
    for name, text in built().items():
        write_atomically(JSON_FOLDER / f"{name}.json", text.encode())


def _as_json(dashboard: Any) -> str:
    return json.dumps(json.loads(JSONEncoder().encode(dashboard)), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    main()
