"""Soak: thousands of steps of prefill, decode and aborted requests; then the same answers and memory as before.

Decides the load and what may not change.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Plain, ResultRow
from benchmarks.serving.fleet import Fleet
from benchmarks.serving.models import ServedModel

BENCH = "soak"
SLICES = 5
NUM_REFERENCE = 16


@dataclass(frozen=True)
class SoakLoad:
    """What is asked.

    Attributes:
        seconds: in all.
        clients: requests at a time.
        lengths: least and most tokens of a prompt.
        output_tokens: most of an answer.
        chunk: budget of a step.
    """

    seconds: float
    clients: int
    lengths: tuple[int, int]
    output_tokens: int
    chunk: int


def measure(fleet: Fleet, model: ServedModel, backend: str, load: SoakLoad) -> Iterator[ResultRow]:
    """Rows of one engine; none if it fails, which the fleet prints.

    Memory is compared between the end of the first slice, when every size of batch has occurred, and of the last.
    """
    draw = random.Random(2)
    length = min(load.lengths[1], 64)
    prompts = [[draw.randrange(model.vocabulary) for _ in range(length)] for _ in range(NUM_REFERENCE)]

    def ask(method: str, *arguments: Any) -> Any:
        timeout_s = load.seconds + 60
        answers = fleet.each(method, *arguments, only=[backend], timeout_s=timeout_s)
        if backend not in answers:
            raise LookupError(backend)
        return answers[backend]

    try:
        before = ask("complete", prompts, load.output_tokens, load.chunk, True)
        steps = ask("count_steps")
        totals: dict[str, int] = {}
        memory = []
        for part in range(SLICES):
            arguments = (load.seconds / SLICES, load.clients, load.lengths, load.output_tokens, load.chunk, part)
            counted = ask("soak", *arguments)
            totals = {name: totals.get(name, 0) + count for name, count in counted.items()}
            memory.append(ask("call_workers", "benchmark_memory"))
        steps = ask("count_steps") - steps
        after = ask("complete", prompts, load.output_tokens, load.chunk, True)
    except LookupError:
        return
    case: dict[str, Plain] = {"model": model.name, "layers": model.layers, "backend": backend, "seconds": load.seconds}
    case |= {"clients": load.clients}
    yield ResultRow(BENCH, case, "steps", steps, "1")
    for name, count in totals.items():
        yield ResultRow(BENCH, case, f"{name}_tokens" if name in ("prompts", "outputs") else name, count, "1")
    same = sum(a == b for a, b in zip(before, after, strict=True))
    yield ResultRow(BENCH, case, "answers_equal_pct", 100 * same / NUM_REFERENCE, "%")
    for kind in memory[0][0]:
        growth = max(last[kind] - first[kind] for first, last in zip(memory[0], memory[-1], strict=True))
        yield ResultRow(BENCH, case, f"{kind}_growth_mib", growth / 2**20, "MiB")
