"""What metrics cost the host: a worker's report, an answer to ``/metrics``, and a batch where the host plans.

Method: layers of a model with totals that thousands of skewed batches have left; processor time (not wall time, so that
other processes do not count), the median over the repeats. What they cost the GPU is ``bench_metrics_overhead``'s.

Reported: report_ms, a worker's snapshot written to memory, once a second; answer_ms, answer_kb and series, of one
scrape that shows every worker; add_us, a batch of one layer with the executors ``reference`` and ``staged`` (the device
adds for ``megakernel``).

Run: ``python -m benchmarks.bench_metrics_host`` (some seconds); writes results/metrics_host.json.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.harness import RESULTS, ResultRow, RunContext, cpu_name, print_table, write_results
from megaflux_serve.metrics.exporter import LayerCollector
from megaflux_serve.metrics.snapshot import LayerInfo, Snapshot, Worker
from megaflux_serve.planning import plan_replicas
from megaflux_serve.planning.totals import LayerTotals
from megaflux_serve.planning.workload import scale_counts, split_by_source, zipf_shares
from megaflux_serve.slots import SlotLayout

BENCH = "metrics_host"
MODELS = ((48, 128, 2), (48, 128, 8), (61, 256, 8))
"""MoE layers, experts, ranks."""
SLOTS, TOP_K, TOKENS = 2, 8, 8192


def processor_s(call: Callable[[], object], repeats: int, calls: int) -> float:
    """Seconds of processor time of one call, the median over repeats of so many calls."""
    times = []
    for _ in range(repeats):
        start = time.process_time_ns()
        for _ in range(calls):
            call()
        times.append((time.process_time_ns() - start) / calls / 1e9)
    return float(np.median(times))


def run_model(layers: int, experts: int, ranks: int, folder: Path) -> list[ResultRow]:
    """Measure one model."""
    layout = SlotLayout(experts, ranks, SLOTS)
    rows = scale_counts(zipf_shares(experts, 3.0), ranks * TOKENS, TOP_K)
    plan = plan_replicas(split_by_source(rows, ranks), layout)
    totals = LayerTotals(ranks, experts)
    for _ in range(1000):
        totals.add(plan)
        totals.add_times(60_000, 1_200_000)
    homes = tuple(layout.home_rank.tolist())
    infos = tuple(LayerInfo(f"model.layers.{i}.mlp.experts", homes, SLOTS, TOP_K, 9437184) for i in range(layers))
    memory = {"home_slots": 1 << 35, "replica_slots": 1 << 30, "workspace": 1 << 29}
    worker = Worker("vllm", "0.26.0", "model", 0, ranks, "megakernel", True, True)
    snapshot = Snapshot(worker, infos, [totals.words] * layers, memory, [], time.time())
    for rank in range(ranks):
        replace(snapshot, worker=replace(worker, rank=rank)).write(folder)
    registry = CollectorRegistry()
    registry.register(LayerCollector(folder))
    answer = generate_latest(registry)
    series = sum(not line.startswith(b"#") for line in answer.splitlines())
    measured = (
        ("report_ms", 1e3 * processor_s(lambda: snapshot.write(folder), 15, 20), "ms"),
        ("answer_ms", 1e3 * processor_s(lambda: generate_latest(registry), 15, 5), "ms"),
        ("answer_kb", len(answer) / 1e3, "kB"),
        ("series", series, "1"),
        ("add_us", 1e6 * processor_s(lambda: totals.add(plan), 15, 100), "us"),
    )
    case = {"layers": layers, "experts": experts, "ranks": ranks}
    return [ResultRow(BENCH, case, metric, value, unit) for metric, value, unit in measured]


def main() -> None:
    rows = []
    for model in MODELS:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            rows += run_model(*model, Path(folder))
    write_results(RESULTS / f"{BENCH}.json", rows, RunContext.current(cpu_name(), "numpy", "prometheus-client"))
    print_table(rows, BENCH)


if __name__ == "__main__":
    main()
