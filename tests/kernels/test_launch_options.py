"""The gate as a launch of the planner is told it: the device decides with these options as the host does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from megaflux_kernels.planner_buffers import LaunchOptions

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors.megakernel import launch_options
from megaflux_serve.planning.fast_planner import plan_replicas
from megaflux_serve.planning.gate import GateCosts, apply_gate
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.planner import PlannerOptions
from megaflux_serve.routing import CountArray
from megaflux_serve.slots import IntArray, SlotLayout
from tests.core.planner_cases import cases, deterministic

nanoseconds = st.sampled_from([0, 1, 3, 999, 14_300, 252_000, 10**9])


def refused_on_the_device(plan: ReplicaPlan, options: LaunchOptions) -> bool:
    """``settle`` of ``megaflux_kernels.plan_block``, in plain integers."""
    if plan.num_replicas == 0 or options.block_ns == 0:
        return False
    received = np.bincount(plan.transfers[:, 1], minlength=1).max()
    sent = np.bincount(plan.layout.home_rank[plan.transfers[:, 0]], minlength=1).max()
    exposed = int(max(received, sent)) * options.replica_ns * (1000 - options.hidden_permille) // 1000
    return (int(plan.fixed_loads.max()) - plan.max_load) * options.block_ns <= options.plan_ns + exposed


@deterministic
@given(cases(), st.builds(GateCosts, nanoseconds, nanoseconds, nanoseconds, st.integers(0, 1000)))
def test_the_device_refuses_what_the_host_refuses(
    case: tuple[CountArray, SlotLayout, PlannerOptions, IntArray | None], costs: GateCosts
) -> None:
    plan = plan_replicas(*case)
    options = launch_options(MegaFluxConfig(gate=costs))
    assert refused_on_the_device(plan, options) == apply_gate(plan, costs, case[3]).gated


def test_without_costs_no_plan_is_refused() -> None:
    options = launch_options(MegaFluxConfig(gate=None, transfer_cost_blocks=3, reduction_penalty=5))
    assert options == LaunchOptions(transfer_cost_blocks=3, reduction_penalty=5, block_ns=0)
