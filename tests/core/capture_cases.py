"""Records and stores for tests, and processes that are killed while they write."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from megaflux_serve.capture import ModelShape, ReplayRecord, ReplayStore
from tests.oracles.replay_routes import random_routes

MODEL = ModelShape(num_experts=16, top_k=3, num_layers=4)
ROOT = Path(__file__).resolve().parents[2]


def record(id: str, seed: int = 0, tokens: int = 40, version: str = "7", task: str = "") -> ReplayRecord:
    routes = random_routes(seed, tokens - 1, 4, 16, 3)
    return ReplayRecord.of(
        id, routes, MODEL, prompt_tokens=5, output_tokens=tokens - 5, weights_version=version, task=task
    )


def filled(folder: Path, ids: str = "abcdef") -> ReplayStore:
    """A store with a record for each letter, whose routes are seeded by the letter."""
    store = ReplayStore.create(folder, MODEL)
    with store.writer() as writer:
        for id in ids:
            writer.append(record(id, ord(id)))
    return store


def found_ids(store: ReplayStore) -> list[str]:
    return [entry.id for entry in store.scan()[0]]


def in_killed_processes(*works: Callable[[], None]) -> None:
    """Run each of ``works`` in a process of its own that ends by SIGKILL, at the latest when the work is done."""
    children = []
    for work in works:
        children.append(os.fork())
        if children[-1] == 0:
            try:
                work()
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
    assert all(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL for child in children)
