"""The planner benchmark measures what its docstring says, on instances small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import cases
from megaflux_serve.planning import ReplicaPlan, plan_replicas
from megaflux_serve.routing import kappa
from megaflux_serve.slots import SlotLayout

pytest.importorskip(
    "ortools", reason="the bound of the planner benchmark is an integer program (extra of the benchmarks)"
)

from benchmarks.bench_planner_cpu import measure_balance, median_rows
from benchmarks.row_optimum import least_max_rows


def test_a_setting_has_three_realisations_with_all_rows() -> None:
    setting = cases.Setting(experts=64, ranks=4, tokens_per_rank=512, routing="zipf-k3")
    realisations = setting.realisations()
    assert [counts.sum() for counts in realisations] == [4 * 512 * 8] * 3
    assert [sorted(counts) for counts in realisations[1:]] == [sorted(realisations[0])] * 2
    assert not np.array_equal(realisations[0], realisations[1])
    assert max(counts.max() for counts in realisations) <= 4 * 512
    assert kappa(realisations[0]) == pytest.approx(2.6, abs=0.1)  # the cap of one choice a token lowers 3


def test_real_families_are_left_out_with_a_reason_where_traces_are_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(cases, "GPT_OSS", cases.Path(str(tmp_path)) / "absent.npz")
    routings, reason = cases.families()
    assert routings == cases.CONTROLS
    assert reason is not None
    assert "absent.npz" in reason
    assert "set MEGAFLUX_TRACES" in reason


def test_the_bound_tries_every_way_to_share_blocks_among_the_copies() -> None:
    # 300 + 20 rows: blocks of 128, 128, 44 and 20, two on each rank. The plan gives rank 0 two full ones (256) and
    # rank 1 the partial ones (64). At best rank 0 has a full and the partial one (172), rank 1 a full one and the 20.
    plan = plan_replicas(np.array([[300, 20], [0, 0]]), SlotLayout(2, 2, 1))
    assert plan.loads.tolist() == [2, 2]
    assert least_max_rows(plan) == 172


def test_balanced_routing_has_no_eta_and_skewed_routing_is_balanced_to_the_block() -> None:
    balanced = cases.Setting(64, 8, 1024, "balanced")
    skewed = cases.Setting(64, 8, 1024, "zipf-k6")
    balances = {setting: measure_balance(setting) for setting in (balanced, skewed)}
    assert balances[balanced].eta is None
    assert balances[balanced].max_over_mean_before == 1
    result = balances[skewed]
    assert result.block_eta == 1
    assert result.eta is not None
    assert result.eta_bound is not None
    assert 0.9 < result.eta <= result.eta_bound <= 1
    rows = median_rows(balances, "both", ("balanced", "zipf-k6"), ((64, 8),), (1024,))
    assert {row.metric: row.value for row in rows}["eta_median"] == 100 * result.eta
    assert rows[0].case == {"experts": "64", "ranks": 8, "tokens_per_rank": 1024, "routing": "both", "settings": 1}


def test_plans_that_the_bound_takes_are_never_better_than_it() -> None:
    random = np.random.Generator(np.random.PCG64(3))
    for _ in range(10):
        counts = random.integers(0, 2000, (4, 8)) * (random.random(8) < 0.5)
        plan: ReplicaPlan = plan_replicas(counts, SlotLayout(8, 4, 1))
        assert least_max_rows(plan) <= plan.rows().sum(axis=0).max()
