"""How well a plan balances the ranks: rows by rank, the eta of MegaFlux appendix B.2.

Decides the figures that are reported about a plan. Knows neither planner nor executor; ``routing`` has the figures that
need no plan, kappa and max/mean.
"""

from __future__ import annotations

import numpy as np

from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.routing import CountArray


def rank_rows(plan: ReplicaPlan) -> CountArray:
    """int64 [P]: valid rows, not padded blocks, that each rank computes under the plan; N_r of Eq. 8."""
    rows: CountArray = plan.rows().sum(axis=0)
    return rows


def fixed_rank_rows(plan: ReplicaPlan) -> CountArray:
    """int64 [P]: valid rows that each rank would compute without replicas."""
    rows = np.zeros(plan.layout.num_ranks, dtype=np.int64)
    np.add.at(rows, plan.layout.home_rank, plan.counts.sum(axis=0))
    return rows


def eta(plan: ReplicaPlan) -> float | None:
    """The fraction of the busiest rank's excess rows that the plan removes (Eq. 8).

    1 is perfect balance, 0 no better than the fixed placement; it can be slightly negative, because plans balance
    blocks and eta counts rows. None where the fixed placement has no excess; such cases do not count.
    """
    fixed, planned = fixed_rank_rows(plan), rank_rows(plan)
    num_ranks, total = plan.layout.num_ranks, int(fixed.sum())
    excess = int(fixed.max()) * num_ranks - total  # in rows times P, so that everything is whole
    if excess == 0:
        return None
    return 1 - (int(planned.max()) * num_ranks - total) / excess


def block_eta(plan: ReplicaPlan) -> float | None:
    """Eta in what the kernels execute: the fraction of the busiest rank's excess blocks over tau that the plan removes.

    tau = ceil(sum(b) / P), the least possible maximum of whole blocks, so 1 means that no plan has a lower maximum.
    None where the fixed placement already reaches tau.
    """
    target = -(-int(plan.blocks.sum()) // plan.layout.num_ranks)
    excess = int(plan.fixed_loads.max()) - target
    if excess == 0:
        return None
    return 1 - (plan.max_load - target) / excess
