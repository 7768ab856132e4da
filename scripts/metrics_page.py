"""Write docs/metrics.md from the catalogue of metrics and a result file; a test holds the page to them.

python scripts/metrics_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.harness import documents
from benchmarks.harness.documents import provenance, rows, table, value
from megaflux_serve.durable import write_atomically
from megaflux_serve.metrics.catalogue import CATALOGUE, Kind, Metric, Source

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
SECTIONS = {
    Source.LAYERS: (
        "Plans",
        "What the plans of all layers did. Every rank carries out the same plan, so expert-parallel rank 0 exports "
        "these for all ranks, and `sum` counts nothing twice.",
    ),
    Source.WORKER: ("Workers", "Every worker process exports these for its own rank."),
    Source.CAPTURE: (
        "Capture",
        "Counted where finished requests are recorded: in vLLM's front end, in SGLang's schedulers. Only with the "
        "option `capture`.",
    ),
    Source.WINDOW: (
        "Windows",
        "Counted where windows are sealed and planned; see [below](#windows-of-rl-training) how they are exported.",
    ),
}
HEAD = """<!-- Written by scripts/metrics_page.py from megaflux_serve/metrics/catalogue.py: change those. -->
# Metrics

A server with the backend `megaflux` shows what replication does on its own `/metrics`, beside the engine's series.
There is nothing to set up: vLLM always answers `/metrics`, SGLang with `--enable-metrics`. `"metrics": false` among the
options turns ours off.

Balance is counted, not averaged, so that ratios of rates are exact over any window and any set of layers:

```promql
# blocks of the busiest rank over the mean: 1 is balanced
sum(rate(megaflux_busiest_rank_blocks_total{placement="planned"}[5m])) / sum(rate(megaflux_mean_rank_blocks_total[5m]))

# part of the busiest rank's excess that replicas removed, 0 to 1
(  sum(rate(megaflux_busiest_rank_blocks_total{placement="fixed"}[5m]))
 - sum(rate(megaflux_busiest_rank_blocks_total{placement="planned"}[5m])))
/ (sum(rate(megaflux_busiest_rank_blocks_total{placement="fixed"}[5m]))
 - sum(rate(megaflux_balanced_rank_blocks_total[5m])))

# part of the replicas whose weights were there already
sum(rate(megaflux_replicas_total{weights="resident"}[5m])) / sum(rate(megaflux_replicas_total[5m]))
```

Dashboards, alerts and `megaflux top` are built from the same catalogue.
"""
TAIL = """
## Where the figures come from

With the executor `megakernel` the plan never reaches the host, and a batch may be the replay of a captured graph,
which runs no Python. So the device adds: after it has published a plan, the planner's block, which is idle while the
others route, adds the batch to the layer's totals (`megaflux_kernels/totals.py`). A thread of the worker copies the
totals once a second, on a stream that nothing else uses, and nothing waits for it. Times are stamps of the GPU's
global timer, one when planning starts, one when the plan is there, one by the last block of the combine, for every
batch. A batch's layer time is added with the layer's next batch, and a rank without rows in a batch adds none.

With `reference` and `staged` the host plans, and adds what it planned. Their layer time is measured on a CPU alone.

`megaflux_serve.planning.totals.LayerTotals` is the specification of the totals; a test on a GPU holds the device to it,
word for word.

Each worker writes its totals into a file of the folder that `MEGAFLUX_METRICS_DIR` names; the server's front end
makes one in memory if you name none, and turns the files into series when it is asked. So the engine's own metrics
stay in the mode that they are in, and `PROMETHEUS_MULTIPROC_DIR` is not needed for ours. A worker that has ended
leaves its last figures; `megaflux_last_report_timestamp_seconds` tells.

Where ranks are spread over several servers, as with external load balancing, each server shows its own workers, and the
one with rank 0 the plans.

Dummy batches count: those of an engine's start, of graph capture, and of idle data-parallel ranks. Batches that go to
the engine's own kernels do not: by default in vLLM with the megakernel, most of decode (option `min_tokens`).

## What they cost

On the GPU no launch is added: the planner's free block adds E + 2 P + some 30 words, and the combine's last block
stores one. That the words are right was tested on an H200 (`benchmarks/gpu_metrics.sh totals`). What they add to a
layer's time, with reports four times as often as a server's (`benchmarks/gpu_metrics.sh overhead`):

LAYER_COSTS

On the host, in processor time: a worker reports once a second, the front end answers as often as Prometheus asks, and
only the executors that plan on the host add batches there.

HOST_COSTS

## How many series

`layer` is the layer's number in the model. With L layers, P ranks and E experts, rank 0 exports at most L * (23 + 2 P)
counters and 57 series of histograms, each worker 57 series. `expert_rows_total` has the hottest 8 experts of a
layer at any time, by the rows of the last one to two minutes, so over days up to L * E.

## Windows of RL training

Windows are planned in the trainer's process, or by a command. In a process of your own, report to prometheus-client's
default registry:

```python
import time

from megaflux_serve.capture import seal
from megaflux_serve.metrics.events import window_migrated, window_planned, window_sealed
from megaflux_serve.migration import TransferPlan, migrate
from megaflux_serve.routepack import plan_window

start = time.perf_counter()
window = seal(store, "step-12")
window_sealed(time.perf_counter() - start)
plan = plan_window(window.counts, window.lengths, topology, options)
window_planned(plan)
window_migrated(migrate(state, TransferPlan(plan.before, plan.placement), group))
```

A command ends before Prometheus could ask it, so `megaflux replay seal` and `megaflux routepack plan` take
`--metrics-file FILE.prom`: a file in the folder of the node exporter's textfile collector, to which each command adds.
"""


def page() -> str:
    """The document."""
    parts = [HEAD]
    for source, (title, text) in SECTIONS.items():
        parts.append(f"\n## {title}\n\n{text}\n\n| Name | Type | Labels | Meaning |\n| --- | --- | --- | --- |\n")
        parts += [line(metric) for metric in CATALOGUE if metric.source is source]
    buckets = [
        f"- `{metric.name}`: {', '.join(f'{bound:g}' for bound in metric.buckets)}\n"
        for metric in CATALOGUE
        if metric.kind is Kind.HISTOGRAM
    ]
    tail = TAIL.replace("LAYER_COSTS\n", layer_costs()).replace("HOST_COSTS\n", host_costs())
    return "".join([*parts, "\nBuckets of the histograms:\n\n", *buckets, tail])


def layer_costs() -> str:
    """What ``bench_metrics_overhead`` measured on GPUs."""
    bench = "metrics_overhead"
    if not (documents.RESULTS / f"{bench}.json").exists():
        return "Not measured yet.\n"
    lines = []
    for row in rows(bench, "overhead_pct"):
        case = row["case"]
        error = value(bench, "overhead_error_pct", **case)
        without = value(bench, "latency_ms", variant="without", **case)
        cells = [LAUNCHES[case["mode"]], f"{case['tokens_per_rank']:,}", f"{without:.3f}"]
        lines.append([*cells, f"{row['value']:+.2f} % ± {error:.2f}"])
    head = ["launches", "tokens a rank", "a layer without metrics, ms", "with metrics, 95 % interval"]
    return table(head, lines) + provenance(bench)


def host_costs() -> str:
    """What ``bench_metrics_host`` measured."""
    lines = []
    for row in rows("metrics_host", "report_ms"):
        case = row["case"]
        figures = [value("metrics_host", name, **case) for name in ("series", "report_ms", "answer_ms", "add_us")]
        cells = [str(case[key]) for key in ("layers", "experts", "ranks")]
        lines.append([*cells, *(form.format(v) for form, v in zip(FORMS, figures, strict=True))])
    head = ["MoE layers", "experts", "ranks", "series", "a report, ms", "an answer, ms", "a batch on the host, µs"]
    return table(head, lines) + provenance("metrics_host")


LAUNCHES = {"graph": "one captured graph", "eager": "one by one"}
FORMS = ("{:.0f}", "{:.2f}", "{:.0f}", "{:.0f}")


def line(metric: Metric) -> str:
    """One row of a table."""
    labels = [f"`{label}`" + (f" ({', '.join(values)})" if values else "") for label, values in metric.labels.items()]
    return f"| `{metric.name}` | {metric.kind.value} | {', '.join(labels)} | {metric.help} |\n"


if __name__ == "__main__":
    write_atomically(PAGE, page().encode())
