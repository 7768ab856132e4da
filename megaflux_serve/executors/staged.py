"""The staged executor: one rank a process, over torch.distributed, one stage after the other.

Decides what crosses between ranks and in which order: counts; replica weights, only what the plan transfers; rows, once
for each routed assignment and in the order of the destination's pool, so that no index travels with them; results, the
same way back. A token with several experts on one rank crosses several times; the megakernel sends it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megaflux_serve.errors import PeerTimeoutError
from megaflux_serve.executors.base import Executor, combine, compute_pool, index_tensor
from megaflux_serve.messages import Message, exchange
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.routes import map_blocks, rank_pool, source_routes
from megaflux_serve.routing import CountArray, RoutingBatch
from megaflux_serve.workspace import ExpertSlots

Phase = Literal["counts", "replica_weights", "rows", "results"]
"""What a rank waits for: the kernels' words where they wait for the same."""


class StagedExecutor(Executor):
    """The rank of this process within a process group.

    Args:
        group: the expert-parallel group; P is its size. Every rank must make the same calls.
        device: where tensors live that the group's backend can send: cpu for gloo, the rank's GPU for NCCL.
        timeout_s: the longest wait for a peer, in seconds. It covers what a slow peer may do between two layers.

    Raises:
        PeerTimeoutError: from every method, when a peer did not answer in time. The group cannot be used afterwards.
    """

    kind = "staged"

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str = "cpu", timeout_s: float = 300.0) -> None:
        self.group, self.device, self.timeout_s = group, torch.device(device), timeout_s
        self._timeouts: list[Phase] = []
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.local_ranks = (self.rank,)

    def gather_counts(self, local_counts: Sequence[CountArray]) -> CountArray:
        own = torch.from_numpy(local_counts[0]).to(self.device)
        table = own.new_empty((self.num_ranks, own.numel()))
        table[self.rank] = own
        peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        self._exchange("counts", [(rank, own) for rank in peers], [(rank, table[rank]) for rank in peers])
        counts: CountArray = table.cpu().numpy()
        return counts

    def execute(self, batches: Sequence[RoutingBatch], plan: ReplicaPlan, slots: Sequence[ExpertSlots]) -> list[Tensor]:
        (batch,), (own_slots,) = batches, slots
        self._copy_replicas(plan, own_slots)

        blocks, ids = map_blocks(plan), batch.ids_array()
        routes, pool = source_routes(plan, blocks, self.rank, ids), rank_pool(plan, blocks, self.rank)
        outgoing = np.lexsort((routes.pool_row(plan.block_rows).reshape(-1), routes.rank.reshape(-1)))
        incoming = np.argsort(pool.source, kind="stable")
        sent = np.bincount(routes.rank.reshape(-1), minlength=self.num_ranks).tolist()
        received = np.bincount(pool.source, minlength=self.num_ranks).tolist()
        by_rank, by_source = index_tensor(outgoing, self.device), index_tensor(incoming, self.device)

        rows = torch.empty((pool.source.size, batch.hidden.shape[1]), dtype=batch.hidden.dtype, device=self.device)
        rows[by_source] = self._swap_rows("rows", batch.hidden[by_rank // ids.shape[1]], sent, received)
        computed = compute_pool(rows, pool, own_slots, plan.block_rows)
        results = torch.empty((ids.size, rows.shape[1]), dtype=rows.dtype, device=self.device)
        results[by_rank] = self._swap_rows("results", computed[by_source], received, sent)
        return [combine(results.view(*ids.shape, rows.shape[1]), batch.topk_weights)]

    def timeouts(self) -> list[str]:
        return [*self._timeouts]

    def _copy_replicas(self, plan: ReplicaPlan, slots: ExpertSlots) -> None:
        """Send home weights to the ranks that need them and receive those that this rank needs, in the plan's order."""
        layout = plan.layout
        outgoing: list[Message] = []
        incoming: list[Message] = []
        for expert, rank, slot in plan.transfers.tolist():
            home = int(layout.home_rank[expert])
            if home == self.rank:
                outgoing += [(rank, weight) for weight in slots.expert(int(layout.home_index[expert]))]
            if rank == self.rank:
                incoming += [(home, weight) for weight in slots.expert(layout.experts_per_rank + slot)]
        self._exchange("replica_weights", outgoing, incoming)

    def _swap_rows(self, phase: Phase, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """All-to-all of rows that are ordered by rank: ``sent[r]`` rows to rank r, ``received[r]`` rows from it."""
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        outgoing, incoming = torch.split(rows, sent), torch.split(arrived, received)
        incoming[self.rank].copy_(outgoing[self.rank])
        peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        self._exchange(phase, [(rank, outgoing[rank]) for rank in peers], [(rank, incoming[rank]) for rank in peers])
        return arrived

    def _exchange(self, phase: Phase, outgoing: list[Message], incoming: list[Message]) -> None:
        """``messages.exchange``, where a timeout is counted."""
        try:
            exchange(self.group, phase, outgoing, incoming, self.timeout_s)
        except PeerTimeoutError:
            self._timeouts.append(phase)
            raise


__all__ = ["StagedExecutor"]
