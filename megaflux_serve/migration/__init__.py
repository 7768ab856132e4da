"""Migration: from the expert placement that the slots hold to the one that a window wants::

    before, after -> TransferPlan -> migrate(ExpertState) -> every layer whole in its new slots

What belongs to an expert moves into slots that exist already, so tensor shapes, gradient buffers and communicators stay
(RoutePack, section 1)::

    state = ExpertState.of_parameters({"w13": w13_of_every_layer, "w2": w2_of_every_layer}, optimizer)
    migrate(state, TransferPlan(before, plan.placement), group)
"""

from megaflux_serve.migration.logical import logical_experts
from megaflux_serve.migration.migrator import MigrationError, MigrationReport, migrate
from megaflux_serve.migration.state import ExpertState
from megaflux_serve.routepack.transfers import RankTraffic, TransferPlan

__all__ = [
    "ExpertState",
    "MigrationError",
    "MigrationReport",
    "RankTraffic",
    "TransferPlan",
    "logical_experts",
    "migrate",
]
