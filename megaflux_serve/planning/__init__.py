"""From a load histogram to a plan: who computes which token blocks, and which weights must move for it.

The layer calls ``fast_planner.plan_replicas``, here under its plain name; ``planner`` holds the same function as the
specification, in plain Python::

    plan = plan_replicas(counts, layout, options, resident)
    plan = apply_gate(plan, costs, resident)
"""

from megaflux_serve.planning.balance import block_eta, eta, fixed_rank_rows, predicted_speedup, rank_rows
from megaflux_serve.planning.fast_planner import plan_replicas
from megaflux_serve.planning.gate import GateCosts, apply_gate, estimate_costs
from megaflux_serve.planning.plan import FIXED, ReplicaPlan, blocks_per_expert, fixed_plan
from megaflux_serve.planning.planner import CANDIDATES, Candidate, PlannerOptions

__all__ = [
    "CANDIDATES",
    "FIXED",
    "Candidate",
    "GateCosts",
    "PlannerOptions",
    "ReplicaPlan",
    "apply_gate",
    "block_eta",
    "blocks_per_expert",
    "estimate_costs",
    "eta",
    "fixed_plan",
    "fixed_rank_rows",
    "plan_replicas",
    "predicted_speedup",
    "rank_rows",
]
