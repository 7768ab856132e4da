"""Prefill latency: the time in which every request of a batch of long prompts gets its first token.

Decides the cases and the order of measurement: backends take turns, sample by sample, so that a drift of clocks or
temperature meets all of them. Before a routing is timed, every engine counts what it routes and has to have routed
exactly what the trace says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness import Plain, ResultRow
from benchmarks.serving.fleet import Fleet
from benchmarks.serving.models import ServedModel
from benchmarks.serving.progress import say
from benchmarks.serving.routes import RouteTable, expected_counts, max_over_mean, route_table, trace_prompts

BENCH = "prefill_latency"
STOCK = ("stock", "stock-tp")


@dataclass(frozen=True)
class PrefillCase:
    """One cell of the table.

    Attributes:
        batch: requests.
        chunk: tokens that a rank may schedule in a step.
        routing: one of ``routes.ROUTINGS``.
    """

    batch: int
    chunk: int
    routing: str


@dataclass
class PrefillSamples:
    """Seconds by case and backend, of one model.

    Attributes:
        model: served.
        prompt_tokens: of every request.
        num_ranks: over which experts are spread.
        stray_rows: of decode that an engine may route by the table beside the prompts that are counted.
        tables: by routing, as ``prepare`` made them.
        seconds: the samples.
        skew: max/mean rank load of fixed placement by case.
    """

    model: ServedModel
    prompt_tokens: int
    num_ranks: int = 2
    stray_rows: int = 0
    tables: dict[str, tuple[RouteTable, Path]] = field(default_factory=dict)
    seconds: dict[PrefillCase, dict[str, list[float]]] = field(default_factory=dict)
    skew: dict[PrefillCase, float] = field(default_factory=dict)

    def prepare(self, routings: Sequence[str], folder: Path) -> None:
        """Make the tables of routes and write them where engines can read them; takes seconds."""
        for routing in routings:
            table, path = route_table(self.model, routing), folder / f"{self.model.name}-{routing}.npy"
            np.save(path, table)
            self.tables[routing] = table, path

    def measure(
        self, fleet: Fleet, cases: Sequence[PrefillCase], repeats: int, after: Callable[[], None] = lambda: None
    ) -> None:
        """Add the samples of the engines of a fleet.

        Args:
            fleet: the engines.
            cases: in the order of measurement, of routings that are prepared.
            repeats: samples a case and backend.
            after: called after every case.
        """
        forced, checked = "", set()
        for case in cases:
            table, path = self.tables[case.routing]
            if case.routing not in checked:
                self._check(fleet, case.routing)
                checked.add(case.routing)
            if case.routing != forced:
                fleet.each("call_workers", "benchmark_force_routes", str(path), False)
                forced = case.routing
            prompts = trace_prompts(self.model, case.batch, self.prompt_tokens)
            self.skew[case] = max_over_mean(table, prompts, self.model.experts, self.num_ranks)
            samples = self.seconds.setdefault(case, {})
            for _ in range(repeats):
                for backend, seconds in fleet.each("batch_seconds", prompts, 1, case.chunk).items():
                    samples.setdefault(backend, []).append(seconds)
            medians = " ".join(f"{name} {1e3 * np.median(values):.1f}" for name, values in samples.items())
            say(f"{self.model.name} {case.routing}, {case.batch} x {case.chunk}: ms {medians}")
            after()
        fleet.each("call_workers", "benchmark_force_routes", None)

    def rows(self) -> Iterator[ResultRow]:
        """Latencies, and ratios where the peer was measured; stock is the faster of vLLM's two ways."""
        for case, by_backend in self.seconds.items():
            latency = {backend: 1e3 * float(np.median(values)) for backend, values in by_backend.items()}
            stock = min((latency[name], name) for name in STOCK if name in latency) if STOCK & latency.keys() else None
            at: dict[str, Plain] = {
                "model": self.model.name,
                "layers": self.model.layers,
                "prompt_tokens": self.prompt_tokens,
                "batch": case.batch,
                "chunk": case.chunk,
                "routing": case.routing,
            }
            yield ResultRow(BENCH, at, "fixed_max_over_mean", self.skew[case], "1")
            for backend, value in latency.items():
                where = at | {"backend": backend}
                yield ResultRow(BENCH, where, "latency_ms", value, "ms")
                if "fixed" in latency and backend not in ("fixed", *STOCK):
                    yield ResultRow(BENCH, where, "speedup_over_fixed", latency["fixed"] / value, "1")
                if stock is not None and backend not in STOCK:
                    yield ResultRow(BENCH, where | {"peer": stock[1]}, "speedup_over_stock", stock[0] / value, "1")

    def _check(self, fleet: Fleet, routing: str) -> None:
        """Have every engine count what it routes, and leave out those that do not follow the table."""
        table, path = self.tables[routing]
        prompts = trace_prompts(self.model, 8, self.prompt_tokens)
        expected = expected_counts(table, prompts, self.model.experts)
        fleet.each("call_workers", "benchmark_force_routes", str(path), True)
        fleet.each("batch_seconds", prompts, 1, 2 * self.prompt_tokens)
        for backend, counts in fleet.each("call_workers", "benchmark_counts").items():
            routed = np.array(counts)
            # Tensor-parallel ranks all route every token, data-parallel ones their own.
            total = routed.sum(axis=0) if fleet.members[backend].spec.ranks == len(routed) else routed[0]
            wrong = int(np.abs(total - expected).sum())
            say(f"{backend} {routing}: {expected.sum()} assignments counted, {wrong} not as in the trace")
            if wrong > self.stray_rows * self.model.layers * self.model.top_k:
                fleet.leave_out(backend, f"{wrong} assignments are not those of {path}")
