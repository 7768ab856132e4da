"""Population annealing over layouts: levels, path weights, resampling, and the incumbent (section 4.1, appendix E.2).

Decides how a budget of proposals is spent over chains. Knows no demand beyond the problem. Chains are independent
within a level and draw from their own seeds, so the result does not depend on how many threads run them. Every chain's
best layout is scored exactly; the incumbent starts as the best seed and only ever improves.

A budget in seconds becomes a number of proposals for each level, from the pace of the level before, at first of a short
trial; these numbers are recorded. The same numbers with the same seed give the same layout on any machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from megaflux_serve.errors import ConfigError
from megaflux_serve.routepack.anneal import Tables, run_chain
from megaflux_serve.routepack.demand import FloatArray
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.score import Problem, Score, row_costs, score

SMALL_WINDOW = 64
"""Trajectories up to which a window counts as small."""
LARGEST_SEED = 2**32 - 1
"""The chains' own seeds are made of it and take 64 bits."""
TRIAL_PROPOSALS = 10_000
"""Length of the chain that is timed before the first level of a timed search, 2 to 4 ms."""


@dataclass(frozen=True)
class SearchOptions:
    """How hard to search.

    Attributes:
        proposals: moves proposed over all chains and levels, or of every level, as a timed search recorded them;
            ignored where ``budget_s`` is set.
        budget_s: wall-clock seconds for annealing instead, above 0.
        members: chains of the population.
        levels: temperature segments; chains are resampled between them.
        min_parents: distinct chains that resampling keeps at least, at most ``members``.
        candidates: seeds built, from which ``members`` are chosen; at least 2.
        hot, cold: first and last temperature in units of the mean row cost of the best seed.
        seed: of everything random.
        workers: threads; the result does not depend on it.
    """

    proposals: int | tuple[int, ...] = 2_000_000
    budget_s: float | None = None
    members: int = 2
    levels: int = 4
    min_parents: int = 1
    candidates: int = 4
    hot: float = 1e-3
    cold: float = 1e-4
    seed: int = 0
    workers: int = 2

    def __post_init__(self) -> None:
        lowest = {"members": 1, "levels": 1, "min_parents": 1, "candidates": 2, "workers": 1, "seed": 0}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ConfigError(name, getattr(self, name), f"an integer of at least {low}")
        if self.seed > LARGEST_SEED:
            raise ConfigError("seed", self.seed, f"an integer of at least 0 and at most {LARGEST_SEED}")
        if isinstance(self.proposals, tuple) and len(self.proposals) != self.levels:
            raise ConfigError("proposals", self.proposals, f"one number, or one for each of the {self.levels} levels")
        if min(self.proposals if isinstance(self.proposals, tuple) else (self.proposals,)) < 0:
            raise ConfigError("proposals", self.proposals, "0 or more")
        if self.min_parents > self.members:
            raise ConfigError("min_parents", self.min_parents, f"at most the {self.members} members")
        if self.budget_s is not None and not 0 < self.budget_s < math.inf:
            raise ConfigError("budget_s", self.budget_s, "seconds above 0")
        if not 0 < self.cold <= self.hot < math.inf:
            raise ConfigError("cold", self.cold, f"above 0 and at most hot = {self.hot}")

    @classmethod
    def for_size(cls, num_trajectories: int, **changes: Any) -> SearchOptions:
        """Defaults for a window of N trajectories, with some fields set by name.

        Long chains beat many short ones, so two cores get two chains. A small window is searched to the end many times
        over: there hotter and more chains find what two cold ones miss.
        """
        small: dict[str, Any] = {"members": 8, "hot": 0.04} if num_trajectories <= SMALL_WINDOW else {}
        return cls(**(small | changes))


@dataclass(frozen=True)
class SearchResult:
    """What the search returns.

    Attributes:
        layout: the best layout seen, canonical.
        score: its exact score.
        proposals: moves proposed in every level; as ``SearchOptions.proposals`` they repeat a timed search exactly.
        history: (proposals so far, incumbent's primary score) after seeding and after every level.
    """

    layout: Layout
    score: Score
    proposals: tuple[int, ...]
    history: tuple[tuple[int, float], ...]


def search(
    problem: Problem,
    seeds: list[Layout],
    options: SearchOptions,
    progress: Callable[[float], None] | None = None,
) -> SearchResult:
    """Anneal a population that starts from ``seeds``, best first.

    1. Incumbent: the best seed. 2. Each level cools every chain through its segment of the geometric schedule. 3. Each
    chain's best state may replace the incumbent, by exact score. 4. Between levels, chains are resampled by path
    weight.

    Args:
        problem: what is minimised.
        seeds: legal layouts with the same rows; repeated in order where there are fewer than members.
        options: budget and shape of the population.
        progress: called with the share of the budget spent, 0 to 1.
    """
    tables = Tables.of(problem)
    shards = problem.topology.num_shards
    best = min((seed.canonical(shards) for seed in seeds), key=lambda layout: score(problem, layout))  # step 1
    best_score = score(problem, best)
    unit = float(row_costs(problem, best).joint.mean())
    pace = _Pace(options, tables, best, unit)
    proposals: list[int] = []
    history = [(0, best_score.primary)]
    states = [seeds[j % len(seeds)] for j in range(options.members)]
    rng = np.random.default_rng((options.seed, 1))
    with ThreadPoolExecutor(max_workers=min(options.workers, options.members)) as pool:
        for level in range(options.levels):  # step 2
            hot, cold = (_temperature(options, unit, share / options.levels) for share in (level, level + 1))
            per_chain = pace.proposals_per_chain(level)
            job = (repeat(value) for value in (per_chain, hot, cold, best_score.primary))
            first = (options.seed * options.levels + level) * options.members
            results = list(pool.map(run_chain, repeat(tables), states, *job, range(first, first + options.members)))
            for result in results:  # step 3
                layout = Layout(result.best, best.num_rows, best.num_slots).canonical(shards)
                layout_score = score(problem, layout)
                if layout_score < best_score:
                    best, best_score = layout, layout_score
            parents = resample(np.array([r.path_weight for r in results]), options.min_parents, rng)  # step 4
            states = [Layout(results[j].last, best.num_rows, best.num_slots) for j in parents]
            pace.done(per_chain)
            proposals.append(per_chain * options.members)
            history.append((sum(proposals), best_score.primary))
            if progress:
                progress((level + 1) / options.levels)
    return SearchResult(best, best_score, tuple(proposals), tuple(history))


def resample(path_weights: FloatArray, min_parents: int, rng: np.random.Generator) -> list[int]:
    """The parent of every chain of the next level.

    Probabilities are ``softmax(gamma * path_weights)`` with the largest gamma in 0 to 1 for which M multinomial draws
    are expected to name ``min_parents`` distinct parents. The ``min_parents`` most probable each survive once, and
    systematic resampling fills the other places.

    Args:
        path_weights: float64 [M], l_j.
        min_parents: 1 to M.
        rng: one number is drawn from it.
    """
    members = path_weights.size

    def probabilities(gamma: float) -> FloatArray:
        weights = np.exp(gamma * (path_weights - path_weights.max()))
        return np.asarray(weights / weights.sum())

    def distinct(gamma: float) -> float:
        return float((1 - (1 - probabilities(gamma)) ** members).sum())

    # Equal chances name no more than this many distinct parents on average, whatever is asked for.
    wanted = min(float(min_parents), distinct(0.0))
    low, high = 0.0, 1.0
    if distinct(high) < wanted:
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if distinct(middle) >= wanted else (low, middle)
        high = low
    chances = probabilities(high)
    kept = np.argsort(-chances, kind="stable")[:min_parents].tolist()
    places = members - min_parents
    pointers = (np.arange(places) + rng.random()) / max(places, 1)
    drawn = np.minimum(np.searchsorted(np.cumsum(chances), pointers, side="right"), members - 1)
    return [*kept, *drawn.tolist()]


def _temperature(options: SearchOptions, unit: float, share: float) -> float:
    """The temperature after ``share`` of the schedule, in cost units."""
    return float(unit * options.hot * (options.cold / options.hot) ** share)


class _Pace:
    """How many proposals the next level gets: as asked for, or as many as the rest of the time allows."""

    def __init__(self, options: SearchOptions, tables: Tables, layout: Layout, unit: float) -> None:
        self.options = options
        self.start = self.since = time.perf_counter()
        self.seconds_per_proposal = 0.0  # of a chain, with all chains running
        if options.budget_s is not None:
            middle = _temperature(options, unit, 0.5)
            run_chain(tables, layout, 0, middle, middle, 0.0, 0)  # loads the compiled code
            self.start = time.perf_counter()
            run_chain(tables, layout, TRIAL_PROPOSALS, middle, middle, 0.0, 0)
            self.since = time.perf_counter()
            rounds = -(-options.members // options.workers)
            self.seconds_per_proposal = (self.since - self.start) / TRIAL_PROPOSALS * rounds

    def proposals_per_chain(self, level: int) -> int:
        """Of the next level."""
        options = self.options
        if options.budget_s is not None:
            left = options.budget_s - (self.since - self.start)
            return max(0, int(left / (options.levels - level) / self.seconds_per_proposal))
        if isinstance(options.proposals, tuple):
            return options.proposals[level] // options.members
        return -(-options.proposals // (options.levels * options.members))

    def done(self, per_chain: int) -> None:
        """Take note of the time that a level took."""
        now = time.perf_counter()
        if per_chain:
            self.seconds_per_proposal = (now - self.since) / per_chain
        self.since = now
