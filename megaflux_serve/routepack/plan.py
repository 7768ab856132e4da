"""Planning a window: demand and lengths in, a placement and a schedule out (RoutePack sections 3 and 4).

Decides the order of the steps and what a plan holds. Every step is a module of its own; nothing here searches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from numpy.typing import ArrayLike

from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.routepack.baselines import global_ffd
from megaflux_serve.routepack.bounds import ExpertExcess, LowerBound, excess_removed, expert_excess, lower_bound
from megaflux_serve.routepack.communication import expected_rank_copies
from megaflux_serve.routepack.demand import Demand, Int32Array, Int64Array
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.optimum import pack_exactly
from megaflux_serve.routepack.placement import Placement, PlacementOptions, repair_placement
from megaflux_serve.routepack.population import SearchOptions, search
from megaflux_serve.routepack.rows import RowChoice, check_cells, choose_rows
from megaflux_serve.routepack.score import Problem, Score, row_costs, score
from megaflux_serve.routepack.seeds import build_seeds, choose_seeds
from megaflux_serve.routepack.topology import CostModel, Topology


@dataclass(frozen=True)
class PlanOptions:
    """How to plan.

    Attributes:
        cost: what a row costs.
        placement: when the repair of a layer stops.
        search: how hard to search for a schedule; None takes ``SearchOptions.for_size``.
        num_rows: fix the row count instead of choosing R*; None chooses.
        certify_rows_s: seconds that CP-SAT may spend on each row count below one that is not certified; 0 does not ask.
    """

    cost: CostModel
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    search: SearchOptions | None = None
    num_rows: int | None = None
    certify_rows_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.certify_rows_s < float("inf"):
            raise ConfigError("certify_rows_s", self.certify_rows_s, "a finite number of seconds, 0 or more")
        if self.num_rows is not None and self.num_rows < 1:
            raise ConfigError("num_rows", self.num_rows, "an integer of at least 1, or None")


@dataclass(frozen=True)
class WindowPlan:
    """What training does with one optimizer window.

    Attributes:
        topology: the machine it was planned for.
        cost: the cost model that was minimised.
        before: placement that the slots hold now.
        placement: placement during the window.
        layout: the schedule, canonical.
        rows_bound: rows that no packing can undercut; the plan has ``layout.num_rows``.
        score: exact score of ``layout`` under ``placement``.
        ffd_score: score of global FFD with the same rows and placement, where the search starts.
        bound: no schedule under ``placement`` scores below its total.
        excess: expert excess that is left.
        proposals: moves proposed in every level; as ``SearchOptions.proposals`` they repeat a timed plan.
        history: (proposals, best primary score) after seeding and after every level.
        seconds: wall-clock seconds of each step by name; not part of the decision.
    """

    topology: Topology
    cost: CostModel
    before: Placement
    placement: Placement
    layout: Layout
    rows_bound: int
    score: Score
    ffd_score: Score
    bound: LowerBound
    excess: ExpertExcess
    proposals: tuple[int, ...]
    history: tuple[tuple[int, float], ...]
    seconds: dict[str, float] = field(compare=False)

    @property
    def num_moved(self) -> int:
        """Experts whose slot changes, over all layers."""
        return int(self.placement.moved_from(self.before).sum())

    @property
    def excess_removed(self) -> float:
        """eta of section 5.3 against global FFD, 0 to 1."""
        return excess_removed(self.ffd_score.primary, self.score.primary, self.bound.total)

    @property
    def rows_certified(self) -> bool:
        """True when no packing has fewer rows."""
        return self.layout.num_rows == self.rows_bound


def plan_window(
    demand: Demand | ArrayLike,
    lengths: ArrayLike | None,
    topology: Topology,
    options: PlanOptions,
    before: Placement | None = None,
    copies: Callable[[Int32Array], Int32Array] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> WindowPlan:
    """Plan one sealed window. The same arguments give the same plan, unless ``search.budget_s`` lets the clock decide.

    1. Check the window. 2. Repair the placement. 3. Choose the row count. 4. Build the cost table. 5. Build seeds.
    6. Search. 7. Check the result.

    Args:
        demand: whole numbers [N, L, E], or a ``Demand``.
        lengths: whole numbers [N], tokens of every trajectory; None with a ``Demand``, which holds its own.
        topology: ranks, slots, shards, capacity and pipeline of the training job.
        options: cost model, budgets and seeds.
        before: placement that the slots hold now; identity without one.
        copies: given the owner of every expert, int32 [L, E], the token copies int32 [N, P, L] that ranks receive; used
            by the communication term. Without it they are estimated from the demand.
        progress: called with the step and the share of it that is done.

    Returns:
        A plan whose layout is legal and scores no worse than global FFD with the same rows.

    Raises:
        InputError: naming what is wrong with the window: NaN, negative or fractional entries, layers that disagree, no
            routed row, a trajectory longer than a cell, fewer trajectories than cells, or a placement of another shape.
        ConfigError: naming the option that is out of range.
        UnsupportedError: a row's work does not fit 32 bits.
    """
    if isinstance(demand, Demand):
        if lengths is not None:
            raise InputError("lengths", "are given beside a Demand", "None, since a Demand holds them")
        window = demand
    else:
        if lengths is None:
            raise InputError("lengths", "are missing", "tokens of every trajectory, [N]")
        window = Demand.of(demand, lengths)  # step 1
    clock = _Clock(progress)
    if before is None:
        before = Placement.identity(window.num_layers, window.num_experts, topology.num_ranks)
    elif before.num_ranks != topology.num_ranks:
        raise InputError("placement", f"is for {before.num_ranks} ranks", f"the topology's {topology.num_ranks}")
    loads = window.expert_loads()
    if not loads.any():
        raise InputError("demand", "routes no rows", "at least one trajectory with routed rows")
    placement = repair_placement(loads, before, options.placement)  # step 2
    rank_loads = placement.rank_loads(loads)
    clock.done("place")

    choice = rows_for(window, topology, options)  # step 3
    clock.done("rows")

    received = None
    if options.cost.communication > 0:
        received = (
            copies(placement.owner) if copies else expected_rank_copies(window, placement.owner, topology.num_ranks)
        )
    demand_by_rank = window.rank_demand(placement.owner, topology.num_ranks)
    problem = Problem.of(demand_by_rank, window.lengths, topology, options.cost, received)  # step 4
    clock.done("tables")

    effort = options.search or SearchOptions.for_size(window.num_trajectories)
    ffd = global_ffd(window.lengths, topology, choice).canonical(topology.num_shards)
    candidates = build_seeds(problem, ffd, effort.candidates, effort.seed)
    seeds = choose_seeds(problem, candidates, effort.members)  # step 5
    clock.done("seeds")

    found = search(problem, seeds, effort, clock.inside("search"))  # step 6
    clock.done("search")

    found.layout.check(window.lengths, topology)  # step 7
    ffd_score = score(problem, ffd)
    if found.score > ffd_score:
        raise AssertionError(f"the search returned {found.score}, worse than its seed {ffd_score}")
    return WindowPlan(
        topology,
        options.cost,
        before,
        placement,
        found.layout,
        choice.lower_bound,
        found.score,
        ffd_score,
        lower_bound(problem, rank_loads),
        expert_excess(problem, rank_loads, row_costs(problem, found.layout)),
        found.proposals,
        found.history,
        clock.seconds,
    )


def rows_for(window: Demand, topology: Topology, options: PlanOptions) -> RowChoice:
    """R*, with CP-SAT's help where it was asked for, or the fixed row count where a packing into it is known.

    Raises:
        InputError: the window does not fit, or leaves cells empty.
        ConfigError: fewer rows are asked for than the best known packing has.
        UnsupportedError: CP-SAT was asked for and ortools is missing.
    """
    choice = choose_rows(window.lengths, topology)
    if options.certify_rows_s and not choice.certified:
        choice = certify_rows(choice, window.lengths, topology, options.certify_rows_s)
    if options.num_rows is None:
        return choice
    if options.num_rows < choice.num_rows:
        raise ConfigError(
            "num_rows", options.num_rows, f"at least the {choice.num_rows} rows of the best known packing"
        )
    check_cells(window.lengths, options.num_rows, topology)
    return replace(choice, num_rows=options.num_rows)


def certify_rows(choice: RowChoice, lengths: Int64Array, topology: Topology, seconds: float) -> RowChoice:
    """Ask CP-SAT about every row count from the bound up: a packing ends the search, a proof raises the bound.

    A proof holds for fewer rows too, those that CP-SAT left open before among them.
    """
    bound = choice.lower_bound
    for num_rows in range(bound, choice.num_rows):
        bins, certain = pack_exactly(lengths, topology.capacity, num_rows * topology.num_slots, seconds)
        if bins is not None:
            return RowChoice(num_rows, bound, bins)
        if certain:
            bound = num_rows + 1
    return replace(choice, lower_bound=bound)


class _Clock:
    """Seconds of every step, and who is told."""

    def __init__(self, progress: Callable[[str, float], None] | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._start = time.perf_counter()

    def inside(self, step: str) -> Callable[[float], None] | None:
        """A callback for a step that reports its own share."""
        progress = self._progress
        return (lambda share: progress(step, share)) if progress else None

    def done(self, step: str) -> None:
        """End a step."""
        now = time.perf_counter()
        self.seconds[step] = now - self._start
        self._start = now
        if self._progress:
            self._progress(step, 1.0)
