"""Small MoE layers and routings that the tests of routes, executors and the layer share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors import ReferenceExecutor
from megaflux_serve.layer import LayerReport, ReplicatedMoE
from megaflux_serve.planning.plan import ReplicaPlan, fixed_plan
from megaflux_serve.routing import CountArray, RoutingBatch, expert_counts
from megaflux_serve.slots import SlotLayout
from megaflux_serve.workspace import ExpertWeights, Workspace


@dataclass(frozen=True)
class MoECase:
    """Weights of all experts, w13 [E, 2I, H] and w2 [E, H, I], and one batch a rank."""

    layout: SlotLayout
    w13: Tensor
    w2: Tensor
    batches: list[RoutingBatch]

    def home(self, rank: int) -> ExpertWeights:
        """The weights that a rank owns, in memory of their own."""
        experts = torch.from_numpy(self.layout.home_experts(rank)).long()
        return ExpertWeights(self.w13[experts], self.w2[experts])

    def counts(self) -> CountArray:
        """int64 [P, E]."""
        return np.stack([expert_counts(batch.ids_array(), self.layout.num_experts) for batch in self.batches])

    def reference_layer(
        self, config: MegaFluxConfig, observers: Sequence[Callable[[LayerReport], None]] = ()
    ) -> ReplicatedMoE:
        """A layer with all ranks in this process."""
        num_ranks = self.layout.num_ranks
        workspace = Workspace(self.layout.num_replica_slots, config.sticky)
        home = [self.home(rank) for rank in range(num_ranks)]
        return ReplicatedMoE("moe", self.layout, config, ReferenceExecutor(num_ranks), workspace, home, observers)

    def without_replicas(self) -> "MoECase":
        """The same layer with s = 0."""
        layout = self.layout
        return replace(self, layout=SlotLayout(layout.num_experts, layout.num_ranks, 0, layout.home_rank))


def skewed_ids(
    rng: np.random.Generator, tokens: int, num_experts: int, top_k: int, skew: float = 1.5
) -> NDArray[np.int64]:
    """[tokens, top_k] distinct ids; expert e is e ** -skew times as likely as the first, in a shuffled order."""
    logits = -skew * np.log1p(np.arange(num_experts)) + rng.gumbel(size=(tokens, num_experts))
    return np.argsort(-logits, axis=1)[:, :top_k]


def make_case(
    tokens: Sequence[int],
    *,
    experts_per_rank: int = 4,
    replica_slots: int = 2,
    top_k: int = 2,
    hidden: int = 24,
    intermediate: int = 16,
    dtype: torch.dtype = torch.float32,
    shuffled_homes: bool = False,
    seed: int = 0,
) -> MoECase:
    """A layer whose rank r brings ``tokens[r]`` rows, with low expert ids popular, so that rank 0 is the busiest."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    num_ranks, num_experts = len(tokens), len(tokens) * experts_per_rank
    home = rng.permutation(np.arange(num_experts) % num_ranks) if shuffled_homes else None
    layout = SlotLayout(num_experts, num_ranks, replica_slots if num_ranks > 1 else 0, home)
    w13 = torch.randn(num_experts, 2 * intermediate, hidden, generator=generator) / hidden**0.5
    w2 = torch.randn(num_experts, hidden, intermediate, generator=generator) / intermediate**0.5
    batches = [
        RoutingBatch(
            torch.randn(num, hidden, generator=generator).to(dtype),
            torch.from_numpy(skewed_ids(rng, num, num_experts, top_k)).int(),
            torch.rand(num, top_k, generator=generator),
        )
        for num in tokens
    ]
    return MoECase(layout, w13.to(dtype), w2.to(dtype), batches)


@st.composite
def routed_plans(draw: st.DrawFn) -> tuple[ReplicaPlan, list[NDArray[np.int64]]]:
    """Any legal plan, not only what a planner would choose, and the [M, k] ids of every rank that it is for."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4]))
    num_experts = num_ranks * draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(3, num_experts)))
    block_rows = draw(st.sampled_from([1, 2, 3, 5, 128]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = [
        skewed_ids(rng, draw(st.sampled_from([0, 1, 7, 20])), num_experts, top_k, draw(st.sampled_from([0.0, 2.0])))
        for _ in range(num_ranks)
    ]
    slots = draw(st.integers(0, num_experts - num_experts // num_ranks))
    layout = SlotLayout(num_experts, num_ranks, slots, rng.permutation(np.arange(num_experts) % num_ranks))
    counts = np.stack([expert_counts(array, num_experts) for array in ids])
    return random_plan(rng, counts, layout, block_rows), ids


def random_plan(rng: np.random.Generator, counts: CountArray, layout: SlotLayout, block_rows: int) -> ReplicaPlan:
    """A legal plan in which every replica slot holds an expert and every block goes to a random rank that has it."""
    fixed = fixed_plan(counts, layout, block_rows)
    replicas = layout.no_replicas()
    for rank in range(layout.num_ranks):
        away = np.flatnonzero(layout.home_rank != rank)
        replicas[rank] = rng.permutation(away)[: layout.num_replica_slots]
    holds = layout.expert_to_index(replicas) >= 0
    blocks = np.zeros_like(fixed.blocks)
    for expert, number in enumerate(fixed.blocks.sum(axis=1)):
        np.add.at(blocks[expert], rng.choice(np.flatnonzero(holds[expert]), size=number), 1)
    transfers = [(replicas[r, i], r, i) for r, i in np.ndindex(*replicas.shape) if blocks[replicas[r, i], r] > 0]
    plan = replace(
        fixed, blocks=blocks, replica_experts=replicas, transfers=np.array(transfers, np.int32).reshape(-1, 3)
    )
    plan.check()
    return plan
