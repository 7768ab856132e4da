"""From a load histogram to a plan: who computes which token blocks, and which weights must move for it.

The layer calls ``fast_planner.plan_replicas``, here under its plain name; ``planner`` holds the same function as the
specification, in plain Python::

    plan = plan_replicas(counts, layout, options, resident)
    plan = apply_gate(plan, costs, resident)

Routing workloads for benchmarks are made by ``planning.workload``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaflux_serve.planning.balance import block_eta, eta, fixed_rank_rows, rank_rows
from megaflux_serve.planning.gate import GateCosts, apply_gate, estimate_costs
from megaflux_serve.planning.plan import FIXED, ReplicaPlan, blocks_per_expert, fixed_plan
from megaflux_serve.planning.planner import CANDIDATES, Candidate, PlannerOptions
from megaflux_serve.planning.routes import BlockMap, Pool, SourceRoutes, map_blocks, rank_pool, source_routes

if TYPE_CHECKING:
    from megaflux_serve.planning.fast_planner import plan_replicas
else:

    def __getattr__(name: str) -> Any:
        """``plan_replicas`` on first use: options and gate are read in processes that never plan, and its compiler is
        heavy. Besides, vLLM 0.32 on a CPU cannot start a worker in a process that has loaded llvmlite already."""
        if name == "plan_replicas":
            from megaflux_serve.planning.fast_planner import plan_replicas

            return plan_replicas
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CANDIDATES",
    "FIXED",
    "BlockMap",
    "Candidate",
    "GateCosts",
    "PlannerOptions",
    "Pool",
    "ReplicaPlan",
    "SourceRoutes",
    "apply_gate",
    "block_eta",
    "blocks_per_expert",
    "estimate_costs",
    "eta",
    "fixed_plan",
    "fixed_rank_rows",
    "map_blocks",
    "plan_replicas",
    "rank_pool",
    "rank_rows",
    "source_routes",
]
