"""Decode throughput: tokens a second that a number of running requests get, without their prefill.

Decides the cases. The model's own router chooses, whose weights are random: experts are used nearly alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.harness import ResultRow
from benchmarks.serving.fleet import Fleet
from benchmarks.serving.models import ServedModel

BENCH = "decode"


@dataclass
class DecodeSamples:
    """Tokens a second by running requests and backend, of one model.

    Attributes:
        model: served.
        prompt_tokens, output_tokens: of every request; the first output token counts as prefill.
        tokens_per_s: the samples.
    """

    model: ServedModel
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def measure(self, fleet: Fleet, num_running: Sequence[int], repeats: int, chunk: int) -> None:
        """Add the samples of the engines of a fleet; backends take turns.

        Args:
            fleet: the engines.
            num_running: requests that run at the same time, over all ranks.
            repeats: samples a case and backend.
            chunk: budget of a step.
        """
        draw = random.Random(0)
        for requests in num_running:
            prompts = [
                [draw.randrange(self.model.vocabulary) for _ in range(self.prompt_tokens)] for _ in range(requests)
            ]
            samples = self.tokens_per_s.setdefault(requests, {})
            for sample in range(repeats + 1):
                first = fleet.each("batch_seconds", prompts, 1, chunk)
                whole = fleet.each("batch_seconds", prompts, self.output_tokens, chunk)
                for backend, seconds in whole.items() if sample else ():  # the first one warms up
                    rate = requests * (self.output_tokens - 1) / (seconds - first[backend])
                    samples.setdefault(backend, []).append(rate)
            rates = " ".join(f"{name} {np.median(values):.0f}" for name, values in samples.items())
            print(f"  {self.model.name} decode, {requests} running: tokens/s {rates}", flush=True)

    def rows(self) -> Iterator[ResultRow]:
        """Throughputs, and ratios to stock vLLM with the same parallelism."""
        for requests, by_backend in self.tokens_per_s.items():
            rates = {backend: float(np.median(values)) for backend, values in by_backend.items()}
            for backend, rate in rates.items():
                case = {
                    "model": self.model.name,
                    "layers": self.model.layers,
                    "running": requests,
                    "prompt_tokens": self.prompt_tokens,
                    "output_tokens": self.output_tokens,
                    "backend": backend,
                }
                yield ResultRow(BENCH, case, "tokens_per_s", rate, "1/s")
                yield ResultRow(BENCH, case, "step_ms", 1e3 * requests / rate, "ms")
                if "stock" in rates and backend != "stock":
                    yield ResultRow(BENCH, case, "throughput_vs_stock", rate / rates["stock"], "1")
