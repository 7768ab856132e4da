"""RoutePack: from a sealed window of routing replay to an expert placement and a trajectory schedule::

    demand -> placement -> rows -> seeds -> search -> WindowPlan

``plan_window`` is the whole flow; every step is a module of its own, named after what it decides::

    topology = Topology(num_ranks=8, num_slots=8, capacity=8192)
    cost = CostModel((DenseStage("kda", 148.7), DenseStage("mla", 42.9, 53.3)))
    plan = plan_window(counts, lengths, topology, PlanOptions(cost))
    plan.placement.slots      # int32 [L, E]: the slot of every expert
    plan.layout.rows()[r][d]  # the trajectories of cell (r, d)
"""

from megaflux_serve.routepack.demand import Demand
from megaflux_serve.routepack.exchange import MicroBatches, micro_batches
from megaflux_serve.routepack.files import load_plan, save_plan
from megaflux_serve.routepack.filling import FillingWindow
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.placement import Placement, PlacementOptions, move_cost_rows, repair_placement
from megaflux_serve.routepack.plan import PlanOptions, WindowPlan, plan_window
from megaflux_serve.routepack.population import SearchOptions
from megaflux_serve.routepack.report import PolicyReport, compare_policies
from megaflux_serve.routepack.score import Score
from megaflux_serve.routepack.topology import CostModel, DenseStage, Topology, stages_from_shape
from megaflux_serve.routepack.transfers import TransferPlan

__all__ = [
    "CostModel",
    "Demand",
    "DenseStage",
    "FillingWindow",
    "Layout",
    "MicroBatches",
    "Placement",
    "PlacementOptions",
    "PlanOptions",
    "PolicyReport",
    "Score",
    "SearchOptions",
    "Topology",
    "TransferPlan",
    "WindowPlan",
    "compare_policies",
    "load_plan",
    "micro_batches",
    "move_cost_rows",
    "plan_window",
    "repair_placement",
    "save_plan",
    "stages_from_shape",
]
