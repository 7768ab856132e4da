"""The reference executor: all ranks in one process, in flow order. It says what the layer means; it is the test double.

Decides nothing that the plan and the routes have not decided; knows no communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from megaflux_serve.executors.base import Executor, combine, compute_pool, index_tensor
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.routes import map_blocks, pool_tokens, rank_pool
from megaflux_serve.routing import CountArray, RoutingBatch
from megaflux_serve.workspace import ExpertSlots


class ReferenceExecutor(Executor):
    """Every rank is local.

    Args:
        num_ranks: P, at least 1.
    """

    kind = "reference"

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.local_ranks = range(num_ranks)

    def gather_counts(self, local_counts: Sequence[CountArray]) -> CountArray:
        return np.stack(local_counts)

    def execute(self, batches: Sequence[RoutingBatch], plan: ReplicaPlan, slots: Sequence[ExpertSlots]) -> list[Tensor]:
        copy_replicas(plan, slots)
        blocks, ids = map_blocks(plan), [batch.ids_array() for batch in batches]
        device = batches[0].hidden.device
        results = [batch.hidden.new_empty((*batch.topk_ids.shape, batch.hidden.shape[1])) for batch in batches]
        for rank in self.local_ranks:
            pool = rank_pool(plan, blocks, rank)
            token, position = (index_tensor(array, device) for array in pool_tokens(plan, pool, ids))
            from_rank = [index_tensor(np.flatnonzero(pool.source == source), device) for source in self.local_ranks]
            rows = batches[0].hidden.new_empty((pool.pool_row.size, batches[0].hidden.shape[1]))
            for batch, at in zip(batches, from_rank, strict=True):  # dispatch
                rows[at] = batch.hidden[token[at]]
            computed = compute_pool(rows, pool, slots[rank], plan.block_rows)
            for result, at in zip(results, from_rank, strict=True):  # return
                result[token[at], position[at]] = computed[at]
        return [combine(result, batch.topk_weights) for result, batch in zip(results, batches, strict=True)]


def copy_replicas(plan: ReplicaPlan, slots: Sequence[ExpertSlots]) -> None:
    """Copy the weights of the plan's transfers from their homes, between slots of one process."""
    layout = plan.layout
    for expert, rank, slot in plan.transfers.tolist():
        source = slots[layout.home_rank[expert]].expert(layout.home_index[expert])
        target = slots[rank].expert(layout.experts_per_rank + slot)
        for to, weight in zip(target, source, strict=True):
            to.copy_(weight)


__all__ = ["ReferenceExecutor"]
