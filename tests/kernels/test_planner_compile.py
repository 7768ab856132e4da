"""The planner's kernels compile for Hopper and Blackwell without a GPU, without spills and within their memory."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from megaflux_kernels.layout import MAX_SHARED_BYTES

from tests.kernels.cubin import compared_flags, compile_kernels

REGISTERS = 128
"""A block of 256 threads can have 255 each; half of that leaves room for a second block on the multiprocessor."""

PROGRAM = """
import json
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cuda import default_stream
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.plan_counts import PlanCounts
from megaflux_kernels.planner import Planner
from megaflux_kernels.planner_map import PlannerShape
from megaflux_kernels.totals_map import TotalsMap
from megaflux_kernels.own_tables import ForwardTables
from megaflux_kernels.worklist import LayerShape, Tiling

experts, ranks, slots, top_k = {shape}
search = SearchShape(experts, ranks, slots)
tables = ForwardTables(LayerShape(ranks, experts, slots, 2048, 768, top_k, 1024), Tiling()) if {forward} else None
totals = TotalsMap(ranks, experts, (1010, 1100, 2000), (10_000, 1_000_000)) if {totals} else None
planner = Planner(PlannerShape(search, top_k, 1024, 131), tables, {forward}, totals)
plans = PlanCounts(search)
cute.compile(planner, *[Int64(0)] * 7, *[Int32(0)] * 4, *[Int64(0)] * 3, Int32(0), Int64(0), default_stream())
cute.compile(plans, *[Int64(0)] * 4, *[Int32(0)] * 3, *[Int64(0)] * 3, Int32(0), default_stream())
print(json.dumps([planner.storage.size_in_bytes(), plans.storage.size_in_bytes()]))
"""

CASES = {  # (E, P, s, k), forward tables and trace, totals, target
    "E 256, P 8, s 8, top-8, forward tables, totals": ((256, 8, 8, 8), True, True, "sm_90a"),
    "E 504, P 72, s 16, top-6": ((504, 72, 16, 6), False, False, "sm_90a"),
    "one rank, no replica slots, totals": ((16, 1, 0, 2), True, True, "sm_90a"),
    "Blackwell": ((256, 8, 8, 8), True, True, "sm_100a"),
}


@pytest.mark.parametrize("name", CASES)
def test_planner_kernels_compile_without_spills_and_fit_an_sm(name, tmp_path):
    shape, forward, totals, arch = CASES[name]
    plans, planner = compile_kernels(PROGRAM.format(shape=shape, forward=forward, totals=totals), tmp_path, arch)
    assert plans.stack_bytes == planner.stack_bytes == 0
    assert max(plans.registers, planner.registers) <= REGISTERS
    assert max(json.loads(planner.output.splitlines()[-1])) <= MAX_SHARED_BYTES + 1024
    for instruction in ("st.release.sys", "ld.acquire.sys", "ld.acquire.gpu", "match.any.sync", "%globaltimer"):
        assert instruction in planner.ptx
    assert "redux.sync" in plans.ptx or shape[2] == 0
    for scope, at_least in (("sys", 1), ("gpu", 3)):  # counts; histograms twice, plan
        num_flags, compared = compared_flags(planner.ptx, scope)
        assert num_flags >= at_least
        assert compared == []
