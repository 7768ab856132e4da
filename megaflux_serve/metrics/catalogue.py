"""The catalogue: every metric that MegaFlux-serve exports, with its type, unit, labels and meaning.

Decides names. Imports neither torch nor prometheus-client, so that dashboards, rules, ``megaflux top`` and
docs/metrics.md are built from it anywhere. Where figures come from is the business of the modules beside it.

Balance is counted, not averaged: over any window, ratios of rates are exact::

    max / mean      rate(busiest_rank_blocks_total) / rate(mean_rank_blocks_total)
    excess removed  1 - (rate(busiest planned) - rate(balanced)) / (rate(busiest fixed) - rate(balanced))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megaflux_serve.planning.totals import RATIO_BOUNDS, TIME_BOUNDS

PREFIX = "megaflux_"


class Kind(Enum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(Enum):
    """Who exports a metric, and so how its series may be added up.

    LAYERS: expert-parallel rank 0 for all ranks, since every rank carries out the same plan; ``sum`` counts once.
    WORKER: every worker process for its own rank.
    CAPTURE: the process that records finished requests.
    WINDOW: the process that seals and plans optimizer windows.
    """

    LAYERS = "layers"
    WORKER = "worker"
    CAPTURE = "capture"
    WINDOW = "window"


SERVER_LABELS = ("engine", "model")
"""First labels of every metric but those of WINDOW: ``vllm`` or ``sglang``, and the name the model is served as."""


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric.

    Attributes:
        name: as exposed, without the suffixes that Prometheus adds to a histogram.
        kind: its type.
        unit: of the value: ``seconds``, ``bytes``, ``blocks``, or what is counted.
        source: who exports it.
        help: what the value says.
        labels: label -> all values that it can take, or () where that is not a closed set; in the order of the labels.
        buckets: upper bounds of a histogram, ascending, without infinity.
    """

    name: str
    kind: Kind
    unit: str
    source: Source
    help: str
    labels: Mapping[str, tuple[str, ...]]
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Names that a scrape shows for it."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)


def _metric(
    source: Source,
    kind: Kind,
    name: str,
    unit: str,
    help: str,
    *open_labels: str,
    buckets: tuple[float, ...] = (),
    **closed_labels: tuple[str, ...],
) -> Metric:
    labels = dict.fromkeys(_FIRST_LABELS[source] + open_labels, ()) | closed_labels
    return Metric(PREFIX + name, kind, unit, source, help, labels, buckets)


_FIRST_LABELS = {
    Source.LAYERS: SERVER_LABELS,
    Source.WORKER: (*SERVER_LABELS, "rank"),
    Source.CAPTURE: SERVER_LABELS,
    Source.WINDOW: (),
}


_TIMES = tuple(nanoseconds / 1e9 for nanoseconds in TIME_BOUNDS)
_RATIOS = tuple(permille / 1e3 for permille in RATIO_BOUNDS)
_WINDOW_TIMES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

PLACEMENTS = ("fixed", "planned")
DECISIONS = ("replicated", "refused", "not_needed", "no_slots")
WEIGHTS = ("resident", "copied")
MEMORY_USES = ("home_slots", "replica_slots", "workspace")
WAIT_PHASES = (
    *("histogram", "counts", "plan", "forward_start", "rows"),
    *("replica_w1", "replica_w2", "replica_weights", "activations", "results", "pull"),
)
"""Names of the kernels' wait codes, and what the executor ``staged`` waits for."""
DROP_REASONS = ("refused", "storage")
EXECUTORS = ("reference", "staged", "megakernel")
SWITCH = ("true", "false")
HOTTEST_EXPERTS = 8
"""Experts a layer that have a series of their own."""

# ---- what the plans did, all ranks together ----

BATCHES = _metric(Source.LAYERS, Kind.COUNTER, "batches_total", "batches", "Batches that a layer served.", "layer")
TOKENS = _metric(
    Source.LAYERS, Kind.COUNTER, "tokens_total", "tokens", "Tokens that a layer served, on all ranks.", "layer"
)
BLOCKS = _metric(
    Source.LAYERS,
    Kind.COUNTER,
    "blocks_total",
    "blocks",
    "Token blocks computed on all ranks; a block is at most 128 routed rows of one expert.",
    "layer",
)
BUSIEST_RANK_BLOCKS = _metric(
    Source.LAYERS,
    Kind.COUNTER,
    "busiest_rank_blocks_total",
    "blocks",
    "Blocks of the busiest rank of each batch: under the plan that was carried out (planned), and had every expert "
    "stayed at home (fixed).",
    "layer",
    placement=PLACEMENTS,
)
MEAN_RANK_BLOCKS = _metric(
    Source.LAYERS, Kind.COUNTER, "mean_rank_blocks_total", "blocks", "Blocks of each batch over the ranks.", "layer"
)
BALANCED_RANK_BLOCKS = _metric(
    Source.LAYERS,
    Kind.COUNTER,
    "balanced_rank_blocks_total",
    "blocks",
    "Least blocks that the busiest rank of each batch can have: the mean, rounded up to whole blocks.",
    "layer",
)
RANK_BLOCKS = _metric(
    Source.LAYERS,
    Kind.COUNTER,
    "rank_blocks_total",
    "blocks",
    "Blocks that each rank computed (planned), and would have computed without replicas (fixed).",
    "layer",
    "rank",
    placement=PLACEMENTS,
)
EXPERT_ROWS = _metric(
    Source.LAYERS,
    Kind.COUNTER,
    "expert_rows_total",
    "rows",
    f"Rows routed to the {HOTTEST_EXPERTS} experts of each layer that got most of them lately, with the rank that owns "
    "the expert.",
    "layer",
    "expert",
    "home_rank",
)
REPLICAS = _metric(
    Source.LAYERS,
    Kind.COUNTER,
    "replicas_total",
    "replicas",
    "Replicas that computed blocks: their weights were in the slot already (resident), or were copied for the batch.",
    "layer",
    weights=WEIGHTS,
)
REPLICA_BYTES = _metric(
    Source.LAYERS, Kind.COUNTER, "replica_bytes_total", "bytes", "Weights copied into replica slots.", "layer"
)
MOVED_BLOCKS = _metric(
    Source.LAYERS,
    Kind.COUNTER,
    "moved_blocks_total",
    "blocks",
    "Blocks computed by a replica instead of their expert's home.",
    "layer",
)
PLAN_DECISIONS = _metric(
    Source.LAYERS,
    Kind.COUNTER,
    "plan_decisions_total",
    "batches",
    "Batches by what was decided: replicas compute (replicated), the gate found that they do not pay (refused), the "
    "planner found none worth opening (not_needed), or the layer has no replica slots (no_slots).",
    "layer",
    decision=DECISIONS,
)
LOAD_IMBALANCE = _metric(
    Source.LAYERS,
    Kind.HISTOGRAM,
    "load_imbalance_ratio",
    "ratio",
    "Blocks of the busiest rank over the mean, for each layer and batch, rounded down to thousandths; 1 is balanced.",
    placement=PLACEMENTS,
    buckets=_RATIOS,
)
ROUTING_KAPPA = _metric(
    Source.LAYERS,
    Kind.HISTOGRAM,
    "routing_kappa_ratio",
    "ratio",
    "Skew of the routing of each layer and batch: experts times the sum of their squared shares, rounded down to "
    "thousandths; 1 is uniform.",
    buckets=_RATIOS,
)

# ---- every worker ----

PLANNER_SECONDS = _metric(
    Source.WORKER,
    Kind.HISTOGRAM,
    "planner_seconds",
    "seconds",
    "From the start of planning a layer and batch until the plan is known, the wait for other ranks' counts included.",
    buckets=_TIMES,
)
LAYER_SECONDS = _metric(
    Source.WORKER,
    Kind.HISTOGRAM,
    "layer_seconds",
    "seconds",
    "From the start of planning a layer and batch until its rows are combined, waits for other ranks included.",
    buckets=_TIMES,
)
MEMORY = _metric(
    Source.WORKER,
    Kind.GAUGE,
    "memory_bytes",
    "bytes",
    "Memory of all layers: expert weights at home, replica slots, and the buffers that layers share (workspace).",
    use=MEMORY_USES,
)
WAIT_TIMEOUTS = _metric(
    Source.WORKER,
    Kind.COUNTER,
    "wait_timeouts_total",
    "timeouts",
    "Waits for another rank that ended without an answer, by what was waited for; the server cannot go on after one.",
    phase=WAIT_PHASES,
)
LAST_REPORT = _metric(
    Source.WORKER,
    Kind.GAUGE,
    "last_report_timestamp_seconds",
    "seconds",
    "When the worker last reported, in Unix time.",
)
BUILD_INFO = _metric(
    Source.WORKER,
    Kind.GAUGE,
    "build_info",
    "info",
    "Always 1; the labels say what the worker runs, and with which options.",
    "version",
    "engine_version",
    executor=EXECUTORS,
    sticky=SWITCH,
    gate=SWITCH,
)
RANKS = _metric(Source.WORKER, Kind.GAUGE, "ranks", "ranks", "Expert-parallel ranks of the worker's group.")
LAYERS = _metric(Source.WORKER, Kind.GAUGE, "layers", "layers", "Layers of routed experts that the worker serves.")
REPLICA_SLOTS = _metric(
    Source.WORKER, Kind.GAUGE, "replica_slots", "slots", "Replica slots of each layer on the worker's rank."
)

# ---- capture ----

CAPTURE_RECORDS = _metric(
    Source.CAPTURE, Kind.COUNTER, "capture_records_total", "records", "Finished requests whose routes were stored."
)
CAPTURE_TOKENS = _metric(
    Source.CAPTURE, Kind.COUNTER, "capture_tokens_total", "tokens", "Tokens of the stored requests."
)
CAPTURE_BYTES = _metric(
    Source.CAPTURE, Kind.COUNTER, "capture_bytes_total", "bytes", "Bytes written to the replay store."
)
CAPTURE_DROPPED = _metric(
    Source.CAPTURE,
    Kind.COUNTER,
    "capture_dropped_total",
    "records",
    "Finished requests whose routes were not stored: they break the record's contract (refused), or the disk failed "
    "(storage).",
    reason=DROP_REASONS,
)

# ---- windows ----

WINDOW_SEAL_SECONDS = _metric(
    Source.WINDOW, Kind.HISTOGRAM, "window_seal_seconds", "seconds", "Time to seal a window.", buckets=_WINDOW_TIMES
)
WINDOW_PLACEMENT_SECONDS = _metric(
    Source.WINDOW,
    Kind.HISTOGRAM,
    "window_placement_seconds",
    "seconds",
    "Time to repair the expert placement for a window.",
    buckets=_WINDOW_TIMES,
)
WINDOW_PLANNING_SECONDS = _metric(
    Source.WINDOW,
    Kind.HISTOGRAM,
    "window_planning_seconds",
    "seconds",
    "Time to plan a window, placement and schedule together.",
    buckets=_WINDOW_TIMES,
)
WINDOW_TRAJECTORIES = _metric(
    Source.WINDOW,
    Kind.COUNTER,
    "window_trajectories_total",
    "trajectories",
    "Trajectories of the windows that were planned.",
)
WINDOW_MOVED_EXPERTS = _metric(
    Source.WINDOW,
    Kind.COUNTER,
    "window_moved_experts_total",
    "experts",
    "Experts that change their slot for a planned window, in all layers.",
)
WINDOW_MIGRATION_SECONDS = _metric(
    Source.WINDOW,
    Kind.HISTOGRAM,
    "window_migration_seconds",
    "seconds",
    "Time to move experts into the slots that a window's placement gives them, on this rank.",
    buckets=_WINDOW_TIMES,
)
WINDOW_MIGRATED_BYTES = _metric(
    Source.WINDOW,
    Kind.COUNTER,
    "window_migrated_bytes_total",
    "bytes",
    "Bytes of experts, weights and optimizer state, that this rank received from others.",
)
WINDOW_ROWS = _metric(
    Source.WINDOW, Kind.GAUGE, "window_rows", "rows", "Execution rows of the last window that was planned."
)
WINDOW_EXCESS_REMOVED = _metric(
    Source.WINDOW,
    Kind.GAUGE,
    "window_excess_removed_ratio",
    "ratio",
    "Part of global first-fit's cost above the lower bound that the last plan removes, 0 to 1.",
)
WINDOW_EXPERT_EXCESS = _metric(
    Source.WINDOW,
    Kind.GAUGE,
    "window_expert_excess_ratio",
    "ratio",
    "Expert work of the busiest ranks above uniform work that the last plan leaves, over the window and row by row.",
    scope=("window", "row_local"),
)

CATALOGUE: tuple[Metric, ...] = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
"""Every metric, in the order of this file."""
BY_NAME = {metric.name: metric for metric in CATALOGUE}
