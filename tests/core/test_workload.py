"""Workloads have exactly the loads that were asked for; an independent checker says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.planning import workload
from megaflux_serve.routing import kappa
from tests.core.planner_cases import deterministic
from tests.oracles.workload_checks import rebinned, routes_problem, scaling_problem


@st.composite
def routable_counts(draw: Any) -> tuple[Any, int, int]:
    """(counts [E], ranks, top_k) that some routes have: experts capped at the tokens, rows a multiple of P * k."""
    num_ranks, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_tokens = num_ranks * draw(st.integers(0, 6))
    shares = draw(st.lists(st.sampled_from([1, 1, 2, 5, 50]), min_size=top_k, max_size=top_k + 5))
    counts = workload.scale_counts(shares, num_tokens, top_k)
    return workload.permute(counts, draw(st.integers(0, 99))), num_ranks, top_k


@deterministic
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.integers(1, 40))
def test_rebinning_is_the_integral_of_the_sorted_loads(histogram: list[int], num_experts: int) -> None:
    assume(sum(histogram))
    shares = workload.rebin(histogram, num_experts)
    assert shares == pytest.approx([float(share) for share in rebinned(histogram, num_experts)], abs=1e-12)
    assert (np.diff(shares) <= 1e-12).all()


def test_rebinning_keeps_kappa_when_bins_are_split_evenly() -> None:
    histogram = [7, 1, 3, 2]
    assert workload.rebin(histogram, 4) == pytest.approx([7 / 13, 3 / 13, 2 / 13, 1 / 13])
    assert kappa(workload.rebin(histogram, 64)) == pytest.approx(kappa(histogram))


@pytest.mark.parametrize(("num_experts", "target"), [(64, 3.0), (256, 6.0), (504, 6.0), (2, 1.5), (8, 1.0)])
def test_zipf_shares_have_the_kappa_that_was_asked_for_and_a_power_law(num_experts: int, target: float) -> None:
    shares = workload.zipf_shares(num_experts, target)
    assert num_experts * float((shares**2).sum()) == pytest.approx(target, abs=1e-9)
    slope = -np.log(shares[1:] / shares[0]) / np.log(np.arange(2, num_experts + 1))
    assert slope == pytest.approx(np.full(num_experts - 1, slope[0]), abs=1e-9)


@deterministic
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=12),
    st.integers(0, 3000),
    st.integers(1, 8),
)
def test_scaled_counts_are_one_factor_times_the_shares_capped_and_rounded(
    shares: list[float], num_tokens: int, top_k: int
) -> None:
    assume(sum(share > 0 for share in shares) >= top_k)
    counts = workload.scale_counts(shares, num_tokens, top_k)
    assert scaling_problem(shares, counts.tolist(), num_tokens, top_k) is None


def test_what_an_expert_cannot_take_goes_to_the_others_in_proportion() -> None:
    # 10 tokens, top-2: 20 rows. Expert 0 would get 16, is capped at 10; the other 10 rows split 3 : 1.
    assert workload.scale_counts([16, 3, 1], 10, 2).tolist() == [10, 8, 2]  # 7.5 and 2.5: the tie goes to the lower id
    assert workload.scale_counts([1000, 900, 1], 10, 2).tolist() == [10, 10, 0]
    assert workload.scale_counts([1, 1, 1], 10, 1).tolist() == [4, 3, 3]


def test_permutations_depend_on_the_seed_only_and_differ() -> None:
    counts = np.arange(64)
    permuted = [workload.permute(counts, seed).tolist() for seed in workload.SEEDS]
    assert permuted == [workload.permute(counts, seed).tolist() for seed in (17, 29, 43)]
    assert all(sorted(p) == counts.tolist() for p in permuted)
    assert len({tuple(p) for p in permuted}) == 3
    # Held for ever: results of different versions are compared seed by seed.
    assert permuted[0][:6] == [22, 40, 32, 19, 28, 50]


@deterministic
@given(routable_counts(), st.integers(0, 2**32))
def test_routes_realise_the_counts_exactly_with_distinct_experts(case: tuple[Any, int, int], seed: int) -> None:
    counts, num_ranks, top_k = case
    routes = workload.realise_routes(counts, num_ranks, top_k, seed)
    assert routes.dtype == np.int32
    assert routes.shape == (num_ranks, counts.sum() // top_k // num_ranks, top_k)
    assert routes_problem(routes.tolist(), counts.tolist(), top_k) is None
    assert routes.tobytes() == workload.realise_routes(counts, num_ranks, top_k, seed).tobytes()


def test_routes_are_mixed_over_tokens_and_ranks() -> None:
    # 4096 tokens, uniform top-4 of 16: pairs of experts meet about equally often, and ranks see about equal counts.
    counts = workload.scale_counts(workload.balanced_shares(16), 4096, 4)
    routes = workload.realise_routes(counts, 4, 4, seed=17)
    by_rank = np.stack([np.bincount(rank.reshape(-1), minlength=16) for rank in routes])
    assert np.abs(by_rank / 256 - 1).max() < 0.25  # a sample of 256 has a standard deviation of 5 %
    member = np.zeros((4096, 16), dtype=np.int64)
    np.put_along_axis(member, routes.reshape(4096, 4), 1, axis=1)
    pairs = (member.T @ member)[np.triu_indices(16, 1)]
    assert pairs.mean() == pytest.approx(4096 * 6 / 120)
    assert np.abs(pairs / pairs.mean() - 1).max() < 0.35  # 205 a pair: 7 %
    assert not np.array_equal(routes, workload.realise_routes(counts, 4, 4, seed=29))


@deterministic
@given(routable_counts())
def test_rows_dealt_to_sources_keep_every_sum(case: tuple[Any, int, int]) -> None:
    counts, num_ranks, _ = case
    split = workload.split_by_source(counts, num_ranks)
    assert split.sum(axis=0).tolist() == counts.tolist()
    assert split.sum(axis=1).tolist() == [counts.sum() // num_ranks] * num_ranks
    assert (split.max(axis=0) - split.min(axis=0) <= 1).all()


def test_adversarial_homes_put_the_hottest_experts_on_one_rank() -> None:
    assert workload.concentrated_home(np.array([1, 9, 5, 9, 0, 2]), 3).tolist() == [2, 0, 1, 0, 2, 1]
    with pytest.raises(ConfigError, match="num_ranks = 4 is not allowed; allowed: a divisor of the 6 experts"):
        workload.concentrated_home(np.arange(6), 4)


def test_bands_are_the_percentiles_of_the_paper_with_distinct_events() -> None:
    # 201 histograms with kappa 0 .. 200 in shuffled order, so that a percentile p is kappa 2p.
    order = np.random.Generator(np.random.PCG64(5)).permutation(201)
    chosen = workload.select_bands(order, list(range(201)))
    kappas = {band: [int(order[i]) for i in indices] for band, indices in chosen.items()}
    # 10..40, 80..120, 160..190, 194..200; quartile positions x.5 go to the lower neighbour.
    assert kappas == {
        "real-low": [17, 25, 32],
        "real-median": [90, 100, 110],
        "real-high": [167, 175, 182],
        "real-extreme": [195, 197, 198],
    }
    # Events of two neighbours each: the choice moves on where an event is taken.
    paired = workload.select_bands(np.arange(201), [i // 2 for i in range(201)])
    assert paired["real-extreme"] == (195, 197, 198)
    with pytest.raises(InputError, match="real-extreme holds 7 of 201 histograms; allowed: three distinct events"):
        workload.select_bands(np.arange(201), [min(i, 194) for i in range(201)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: workload.rebin([0, 0], 4), "histogram: has shape"),
        (lambda: workload.rebin([1, -1], 4), "histogram: has shape"),
        (lambda: workload.rebin([1], 0), "num_experts = 0"),
        (lambda: workload.zipf_shares(8, 8), "target_kappa = 8"),
        (lambda: workload.zipf_shares(8, 0.9), "target_kappa = 0.9"),
        (lambda: workload.scale_counts([1, 1], 4, 3), "top_k = 3 is not allowed; allowed: 1 to the 2 experts"),
        (lambda: workload.scale_counts([1, 0], 4, 2), "shares: has 1 positive values"),
        (lambda: workload.scale_counts([1, 1], -1, 1), "num_tokens = -1"),
        (lambda: workload.split_by_source(np.array([3]), 2), "counts: sum to 3"),
        (lambda: workload.realise_routes([3, 2], 1, 2, 0), "counts: sum to 5; allowed: a multiple of 1 ranks x top-2"),
        (lambda: workload.realise_routes([3, 1], 1, 2, 0), "counts: has 3 rows for one expert; allowed: at most the 2"),
        (lambda: workload.realise_routes([1.0], 1, 1, 0), "counts: has shape"),
        (lambda: workload.select_bands([1.0], []), "kappas: has shape"),
    ],
)
def test_bad_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises((InputError, ConfigError), match=message):
        call()
