"""Lines that say what is done, each with the seconds since the program began."""

from __future__ import annotations

import time

_BEGIN = time.monotonic()


def say(text: str) -> None:
    """Print a line at once."""
    print(f"[{time.monotonic() - _BEGIN:5.1f} s] {text}", flush=True)
