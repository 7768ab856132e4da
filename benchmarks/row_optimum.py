"""How even the rows could be at best without moving more weights or making the busiest rank compute more blocks.

Plans balance blocks, because a partial block costs as much as a full one; eta counts rows. This bound says how much of
the difference a better choice among the same copies could win: the replicas of a plan and its maximum of blocks are
kept, while the blocks of an expert, the partial one included, may go to its copies in every possible way. An exact
integer program (OR-tools CP-SAT).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from megaflux_serve.planning import ReplicaPlan


def least_max_rows(plan: ReplicaPlan, seconds: float = 10.0) -> int:
    """Least rows of the busiest rank, or a lower bound of it where ``seconds`` do not suffice for a proof."""
    layout, totals = plan.layout, plan.counts.sum(axis=0)
    blocks = plan.blocks.sum(axis=1)
    padding = blocks.astype(np.int64) * plan.block_rows - totals
    copied = np.unique(plan.replicas[:, 0])

    model = cp_model.CpModel()
    rank_rows: list[Any] = [0] * layout.num_ranks
    rank_blocks: list[Any] = [0] * layout.num_ranks
    for expert in np.setdiff1d(np.arange(layout.num_experts), copied):
        rank_rows[layout.home_rank[expert]] += int(totals[expert])
        rank_blocks[layout.home_rank[expert]] += int(blocks[expert])
    for expert in copied:
        ranks = np.union1d(np.flatnonzero(plan.blocks[expert]), layout.home_rank[expert])
        share = [model.new_int_var(0, int(blocks[expert]), "") for _ in ranks]
        partial = [model.new_bool_var("") for _ in ranks]
        model.add(sum(share) == int(blocks[expert]))
        model.add_exactly_one(partial)
        for rank, num, has in zip(ranks, share, partial, strict=True):
            model.add(num >= has)
            rank_rows[rank] += plan.block_rows * num - int(padding[expert]) * has
            rank_blocks[rank] += num
    busiest = model.new_int_var(0, int(totals.sum()), "")
    for rank in range(layout.num_ranks):
        model.add(rank_blocks[rank] <= plan.max_load)
        model.add(rank_rows[rank] <= busiest)
    model.minimize(busiest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(f"no solution within {seconds} s, although the plan itself is one")
    return int(np.ceil(solver.best_objective_bound))
