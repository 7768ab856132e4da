"""What replication would do to the routing of a trace: plan every batch of every layer and keep what came out.

Decides how a trace becomes batches and how a plan is judged. Knows no files, tables or pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megaflux_serve.cli.summary import BatchOutcome
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.planning import (
    GateCosts,
    ReplicaPlan,
    apply_gate,
    fixed_rank_rows,
    plan_replicas,
    rank_rows,
)
from megaflux_serve.planning.workload import SEEDS, permute, rebin, scale_counts
from megaflux_serve.routing import CountArray, kappa
from megaflux_serve.slots import IntArray, SlotLayout
from megaflux_serve.trace import MAX_COUNT, MAX_EXPERTS, LayerTrace


@dataclass(frozen=True)
class Resize:
    """Bring every batch to another size, and to another number of experts, before it is planned (appendix B.1).

    Attributes:
        tokens_per_rank: M, tokens of every rank, 1 to ``MAX_COUNT``.
        top_k: experts a token, 1 to E.
        num_experts: E after rebinning, ``top_k`` to ``MAX_EXPERTS``; None keeps the experts that the trace has.
            Rebinning keeps the distribution of loads and not the identity of experts: they are permuted with a fixed
            seed.
    """

    tokens_per_rank: int
    top_k: int
    num_experts: int | None = None

    def __post_init__(self) -> None:
        for flag, value, most in (
            ("--tokens-per-rank", self.tokens_per_rank, MAX_COUNT),
            ("--top-k", self.top_k, MAX_EXPERTS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(flag, value, f"an integer of at least 1 and at most {most}")
        if self.num_experts is not None and not self.top_k <= self.num_experts <= MAX_EXPERTS:
            allowed = f"an integer of at least the {self.top_k} experts a token and at most {MAX_EXPERTS}"
            raise ConfigError("--rebin", self.num_experts, allowed)

    def apply(self, layer: str, counts: CountArray, num_ranks: int) -> CountArray:
        """int64 [E] that sum to P * M * k, from the int64 [E0] rows of a batch.

        Raises:
            InputError: naming the layer, when fewer than k experts have rows.
        """
        num_tokens = num_ranks * self.tokens_per_rank
        shares = counts if self.num_experts is None or not counts.any() else rebin(counts, self.num_experts)
        with_rows = np.count_nonzero(shares)
        if with_rows < self.top_k:
            allowed = f"at least {self.top_k}, the experts of a token, to scale it"
            raise InputError(f"layer {layer}", f"a batch has rows for {with_rows} experts", allowed)
        scaled = scale_counts(shares, num_tokens, self.top_k)
        return scaled if self.num_experts is None else permute(scaled, SEEDS[0])


@dataclass(frozen=True)
class Scenario:
    """What to plan for.

    Attributes:
        num_ranks: expert-parallel ranks P, at least 2; must divide the experts.
        config: slots, block size, planner options, residency and gate, as a server takes them.
        batch_tokens: tokens of all ranks in a batch; None takes the whole trace as one batch.
        resize: another size for every batch; None plans the trace as it is.
    """

    num_ranks: int
    config: MegaFluxConfig
    batch_tokens: int | None = None
    resize: Resize | None = None

    def layout(self, layer: LayerTrace) -> SlotLayout:
        """Ranks, experts and slots of a layer.

        Raises:
            ConfigError: naming the flag, when the layer's experts do not fit ranks and slots.
        """
        experts, ranks, slots = layer.num_experts, self.num_ranks, self.config.replica_slots
        if self.resize is not None and self.resize.num_experts is not None:
            experts = self.resize.num_experts
        if ranks < 2 or experts % ranks:
            divisors = ", ".join(str(n) for n in range(2, experts + 1) if experts % n == 0)
            raise ConfigError("--ranks", ranks, f"divisors of the {experts} experts of layer {layer.name}: {divisors}")
        others = experts - experts // ranks
        if slots > others:
            raise ConfigError("--slots", slots, f"0 to {others}, the experts that a rank does not own")
        return SlotLayout(experts, ranks, slots)


@dataclass(frozen=True)
class Step:
    """One batch of one layer, planned; ``fresh_transfers`` is what it would move if no replica were kept."""

    outcome: BatchOutcome
    fresh_transfers: int


def forecast_layer(layer: LayerTrace, scenario: Scenario) -> Iterator[Step]:
    """Plan a layer batch after batch, in the order of the trace.

    Raises:
        ConfigError: naming the flag, when the layer does not fit the scenario.
        InputError: the layer cannot be cut into the batches that were asked for, or a batch not be scaled.
    """
    config, layout = scenario.config, scenario.layout(layer)
    resident = nothing = layout.no_replicas()
    for counts in layer.batches(scenario.batch_tokens):
        if scenario.resize is not None:
            counts = scenario.resize.apply(layer.name, counts, scenario.num_ranks)
        histogram = split_over_ranks(counts, scenario.num_ranks)
        fresh, plan = (
            gated(plan_replicas(histogram, layout, config.planner_options, held), config.gate_costs, held)
            for held in (nothing, resident)
        )
        yield Step(judge(plan, config.gate_costs), len(fresh.transfers))
        if config.sticky:
            resident = plan.replica_experts


def gated(plan: ReplicaPlan, costs: GateCosts | None, resident: IntArray) -> ReplicaPlan:
    """The plan after the gate; without costs every plan passes."""
    return plan if costs is None else apply_gate(plan, costs, resident)


def split_over_ranks(counts: CountArray, num_ranks: int) -> CountArray:
    """int64 [P, E]: every expert's rows dealt evenly to the source ranks, the remainder to the lowest.

    A plan depends on the sum over source ranks only, so this choice changes no figure of a forecast.
    """
    ranks = np.arange(num_ranks)[:, None]
    return counts // num_ranks + (ranks < counts % num_ranks)


def judge(plan: ReplicaPlan, costs: GateCosts | None) -> BatchOutcome:
    """The figures of a plan; loads in routed rows, times of the busiest rank.

    Without costs a time is a number of token blocks. With costs it is nanoseconds, and the plan is charged planning and
    exposed transfers, a gated plan its planning.
    """
    fixed_blocks = int(plan.fixed_loads.max())
    return BatchOutcome(
        kappa=kappa(plan.counts.sum(axis=0)),
        fixed_loads=tuple(fixed_rank_rows(plan).tolist()),
        loads=tuple(rank_rows(plan).tolist()),
        replicas=plan.num_replicas,
        blocks_moved=plan.blocks_moved,
        transfers=len(plan.transfers),
        fixed_time=fixed_blocks if costs is None else fixed_blocks * costs.block_ns,
        time=plan.max_load if costs is None else costs.layer_ns(plan),
        gated=plan.gated,
    )
