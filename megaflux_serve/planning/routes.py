"""Mapping blocks to routed assignments (MegaFlux appendix A): where every routed row is computed.

The plan says how many blocks of an expert each rank computes; this module says which rows these are. It is the
specification of the route kernel on the device. It knows no weights and no rows, only ids and counts. A rank needs the
histogram [P, E], the plan and *its own* ids, nothing of another rank's ids.

The rules:

1. A *routed assignment* is one (token, top-k position) of a source rank. The assignments of an expert are ordered by
   (source rank, token, position); an assignment's place in this order is its *ordinal*, 0 .. c_e - 1.
2. Block j of an expert holds the ordinals ``j * block_rows .. (j + 1) * block_rows - 1``: ordinal o is row
   ``o % block_rows`` of block ``o // block_rows``. Only an expert's last block can be partial.
3. The blocks of an expert go to its ranks in ascending rank order, ``q[e, r]`` to rank r.
4. The *pool* of a rank holds its blocks ordered by (slot index, block number); a block's place in it is its *position*
   and ``position * block_rows + row`` is a *pool row*.

Rules 1 and 2 do not mention the plan: the same counts give the same blocks, row for row, whatever is replicated. A
block is computed at one fixed shape, so a row's value does not depend on the plan either; this is why replication does
not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.routing import CountArray
from megaflux_serve.slots import IntArray

IndexArray = NDArray[np.int64]


@dataclass(frozen=True)
class BlockMap:
    """Where every block of a plan is computed; B blocks ordered by (expert, block number). Equal on every rank.

    Attributes:
        expert: int32 [B].
        number: int32 [B], block number j within the expert.
        rank: int32 [B], the rank that computes the block.
        slot: int32 [B], slot index there: home index, or E/P + replica slot.
        position: int32 [B], place in the pool of ``rank``.
        num_rows: int32 [B], valid rows, 1 .. block_rows.
        first_block: int64 [E], index of each expert's block 0.
    """

    expert: IntArray
    number: IntArray
    rank: IntArray
    slot: IntArray
    position: IntArray
    num_rows: IntArray
    first_block: IndexArray


@dataclass(frozen=True)
class SourceRoutes:
    """Where the assignments of one source rank are computed; every array is int32 [M, k].

    Attributes:
        rank: the destination rank.
        slot: slot index there.
        position: position of the block in the destination's pool.
        row: row within the block.
    """

    rank: IntArray
    slot: IntArray
    position: IntArray
    row: IntArray

    def pool_row(self, block_rows: int) -> IndexArray:
        """int64 [M, k]: the row in the destination's pool."""
        return self.position.astype(np.int64) * block_rows + self.row


@dataclass(frozen=True)
class Pool:
    """The blocks that one rank computes, and where each of their n valid rows comes from.

    Attributes:
        expert: int32 [b], by position.
        slot: int32 [b].
        num_rows: int32 [b], valid rows of each block.
        pool_row: int64 [n], the valid pool rows, ascending.
        source: int32 [n], the source rank of each.
        nth: int64 [n]: the row is the nth assignment of its expert on its source, in (token, position) order.
    """

    expert: IntArray
    slot: IntArray
    num_rows: IntArray
    pool_row: IndexArray
    source: IntArray
    nth: IndexArray


def map_blocks(plan: ReplicaPlan) -> BlockMap:
    """Rules 2 to 4: every block's rank, slot, position and size."""
    num_experts, num_ranks = plan.blocks.shape
    per_expert = plan.blocks.sum(axis=1, dtype=np.int64)
    first_block = _starts(per_expert)
    expert = np.repeat(np.arange(num_experts), per_expert)
    number = np.arange(expert.size) - first_block[expert]
    rank = np.repeat(np.tile(np.arange(num_ranks), num_experts), plan.blocks.reshape(-1))  # rule 3
    slot = plan.layout.expert_to_index(plan.replica_experts)[expert, rank]
    num_rows = np.minimum(plan.block_rows, plan.counts.sum(axis=0)[expert] - number * plan.block_rows)  # rule 2
    by_pool = np.lexsort((number, slot, rank))  # rule 4
    position = np.empty(expert.size, dtype=np.int64)
    position[by_pool] = np.arange(expert.size) - _starts(plan.loads)[rank[by_pool]]
    return BlockMap(
        expert.astype(np.int32),
        number.astype(np.int32),
        rank.astype(np.int32),
        slot,
        position.astype(np.int32),
        num_rows.astype(np.int32),
        first_block,
    )


def assignment_order(topk_ids: NDArray[Any]) -> IndexArray:
    """int64 [M * k]: flat assignments ``token * k + position`` of one source rank, by expert, then as in rule 1."""
    return np.argsort(topk_ids.reshape(-1), kind="stable")


def source_routes(plan: ReplicaPlan, blocks: BlockMap, source: int, topk_ids: NDArray[Any]) -> SourceRoutes:
    """Destination of every assignment of rank ``source``.

    Args:
        plan: whose counts[source] are the counts of ``topk_ids``.
        blocks: ``map_blocks(plan)``.
        source: the source rank.
        topk_ids: integer [M, k], its logical expert ids.
    """
    counts = plan.counts[source]
    order = assignment_order(topk_ids)
    expert = np.repeat(np.arange(counts.size), counts)
    nth = np.arange(order.size) - _starts(counts)[expert]
    ordinal = plan.counts[:source].sum(axis=0)[expert] + nth  # rule 1
    block = blocks.first_block[expert] + ordinal // plan.block_rows
    columns = np.empty((4, order.size), dtype=np.int32)
    columns[:, order] = blocks.rank[block], blocks.slot[block], blocks.position[block], ordinal % plan.block_rows
    return SourceRoutes(*columns.reshape(4, *topk_ids.shape))


def rank_pool(plan: ReplicaPlan, blocks: BlockMap, rank: int) -> Pool:
    """The blocks that ``rank`` computes and the source of their rows, from the histogram alone.

    Args:
        plan: the plan.
        blocks: ``map_blocks(plan)``.
        rank: the destination rank.
    """
    mine = np.flatnonzero(blocks.rank == rank)
    mine = mine[np.argsort(blocks.position[mine])]
    num_rows = blocks.num_rows[mine]
    position = np.repeat(np.arange(mine.size), num_rows)
    row = np.arange(position.size) - _starts(num_rows)[position]
    expert = blocks.expert[mine][position]
    ordinal = blocks.number[mine][position].astype(np.int64) * plan.block_rows + row
    by_source = plan.counts.T.reshape(-1)  # all assignments in the order (expert, source rank), rule 1
    group = np.searchsorted(np.cumsum(by_source), _starts(plan.counts.sum(axis=0))[expert] + ordinal, side="right")
    source = group % plan.layout.num_ranks
    before = np.cumsum(plan.counts, axis=0) - plan.counts
    return Pool(
        blocks.expert[mine],
        blocks.slot[mine],
        num_rows,
        position * plan.block_rows + row,
        source.astype(np.int32),
        ordinal - before[source, expert],
    )


def pool_tokens(plan: ReplicaPlan, pool: Pool, topk_ids: Sequence[NDArray[Any]]) -> tuple[IndexArray, IndexArray]:
    """The (token, top-k position) of every valid pool row, each int64 [n]: the inverse of ``source_routes``.

    Args:
        plan: the plan.
        pool: the pool of one rank.
        topk_ids: integer [M_r, k] of every source rank r.
    """
    expert = np.repeat(pool.expert, pool.num_rows)
    flat = np.empty(pool.nth.size, dtype=np.int64)
    for source, ids in enumerate(topk_ids):
        rows = pool.source == source
        flat[rows] = assignment_order(ids)[_starts(plan.counts[source])[expert[rows]] + pool.nth[rows]]
    top_k = topk_ids[0].shape[1]
    return flat // top_k, flat % top_k


def _starts(sizes: NDArray[Any]) -> CountArray:
    """int64: exclusive prefix sum of non-negative sizes."""
    starts: CountArray = np.cumsum(sizes, dtype=np.int64) - sizes
    return starts


__all__ = [
    "BlockMap",
    "Pool",
    "SourceRoutes",
    "assignment_order",
    "map_blocks",
    "pool_tokens",
    "rank_pool",
    "source_routes",
]
