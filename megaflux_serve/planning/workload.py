"""Routing workloads of MegaFlux appendix B.1: from a load distribution to exact top-k routes.

Decides how a histogram is resized, scaled, permuted and realised, so that a benchmark's loads are those that were asked
for and not a sample of them. Knows no planner and reads no file: histograms come in as arrays, routes go out as arrays.

A workload is made in this order, each step a function::

    shares = rebin(histogram, E)  |  zipf_shares(E, kappa)  |  balanced_shares(E)     float64 [E], sums to 1
    counts = permute(scale_counts(shares, P * M, k), seed)                            int64 [E], sums to P*M*k
    topk_ids = realise_routes(counts, P, k, seed)                                     int32 [P, M, k]
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.routing import CountArray, kappa
from megaflux_serve.slots import IntArray

FloatArray = NDArray[np.float64]

SEEDS = (17, 29, 43)
"""Seeds of the paper's three realisations of a setting."""

BANDS = {"real-low": (5, 20), "real-median": (40, 60), "real-high": (80, 95), "real-extreme": (97, 100)}
"""Percentiles of kappa that define the trace-derived families."""

_EXCHANGE_ROUNDS = 8
"""At worst (E = 16, top-4) 44 % of the exchanges of a round are refused, so 0.1 % of the places stay unmixed."""

_BAND_QUARTILES = (0.25, 0.50, 0.75)


# ---- load distributions: float64 [E] shares, decreasing, summing to 1 ------------------------------------------------


def rebin(histogram: ArrayLike, num_experts: int) -> FloatArray:
    """Resize a histogram to another number of experts (Eq. 7).

    The cumulative distribution of the sorted loads is interpolated linearly and differenced at multiples of 1/E.

    Args:
        histogram: non-negative [E0] rows per expert of the source model, not all zero.
        num_experts: target E, at least 1.

    Returns:
        float64 [E], decreasing, sums to 1.

    Raises:
        InputError: negative or no rows.
        ConfigError: ``num_experts`` below 1.
    """
    source = np.asarray(histogram, dtype=np.float64)
    if source.ndim != 1 or source.size == 0 or source.min() < 0 or source.sum() == 0:
        raise InputError("histogram", f"has shape {source.shape} and sum {source.sum():g}", "[E0] rows, not all zero")
    _at_least("num_experts", num_experts, 1)
    ordered = np.sort(source)[::-1]
    cumulative = np.concatenate(([0.0], np.cumsum(ordered))) / ordered.sum()
    edges = np.arange(num_experts + 1) / num_experts
    return np.diff(np.interp(edges, np.arange(source.size + 1) / source.size, cumulative))


def balanced_shares(num_experts: int) -> FloatArray:
    """float64 [E] of 1/E: kappa 1."""
    _at_least("num_experts", num_experts, 1)
    return np.full(num_experts, 1 / num_experts)


def zipf_shares(num_experts: int, target_kappa: float) -> FloatArray:
    """Shares proportional to ``e ** -alpha``, with alpha found by bisection so that kappa is ``target_kappa``.

    Scaling may lower kappa again: no expert can take more than one of every token's k choices, so shares above 1/k are
    capped by ``scale_counts``. The paper's families have kappa 3 and 6.

    Args:
        num_experts: E, at least 2.
        target_kappa: at least 1 (uniform) and below E (one expert).

    Returns:
        float64 [E], decreasing, sums to 1; kappa within 1e-9 of the target.

    Raises:
        ConfigError: a value out of range.
    """
    _at_least("num_experts", num_experts, 2)
    if not 1 <= target_kappa < num_experts:
        raise ConfigError("target_kappa", target_kappa, f"at least 1 and below the {num_experts} experts")
    ranks = np.arange(1, num_experts + 1, dtype=np.float64)

    def shares(alpha: float) -> FloatArray:
        weights: FloatArray = ranks**-alpha / (ranks**-alpha).sum()
        return weights

    low, high = 0.0, 1.0
    while kappa(shares(high)) < target_kappa:
        high *= 2
    for _ in range(80):  # halves the interval below the spacing of float64
        middle = (low + high) / 2
        low, high = (middle, high) if kappa(shares(middle)) < target_kappa else (low, middle)
    return shares(high)


# ---- counts: int64 [E] -----------------------------------------------------------------------------------------------


def scale_counts(shares: ArrayLike, num_tokens: int, top_k: int) -> CountArray:
    """Turn shares into whole rows: ``sum = T * k`` exactly, no expert above the T tokens.

    Shares above the cap are cut to it and the rest is handed to the other experts in proportion, until none is above.
    Rounding gives the rows that flooring leaves over to the largest remainders, ties to the lower index.

    Args:
        shares: non-negative [E], not all zero, at least k of them positive.
        num_tokens: T = P * M, tokens of all ranks, at least 0.
        top_k: experts a token, 1 to E.

    Returns:
        int64 [E] rows per expert.

    Raises:
        ConfigError: a value out of range.
        InputError: shares that are negative, or positive for fewer than k experts.
    """
    wanted = np.asarray(shares, dtype=np.float64)
    _at_least("num_tokens", num_tokens, 0)
    if not 1 <= top_k <= wanted.size:
        raise ConfigError("top_k", top_k, f"1 to the {wanted.size} experts")
    if wanted.min() < 0 or np.count_nonzero(wanted) < top_k:
        raise InputError(
            "shares", f"has {np.count_nonzero(wanted > 0)} positive values", f"no negative, {top_k} positive"
        )
    rows = np.zeros(wanted.size)
    capped = np.zeros(wanted.size, dtype=bool)
    while True:
        rows[~capped] = wanted[~capped] / wanted[~capped].sum() * (top_k - capped.sum()) * num_tokens
        above = ~capped & (rows > num_tokens)
        if not above.any():
            break
        capped |= above
        rows[capped] = num_tokens
        if capped.sum() == top_k:
            rows[~capped] = 0
            break
    counts = np.floor(rows).astype(np.int64)
    left_over = num_tokens * top_k - int(counts.sum())
    order = np.argsort(-np.where(counts < num_tokens, rows - counts, -1.0), kind="stable")
    counts[order[:left_over]] += 1
    return counts


def permute(counts: CountArray, seed: int) -> CountArray:
    """The same counts under other expert ids, by a permutation that depends on ``seed`` and E only."""
    return counts[np.random.Generator(np.random.PCG64(seed)).permutation(counts.size)]


def split_by_source(counts: CountArray, num_ranks: int) -> CountArray:
    """int64 [P, E]: the rows of each expert dealt to the source ranks in turn, so that every rank sends equally many.

    A plan depends on the sums over source ranks only, so planner benchmarks need no routes.

    Raises:
        InputError: the rows do not divide by the ranks.
    """
    if counts.sum() % num_ranks:
        raise InputError("counts", f"sum to {counts.sum()}", f"a multiple of the {num_ranks} ranks")
    ends = np.cumsum(counts)
    ranks = np.arange(num_ranks)[:, None]
    dealt: CountArray = (ends - ranks - 1) // num_ranks - (ends - counts - ranks - 1) // num_ranks
    return dealt


def concentrated_home(counts: CountArray, num_ranks: int) -> IntArray:
    """int32 [E]: an adversarial home map, hottest E/P experts on rank 0, the next on rank 1, ...; ties by expert id.

    Raises:
        ConfigError: the experts do not divide by the ranks.
    """
    if num_ranks < 1 or counts.size % num_ranks:
        raise ConfigError("num_ranks", num_ranks, f"a divisor of the {counts.size} experts")
    home = np.empty(counts.size, dtype=np.int32)
    home[np.argsort(-counts, kind="stable")] = np.arange(counts.size) // (counts.size // num_ranks)
    return home


# ---- routes: int32 [P, M, k] -----------------------------------------------------------------------------------------


def realise_routes(counts: ArrayLike, num_ranks: int, top_k: int, seed: int) -> IntArray:
    """Top-k routes whose expert counts are exactly ``counts``, every token with k distinct experts.

    Rows are laid out by expert and dealt to the tokens in a shuffled order, which cannot give a token an expert twice
    because no expert has more rows than there are tokens. Then every (token, position) place is exchanged with a random
    one, so that which experts meet in a token is random too; an exchange that would repeat an expert in a token is
    refused and drawn again, up to ``_EXCHANGE_ROUNDS`` times.

    Args:
        counts: non-negative integers [E], sum P * M * k, none above P * M.
        num_ranks: source ranks P; rank r holds tokens r*M to (r+1)*M - 1.
        top_k: experts a token.
        seed: of the mixing; the same arguments give the same routes.

    Returns:
        int32 [P, M, k] logical expert ids.

    Raises:
        InputError: counts that no such routes have.
    """
    rows = np.asarray(counts)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.size == 0 or rows.min() < 0:
        raise InputError("counts", f"has shape {rows.shape} and dtype {rows.dtype}", "non-negative integers [E]")
    total = int(rows.sum())
    if total % (num_ranks * top_k):
        raise InputError("counts", f"sum to {total}", f"a multiple of {num_ranks} ranks x top-{top_k}")
    num_tokens = total // top_k
    if rows.max() > num_tokens:
        raise InputError("counts", f"has {rows.max()} rows for one expert", f"at most the {num_tokens} tokens")
    by_expert = np.repeat(np.arange(rows.size, dtype=np.int32), rows)
    random = np.random.Generator(np.random.PCG64(seed))
    routes = np.ascontiguousarray(by_expert.reshape(top_k, num_tokens).T)[random.permutation(num_tokens)]
    places = np.arange(total)
    for _ in range(_EXCHANGE_ROUNDS):
        places = _exchange(routes, places, random.integers(0, max(total, 1), places.size))
    return routes.reshape(num_ranks, num_tokens // num_ranks, top_k)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _exchange(routes: IntArray, places: NDArray[np.int64], partners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Swap ``places[i]`` with ``partners[i]`` unless that gives a token an expert twice; returns the places refused."""
    top_k = routes.shape[1]
    refused = np.empty_like(places)
    num_refused = 0
    for i, place in enumerate(places):
        token, position = divmod(place, top_k)
        other, other_position = divmod(partners[i], top_k)
        expert, other_expert = routes[token, position], routes[other, other_position]
        legal = True
        if token != other:
            for j in range(top_k):
                legal &= routes[token, j] != other_expert and routes[other, j] != expert
        if legal:
            routes[token, position], routes[other, other_position] = other_expert, expert
        else:
            refused[num_refused] = place
            num_refused += 1
    return refused[:num_refused].copy()


# ---- choice of source histograms -------------------------------------------------------------------------------------


def select_bands(kappas: ArrayLike, events: Sequence[object]) -> dict[str, tuple[int, int, int]]:
    """Choose the three source histograms of every skew band of ``BANDS``.

    Histograms are ordered by kappa; a band is the part between its two percentiles. The three are those nearest the
    25th, 50th and 75th percentile positions of the band, in this order, from distinct events; of two equally near, the
    one with less skew.

    Args:
        kappas: [n] skew of each histogram.
        events: [n] source event of each histogram (a scheduler step, an optimizer step, ...), hashable.

    Returns:
        Indices into ``kappas`` by band.

    Raises:
        InputError: lengths differ, or a band holds fewer than three distinct events.
    """
    skew = np.asarray(kappas, dtype=np.float64)
    if skew.ndim != 1 or skew.size != len(events):
        raise InputError("kappas", f"has shape {skew.shape} for {len(events)} events", "one kappa an event")
    order = np.argsort(skew, kind="stable").tolist()
    chosen = {}
    for band, (low, high) in BANDS.items():
        last = len(order) - 1
        members = order[-(-low * last // 100) : high * last // 100 + 1]
        if len({events[i] for i in members}) < len(_BAND_QUARTILES):
            raise InputError(
                "events", f"{band} holds {len(members)} of {len(order)} histograms", "three distinct events a band"
            )
        picked: list[int] = []
        for quartile in _BAND_QUARTILES:
            taken = {events[i] for i in picked}
            free = [place for place, i in enumerate(members) if events[i] not in taken]
            picked.append(members[min(free, key=lambda place: abs(place - quartile * (len(members) - 1)))])
        chosen[band] = (picked[0], picked[1], picked[2])
    return chosen


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(name, value, f"an integer of at least {low}")
