"""Executor: what it means to carry out a plan, and the arithmetic that every executor in PyTorch shares.

Decides the contract and the value of a row. Knows neither how rows and weights reach a rank nor how the plan was found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.routes import Pool
from megaflux_serve.routing import CountArray, RoutingBatch
from megaflux_serve.workspace import ExpertSlots


class Executor(ABC):
    """Runs a planned MoE layer for the *local ranks* of this process: all of them, or one.

    ::

        counts = executor.gather_counts([expert_counts(ids, num_experts) for ids in local_ids])  # int64 [P, E]
        plan = plan_replicas(counts, layout)
        outputs = executor.execute(batches, plan, slots)  # [M, H] for each local rank

    Every rank makes the same calls in the same order, ranks without rows too. Arguments and results that are sequences
    hold one element a local rank, in the order of ``local_ranks``.

    Attributes:
        kind: the option that asks for it.
        num_ranks: P.
        local_ranks: the ranks that this process holds, ascending.
    """

    kind: str
    num_ranks: int
    local_ranks: Sequence[int]

    @abstractmethod
    def gather_counts(self, local_counts: Sequence[CountArray]) -> CountArray:
        """Exchange histograms.

        Args:
            local_counts: int64 [n] a local rank: its E counts, and after them what else has to be known everywhere.

        Returns:
            int64 [P, n], equal on every rank.
        """

    @abstractmethod
    def execute(self, batches: Sequence[RoutingBatch], plan: ReplicaPlan, slots: Sequence[ExpertSlots]) -> list[Tensor]:
        """Copy the replica weights that the plan transfers, compute every routed row once, and combine.

        Args:
            batches: rows and routes a local rank; any of them may be empty. Their counts are those of the plan.
            plan: equal on every rank.
            slots: weights a local rank; those of the plan's resident replicas are already there.

        Returns:
            [M, H] in the dtype of ``hidden``, a local rank: for each token the sum over its k experts, in top-k order.
        """

    def timeouts(self) -> list[str]:
        """What was waited for when a wait for another rank failed; none where no rank waits for another."""
        return []


def compute_pool(rows: Tensor, pool: Pool, slots: ExpertSlots, block_rows: int) -> Tensor:
    """The experts' results for the rows of one rank's pool, block by block.

    A block is computed at the fixed shape [block_rows, H] whatever it holds (padding is zero) and always from the same
    buffer, so that the same rows with the same weights give the same bits on every rank and under every plan (given the
    same number of threads). FC1 and FC2 are matrix products in the weights' dtype with float32 accumulation, each
    rounded once; SwiGLU is evaluated in float32 and rounded once.

    Args:
        rows: [n, H], the valid rows in pool order.
        pool: blocks of the rank.
        slots: weights of the rank.
        block_rows: rows of a full block.

    Returns:
        [n, H], in the order of ``rows``.
    """
    results = torch.empty_like(rows)
    # A product with one row takes torch's matrix-vector path, whose bits depend on where the weights lie in memory.
    block = rows.new_zeros((max(block_rows, 2), rows.shape[1]))
    start = 0
    for slot, num_rows in zip(pool.slot.tolist(), pool.num_rows.tolist(), strict=True):
        w13, w2 = slots.expert(slot)
        block[:num_rows] = rows[start : start + num_rows]
        block[num_rows:] = 0
        gate, up = F.linear(block, w13).float().chunk(2, dim=-1)
        activated = (F.silu(gate) * up).to(rows.dtype)
        results[start : start + num_rows] = F.linear(activated, w2)[:num_rows]
        start += num_rows
    return results


def combine(results: Tensor, topk_weights: Tensor) -> Tensor:
    """[M, H]: sum of a token's k results in top-k order, in float32, rounded once.

    Args:
        results: [M, k, H].
        topk_weights: float32 [M, k].
    """
    total = torch.zeros(results.shape[0], results.shape[2], dtype=torch.float32, device=results.device)
    for position in range(results.shape[1]):
        total += topk_weights[:, position, None] * results[:, position].float()
    return total.to(results.dtype)


def index_tensor(array: NDArray[np.integer], device: torch.device) -> Tensor:
    """An index array of the routes as int64 on ``device``."""
    return torch.from_numpy(array.astype(np.int64)).to(device)


__all__ = ["Executor", "combine", "compute_pool", "index_tensor"]
