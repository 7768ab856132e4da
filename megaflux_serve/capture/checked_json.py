"""JSON files that hold their own SHA-256, so that a damaged byte is an error and never another value.

Decides where it stands: the last member, over all bytes before it. So any JSON reader reads the file, and no two
programs need agree on how numbers and texts are written. Knows nothing of what else is in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

MEMBER = b', "sha256": "'
"""How the last member begins. No text of JSON holds these bytes, since quotes in texts are escaped."""


def dumps(value: Mapping[str, Any]) -> bytes:
    """An object that is not empty as one line."""
    content = json.dumps(value).encode().removesuffix(b"}")
    return content + MEMBER + _end(content)


def is_sound(data: bytes) -> bool:
    """Whether a file matches its SHA-256; files of earlier versions hold none."""
    content, member, end = data.rpartition(MEMBER)
    return not member or end == _end(content)


def _end(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b'"}\n'


__all__ = ["dumps", "is_sound"]
