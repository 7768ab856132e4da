"""Which files this process has open."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """Paths of this process's open files in a folder; those of deleted files, too."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them is closed by now
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in paths if path.startswith(str(folder))]
