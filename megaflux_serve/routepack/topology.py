"""Topology and cost model: the machine that a window is planned for, and what work costs on it.

Decides which shapes are allowed. Knows no demand. Slots, shards, rows and cells are those of the RoutePack paper's
Table 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaflux_serve.errors import ConfigError

LARGEST = 2**31 - 1
"""Of what is counted in 32 bits."""


@dataclass(frozen=True)
class Topology:
    """Parallel shape of the training job.

    Attributes:
        num_ranks: P, expert-parallel ranks of a communicator.
        num_slots: D, data-parallel slots; every row has one cell for each.
        capacity: C, tokens that a cell holds at most.
        num_shards: G, EDP shards; must divide D. Shard g has slots ``g * D/G .. (g + 1) * D/G - 1``.
        pipeline_stages: PP. A pipeline (PP > 1) needs at least 2 PP rows; without one, a single row is legal.

    Raises:
        ConfigError: naming the first field out of range.
    """

    num_ranks: int
    num_slots: int
    capacity: int
    num_shards: int = 1
    pipeline_stages: int = 1

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_slots", "capacity", "num_shards", "pipeline_stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= LARGEST:
                raise ConfigError(name, value, f"an integer of at least 1 and at most {LARGEST}")
        if self.num_slots % self.num_shards:
            raise ConfigError("num_shards", self.num_shards, f"a divisor of the {self.num_slots} slots")

    @property
    def slots_per_shard(self) -> int:
        """D / G, the cells that one row-shard synchronises."""
        return self.num_slots // self.num_shards

    @property
    def min_rows(self) -> int:
        """The pipeline floor: 2 PP, or 1 without a pipeline (section 3.1)."""
        return 2 * self.pipeline_stages if self.pipeline_stages > 1 else 1


@dataclass(frozen=True)
class DenseStage:
    """One dense-side stage type s (attention, dense FFN), Eq. 2.

    The unit of cost is C routed rows of expert work on one rank; a cell's cost is
    ``linear * tokens / C + quadratic * sum((t_i / C)**2)``.

    Attributes:
        name: shown in reports.
        linear: alpha_s, at least 0.
        quadratic: beta_s, at least 0.
    """

    name: str
    linear: float
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        for field in ("linear", "quadratic"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigError(f"{self.name}.{field}", getattr(self, field), "a finite number of at least 0")


@dataclass(frozen=True)
class CostModel:
    """What a row costs (Eq. 12 to 16), and two terms beyond the paper.

    Attributes:
        stages: dense-side stages; their maxima over a shard's cells are added, since stages run one after another.
        communication: cost of one token copy that a rank receives, in routed rows of expert work; at least 0, 0 leaves
            the term out. Added per layer as the busiest rank's copies (``communication.rank_copies``).
        pipeline_bubble: add the fill and drain of a pipeline, (PP - 1) times the shard's most expensive row.
    """

    stages: tuple[DenseStage, ...]
    communication: float = 0.0
    pipeline_bubble: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.communication < 64:
            raise ConfigError("communication", self.communication, "0 or more, below 64 routed rows a copy")


def stages_from_shape(
    num_layers: int, hidden: int, intermediate: int, attention_width: int, capacity: int
) -> tuple[DenseStage, ...]:
    """Dense stages of a plain transformer from its operation counts, for jobs without a calibration.

    Full causal attention with Q, K, V and output projections of ``attention_width`` columns; one routed row is the
    three products of a gated expert, ``6 * hidden * intermediate`` operations. Kernel efficiency is taken as equal.

    Args:
        num_layers: layers with attention.
        hidden: H, width of the residual stream.
        intermediate: I, width of one expert.
        attention_width: query heads times head width.
        capacity: C, tokens of a cell.

    Raises:
        ConfigError: naming the first of them below 1.
    """
    sizes = {
        "num_layers": num_layers,
        "hidden": hidden,
        "intermediate": intermediate,
        "attention_width": attention_width,
        "capacity": capacity,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(name, value, "an integer of at least 1")
    row = 6 * hidden * intermediate
    projections = 8 * hidden * attention_width
    pairs = 2 * attention_width
    return (DenseStage("attention", num_layers * projections / row, num_layers * pairs * capacity / row),)
