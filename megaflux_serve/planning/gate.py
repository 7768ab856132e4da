"""The gate: whether the replicas that the search found are worth their planning and transfer time.

Decides between a plan and the fixed placement by four measured coefficients, in integers only, so that the device takes
the same decision bit for bit. Knows neither how the plan was found nor how the coefficients were measured.

Small skewed batches can lose more by planning and transfers than they win (MegaFlux section 4.2 reports backward at
0.91x); the gate returns the fixed placement for them::

    saving  = (max fixed load - max planned load) * block_ns
    exposed = most * replica_ns * (1000 - hidden_permille) // 1000
    gated   = saving <= plan_ns + exposed

``most`` is the largest number of new replicas that one rank receives, or sends as the owner of their experts: links are
full duplex, so the two directions overlap and the busiest direction of the busiest rank is the last to finish.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megaflux_serve.errors import ConfigError
from megaflux_serve.planning.plan import ReplicaPlan, fixed_plan
from megaflux_serve.planning.planner import check_resident

_ONE_SECOND_NS = 10**9


@dataclass(frozen=True)
class GateCosts:
    """What blocks, replicas and plans cost on one machine, for one layer shape.

    Attributes:
        block_ns: one token block through FC1, SwiGLU and FC2 on a whole GPU; measured with the forward kernel. 14,300
            for hidden 7168, intermediate 2048 in BF16 on an H200 at cuBLAS's rate of 788 TFLOP/s.
        replica_ns: copying W1 and W2 of one expert over the link of a rank; measured with the slot copy. 252,000 for
            the same shape at 350 GB/s, 17.6 blocks: both grow with hidden x intermediate, so their ratio is nearly the
            same at any shape.
        plan_ns: from the router's output to the finished plan, beyond what the fixed placement needs as well; measured
            with the device planner. 0 where planning overlaps other work.
        hidden_permille: the part of the transfers that runs behind the blocks of home experts, in thousandths; the
            paper measures 560 to 760 forward (Fig. 5), 0 is right where weights move before the layer (staged).

    Times are nanoseconds, 0 to 10^9.
    """

    block_ns: int
    replica_ns: int
    plan_ns: int
    hidden_permille: int

    def __post_init__(self) -> None:
        for name in ("block_ns", "replica_ns", "plan_ns"):
            if not 0 <= getattr(self, name) <= _ONE_SECOND_NS:
                raise ConfigError(name, getattr(self, name), f"0 to {_ONE_SECOND_NS} nanoseconds")
        if not 0 <= self.hidden_permille <= 1000:
            raise ConfigError("hidden_permille", self.hidden_permille, "0 to 1000")

    def exposed_ns(self, plan: ReplicaPlan) -> int:
        """Transfer time of ``plan`` that computing does not hide, in nanoseconds, rounded down."""
        if len(plan.transfers) == 0:
            return 0
        experts, receivers, _ = plan.transfers.T
        most = max(int(np.bincount(receivers).max()), int(np.bincount(plan.layout.home_rank[experts]).max()))
        return most * self.replica_ns * (1000 - self.hidden_permille) // 1000

    def layer_ns(self, plan: ReplicaPlan) -> int:
        """Predicted time of the layer under ``plan``: the busiest rank's blocks, planning and exposed transfers."""
        return plan.max_load * self.block_ns + self.plan_ns + self.exposed_ns(plan)


def estimate_costs(
    hidden: int,
    intermediate: int,
    tflop_per_s: float,
    link_gb_per_s: float,
    block_rows: int = 128,
    bytes_per_weight: int = 2,
    plan_ns: int = 0,
    hidden_permille: int = 0,
) -> GateCosts:
    """Costs from rates, for a machine on which nothing was measured.

    A block is 6 * hidden * intermediate * block_rows operations, a replica 3 * hidden * intermediate weights.

    Args:
        hidden: H of the layer.
        intermediate: I of one expert.
        tflop_per_s: sustained rate of the products; about 680 on an H200 in BF16.
        link_gb_per_s: bandwidth of a rank's link in one direction, GB/s; about 350 over NVLink on an H200.
        block_rows: rows of a block.
        bytes_per_weight: 2 for BF16.
        plan_ns: see ``GateCosts``.
        hidden_permille: see ``GateCosts``.

    Raises:
        ConfigError: a rate that is not positive, or a result out of range.
    """
    for name, value in (("tflop_per_s", tflop_per_s), ("link_gb_per_s", link_gb_per_s)):
        if not value > 0:
            raise ConfigError(name, value, "a positive number")
    weights = 3 * hidden * intermediate
    block_ns = round(2 * weights * block_rows / (tflop_per_s * 1e3))
    replica_ns = round(weights * bytes_per_weight / link_gb_per_s)
    return GateCosts(block_ns, replica_ns, plan_ns, hidden_permille)


def apply_gate(plan: ReplicaPlan, costs: GateCosts, resident: ArrayLike | None = None) -> ReplicaPlan:
    """``plan``, or the fixed placement where the plan does not pay.

    Args:
        plan: any plan; one without replicas is returned as it is.
        costs: coefficients of this machine and layer.
        resident: int32 [P, s], the copies that ``plan`` was made with, -1 for none. A gated plan moves no weights, so
            they stay in their slots.

    Returns:
        The plan that came, or ``fixed_plan(..., gated=True)``.

    Raises:
        InputError: resident copies that break their contract.
    """
    if plan.num_replicas == 0:
        return plan
    saving_ns = (int(plan.fixed_loads.max()) - plan.max_load) * costs.block_ns
    if saving_ns > costs.plan_ns + costs.exposed_ns(plan):
        return plan
    return fixed_plan(plan.counts, plan.layout, plan.block_rows, check_resident(resident, plan.layout), gated=True)
