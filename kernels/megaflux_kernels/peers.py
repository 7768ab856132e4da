"""The table of every rank's addresses as this rank maps them: int64 [P, 7] in device memory, written once."""

from __future__ import annotations

from enum import IntEnum


class Peer(IntEnum):
    """Columns of the table: base addresses of a rank's regions, see ``forward_map.py``."""

    X = 0
    RESULTS = 1
    W1 = 2
    W2 = 3
    FLAGS = 4
    ROW_SOURCE = 5
    PLACES = 6


PEER_WORDS = len(Peer)

__all__ = ["PEER_WORDS", "Peer"]
