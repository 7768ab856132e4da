"""Decode throughput: tokens a second that a number of running requests get, without their prefill.

Decides the cases. The model's own router chooses, whose weights are random: experts are used nearly alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.harness import Plain, ResultRow
from benchmarks.serving.backends import HANDS_OVER
from benchmarks.serving.fleet import Fleet
from benchmarks.serving.models import ServedModel
from benchmarks.serving.progress import say

BENCH = "decode"


@dataclass
class DecodeSamples:
    """Seconds by running requests and backend, of one model.

    Attributes:
        model: served.
        prompt_tokens, output_tokens: of every request; the first output token counts as prefill.
        seconds: pairs of samples: until all requests have one token, until they have all.
    """

    model: ServedModel
    prompt_tokens: int
    output_tokens: int
    seconds: dict[int, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)

    def measure(
        self,
        fleet: Fleet,
        backends: Sequence[str],
        num_running: Sequence[int],
        repeats: int,
        chunk: int,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Add the samples of the engines of a fleet; backends take turns.

        Args:
            fleet: the engines.
            backends: those of them that are asked.
            num_running: requests that run at the same time, over all ranks.
            repeats: samples a case and backend.
            chunk: budget of a step.
            after: called after every case.
        """
        draw = random.Random(0)
        vocabulary, length = self.model.vocabulary, self.prompt_tokens
        for requests in num_running:
            prompts = [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(requests)]
            samples = self.seconds.setdefault(requests, {})
            for _ in range(repeats):
                first = fleet.each("batch_seconds", prompts, 1, chunk, only=backends)
                whole = fleet.each("batch_seconds", prompts, self.output_tokens, chunk, only=backends)
                for backend, seconds in whole.items():
                    samples.setdefault(backend, []).append((first[backend], seconds))
            steps = " ".join(f"{name} {1e3 * self.step_s(requests, name):.2f}" for name in samples)
            say(f"{self.model.name} decode, {requests} running: ms a step {steps}")
            after()

    def step_s(self, requests: int, backend: str) -> float:
        """Seconds in which every running request gets one token: from medians."""
        first, whole = np.median(self.seconds[requests][backend], axis=0)
        return float(whole - first) / (self.output_tokens - 1)

    def rows(self) -> Iterator[ResultRow]:
        """Throughputs, and ratios to stock vLLM with the same parallelism."""
        for requests, by_backend in self.seconds.items():
            step_s = {backend: self.step_s(requests, backend) for backend in by_backend}
            for backend, seconds in step_s.items():
                case: dict[str, Plain] = {
                    "model": self.model.name,
                    "layers": self.model.layers,
                    "running": requests,
                    "prompt_tokens": self.prompt_tokens,
                    "output_tokens": self.output_tokens,
                    "backend": backend,
                    "kernels": "vllm" if backend in ("stock", HANDS_OVER) else "megaflux",
                }
                yield ResultRow(BENCH, case, "step_ms", 1e3 * seconds, "ms")
                yield ResultRow(BENCH, case, "tokens_per_s", requests / seconds, "1/s")
                if "stock" in step_s and backend != "stock":
                    yield ResultRow(BENCH, case, "throughput_vs_stock", step_s["stock"] / seconds, "1")
