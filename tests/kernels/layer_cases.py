"""Layers, batches and exact results that the GPU tests of the megakernel executor share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megaflux_kernels.worklist import LayerShape
from torch import Tensor

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors.device import DeviceExecutor
from megaflux_serve.layer import LayerReport, ReplicatedMoE
from megaflux_serve.routing import CountArray, RoutingBatch, expert_counts
from megaflux_serve.workspace import ExpertWeights, Workspace

LIMIT = 0.005  # relative L2 of a layer's output; results and their sum each round to BF16 at 0.0024


@dataclass(frozen=True)
class DeviceCase:
    """A layer on P ranks; weights, rows and routes depend on nothing but their numbers.

    Args:
        num_experts, num_ranks, num_slots, hidden, intermediate, top_k: E, P, s, H, I, k.
        max_tokens: rows of the largest batch of a rank.
    """

    num_experts: int
    num_ranks: int
    num_slots: int
    hidden: int
    intermediate: int
    top_k: int
    max_tokens: int

    def shape(self, num_slots: int) -> LayerShape:
        """What the kernels are compiled for, with this many replica slots."""
        widths = (self.hidden, self.intermediate, self.top_k, self.max_tokens)
        return LayerShape(self.num_ranks, self.num_experts, num_slots, *widths)

    def weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """(w13 BF16 [2I, H], w2 BF16 [H, I])."""
        generator = torch.Generator("cuda").manual_seed(expert)
        w13 = torch.randn(2 * self.intermediate, self.hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
        w2 = torch.randn(self.hidden, self.intermediate, generator=generator, device="cuda", dtype=torch.bfloat16)
        return w13 * self.hidden**-0.5, w2 * self.intermediate**-0.5

    def layer(
        self,
        executor: DeviceExecutor,
        config: MegaFluxConfig,
        observers: Sequence[Callable[[LayerReport], None]] = (),
        workspace: Workspace | None = None,
    ) -> ReplicatedMoE:
        """The layer on the executor's local ranks, with replica slots of its own unless ``workspace`` has some."""
        layout = config.slot_layout(self.num_experts, self.num_ranks)
        home = []
        for rank in executor.local_ranks:
            pairs = [self.weights(int(expert)) for expert in layout.home_experts(rank)]
            home.append(ExpertWeights(*(torch.stack(stack) for stack in zip(*pairs, strict=True))))
        workspace = workspace or Workspace(layout.num_replica_slots, config.sticky)
        return ReplicatedMoE("moe", layout, config, executor, workspace, home, observers)

    def batch(self, turn: int, rank: int, tokens: int) -> RoutingBatch:
        """Batch number ``turn`` of a rank: skewed routes, with other favourites each time."""
        rng = np.random.default_rng(1000 * turn + rank)
        favourites = np.random.default_rng(turn).permutation(self.num_experts)
        logits = -1.2 * np.log1p(favourites) * (turn % 3) + rng.gumbel(size=(tokens, self.num_experts))
        ids = np.argsort(-logits, axis=1)[:, : self.top_k]
        generator = torch.Generator("cuda").manual_seed(1000 * turn + rank)
        hidden = torch.randn(tokens, self.hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
        weights = torch.rand(tokens, self.top_k, generator=generator, device="cuda")
        return RoutingBatch(hidden, torch.from_numpy(ids).cuda(), weights / weights.sum(1, keepdim=True))

    def batches(self, turn: int, tokens: Sequence[int] | None = None) -> list[RoutingBatch]:
        """Batch number ``turn`` of every rank, of unequal sizes unless ``tokens`` says otherwise."""
        sizes = tokens or [self.max_tokens - 7 * ((rank + turn) % 5) for rank in range(self.num_ranks)]
        return [self.batch(turn, rank, size) for rank, size in enumerate(sizes)]

    def counts(self, batches: Sequence[RoutingBatch]) -> CountArray:
        """int64 [P, E]."""
        return np.stack([expert_counts(batch.ids_array(), self.num_experts) for batch in batches])

    def errors(self, batches: Sequence[RoutingBatch], outputs: Sequence[Tensor]) -> list[float]:
        """Relative L2 of every output against float64; 0 for an empty one, NaN if a value is."""
        exact = [torch.zeros(batch.hidden.shape, dtype=torch.float64, device="cuda") for batch in batches]
        for expert in range(self.num_experts):
            w13, w2 = (weights.double() for weights in self.weights(expert))
            for batch, total in zip(batches, exact, strict=True):
                token, choice = (batch.topk_ids == expert).nonzero(as_tuple=True)
                gate, up = (batch.hidden[token].double() @ w13.T).chunk(2, dim=1)
                result = (torch.nn.functional.silu(gate) * up) @ w2.T
                total.index_add_(0, token, result * batch.topk_weights[token, choice, None].double())
        return [
            float((output.double() - total).norm() / total.norm()) if total.numel() else 0.0
            for output, total in zip(outputs, exact, strict=True)
        ]


EIGHT_RANKS = {
    "eight ranks, top-8": DeviceCase(32, 8, 2, 1024, 768, 8, 700),
    "eight ranks, the paper's widths": DeviceCase(64, 8, 2, 7168, 2048, 8, 300),
}
"""On one to eight GPUs, which then hold several ranks each."""


def assert_same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """BF16 tensors that are equal bit for bit and hold no NaN."""
    for a, b in zip(left, right, strict=True):
        assert not torch.isnan(a).any()
        different = (a.view(torch.int16) != b.view(torch.int16)).nonzero()
        assert len(different) == 0, f"{len(different)} of {a.numel()} values differ, first at {different[0].tolist()}"


__all__ = ["EIGHT_RANKS", "LIMIT", "DeviceCase", "assert_same_bits"]
