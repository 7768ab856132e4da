"""Placement: which physical slot holds which logical expert, and its incremental repair (RoutePack section 3.2).

Decides where the experts of each layer live for one window. Knows no schedule. The repair starts from the placement of
the window before and swaps two experts on different ranks, again and again, until a layer's rank loads are even enough.
Loads are whole numbers, so the search is the same on every machine.

*Which swap.* ``steepest`` is the paper's rule: the swap that lowers ``sum_p G_p^2`` most. It halves the difference of
two ranks, and both need further swaps. ``landing`` lowers ``sum_p sqrt(|G_p - mean|)`` most instead: it prefers swaps
that put one rank on the mean, where it can stay. It reaches the same target with a quarter fewer moves, and goes on
with the steepest swaps where no swap lands any more.

*The best swap in O(E).* A swap of experts with loads ``x`` on rank p and ``y`` on rank q moves ``d = x - y`` from p to
q. The steepest rule gains ``2 d (g - d)`` with ``g = G_p - G_q``, most where d is closest to ``g / 2``; landing gains
most where d is closest to what rank p has too much, or rank q too little. With both ranks' loads sorted, two pointers
find the closest d in one pass. After a swap only the pairs that touch its two ranks are searched again. Ties go to the
lower pair.

*The cost-aware stop*, beyond the paper. With few experts on a rank, the CV target is out of reach and the greedy search
moves half the experts for the last per mille. With ``move_cost_rows > 0`` a layer keeps the prefix of its swaps that
minimises ``max_p G_p + move_cost_rows * moved``: straggler time and moved bytes in one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.routepack.compiled import compiled, compiled_part
from megaflux_serve.routepack.demand import FloatArray, Int32Array, Int64Array


@dataclass(frozen=True)
class Placement:
    """pi: the slot of every logical expert.

    Attributes:
        slots: int32 [L, E], pi_l(e); slot ``rank * E/P + index``. Every slot of a layer holds one expert.
        num_ranks: P, EP ranks; divides E.
    """

    slots: Int32Array
    num_ranks: int

    @classmethod
    def identity(cls, num_layers: int, num_experts: int, num_ranks: int) -> Placement:
        """Expert e in slot e of every layer, the cold start.

        Raises:
            ConfigError: P does not divide E.
        """
        if num_experts % num_ranks:
            raise ConfigError("num_ranks", num_ranks, f"a divisor of the {num_experts} experts")
        return cls(np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1)), num_ranks)

    @classmethod
    def of(cls, slots: ArrayLike, num_ranks: int) -> Placement:
        """Check a placement that comes from outside.

        Raises:
            InputError: not [L, E] integers, or a layer that is no permutation of its slots.
            ConfigError: P does not divide E.
        """
        table = np.asarray(slots)
        if table.ndim != 2 or table.dtype.kind not in "iu":
            raise InputError("placement", f"is {table.dtype} {table.shape}", "integers [L, E]")
        if num_ranks < 1 or table.shape[1] % num_ranks:
            raise ConfigError("num_ranks", num_ranks, f"a divisor of the {table.shape[1]} experts")
        wrong = (np.sort(table, axis=1) != np.arange(table.shape[1])).any(axis=1)
        if wrong.any():
            raise InputError(
                "placement", f"layer {int(wrong.argmax())} uses a slot twice or not at all", "a permutation"
            )
        return cls(np.ascontiguousarray(table, dtype=np.int32), num_ranks)

    @property
    def experts_per_rank(self) -> int:
        """E / P."""
        return int(self.slots.shape[1]) // self.num_ranks

    @property
    def owner(self) -> Int32Array:
        """int32 [L, E]: owner(pi_l(e)), the rank of every expert."""
        return self.slots // np.int32(self.experts_per_rank)

    @property
    def experts(self) -> Int32Array:
        """int32 [L, E]: the logical expert in every slot, the inverse of ``slots``."""
        return np.argsort(self.slots, axis=1).astype(np.int32)

    def rank_loads(self, loads: Int64Array) -> Int64Array:
        """int64 [L, P]: G_{l,p} of Eq. 3, from loads int64 [L, E]."""
        by_slot = np.empty_like(loads)
        np.put_along_axis(by_slot, self.slots.astype(np.int64), loads, axis=1)
        return np.asarray(by_slot.reshape(loads.shape[0], self.num_ranks, -1).sum(axis=2))

    def moved_from(self, before: Placement) -> NDArray[np.bool_]:
        """bool [L, E]: experts whose slot differs from the one in ``before``."""
        return np.asarray(self.slots != before.slots)


def coefficient_of_variation(rank_loads: Int64Array) -> FloatArray:
    """float64 [L]: standard deviation over mean of int64 [L, P] loads (section 2.3.1); 0 for a layer without load."""
    mean = np.maximum(rank_loads.mean(axis=1), np.finfo(np.float64).tiny)
    return np.asarray(rank_loads.std(axis=1) / mean)


@dataclass(frozen=True)
class PlacementOptions:
    """How a layer is repaired, and when it is good enough.

    Attributes:
        rule: ``landing`` (fewer moves) or ``steepest`` (the paper's), see the module docstring.
        cv_target: epsilon, the coefficient of variation of rank loads that is good enough; at least 0.
        move_cost_rows: routed rows of straggler time that moving one expert is worth; at least 0, 0 is the paper.
    """

    cv_target: float = 5e-4
    move_cost_rows: float = 0.0
    rule: Literal["landing", "steepest"] = "landing"

    def __post_init__(self) -> None:
        if self.rule not in ("landing", "steepest"):
            raise ConfigError("rule", self.rule, "landing or steepest")
        for name in ("cv_target", "move_cost_rows"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "a finite number of at least 0")


def move_cost_rows(expert_bytes: float, link_bytes_per_s: float, row_flops: float, rank_flops_per_s: float) -> float:
    """``PlacementOptions.move_cost_rows`` from a machine: time to move one expert over time to compute one routed row.

    Args:
        expert_bytes: weights and optimizer state of one expert.
        link_bytes_per_s: what a rank sends to its peers.
        row_flops: operations of one routed row in forward and backward, ``18 * hidden * intermediate``.
        rank_flops_per_s: what a rank reaches in its grouped products.
    """
    return (expert_bytes / link_bytes_per_s) / (row_flops / rank_flops_per_s)


def repair_placement(loads: Int64Array, before: Placement, options: PlacementOptions = PlacementOptions()) -> Placement:
    """Repair ``before`` for a window.

    Args:
        loads: int64 [L, E], L_{l,e}.
        before: the placement that the slots hold now.
        options: when to stop.

    Returns:
        The new placement. An expert that stays on its rank keeps its slot; experts that come in take the slots that
        others left, both in ascending order.

    Raises:
        InputError: ``loads`` and ``before`` differ in layers or experts.
    """
    if loads.shape != before.slots.shape:
        raise InputError("placement", f"has shape {before.slots.shape}", f"{loads.shape}, as the demand has")
    landing = options.rule == "landing"
    owner = _repair_layers(loads, before.owner, before.num_ranks, options.cv_target, options.move_cost_rows, landing)
    return Placement(assign_slots(owner, before.slots, before.experts_per_rank), before.num_ranks)


@compiled
def assign_slots(owner: Int32Array, slots_before: Int32Array, experts_per_rank: int) -> Int32Array:
    """int32 [L, E]: slots for new owners int32 [L, E]; residents stay, the others fill vacated slots in ascending
    order."""
    num_layers, num_experts = owner.shape
    slots = slots_before.copy()
    for layer in range(num_layers):
        taken = np.zeros(num_experts, dtype=np.bool_)
        for e in range(num_experts):
            if slots_before[layer, e] // experts_per_rank == owner[layer, e]:
                taken[slots_before[layer, e]] = True
        free = np.arange(num_experts // experts_per_rank) * experts_per_rank
        for e in range(num_experts):
            rank = owner[layer, e]
            if slots_before[layer, e] // experts_per_rank != rank:
                while taken[free[rank]]:
                    free[rank] += 1
                slots[layer, e] = free[rank]
                taken[free[rank]] = True
    return slots


@compiled_part
def _closest_pair(x: Int64Array, y: Int64Array, target: float) -> tuple[int, int, float]:
    """Positions in ascending ``x`` and ``y`` with ``x - y`` closest to ``target``, and that distance."""
    i, j, best_i, best_j = 0, 0, 0, 0
    best = np.inf
    while i < x.size and j < y.size:
        offset = x[i] - y[j] - target
        if abs(offset) < best:
            best, best_i, best_j = abs(offset), i, j
        if offset < 0:
            i += 1
        else:
            j += 1
    return best_i, best_j, best


@compiled_part
def _best_pair(
    x: Int64Array, y: Int64Array, above_p: int, above_q: int, num_ranks: int, landing: bool
) -> tuple[int, int, float]:
    """The best swap between two ranks whose loads lie ``above_p / P`` and ``above_q / P`` above the mean: positions and
    gain. Whole numbers, since a mean that is rounded lets a swap that only exchanges two loads seem to gain, and again
    when it is swapped back."""
    if not landing:
        half = ((above_p - above_q) // num_ranks) / 2
        i, j, distance = _closest_pair(x, y, half)
        return i, j, half * half - distance * distance
    best_i, best_j, best = 0, 0, 0.0
    if (above_p > 0) == (above_q > 0):  # both above or both below: a swap would push one further away
        return best_i, best_j, best
    for target in (above_p / num_ranks, -above_q / num_ranks):
        i, j, _ = _closest_pair(x, y, target)
        moved = (x[i] - y[j]) * num_ranks
        gain = np.sqrt(abs(above_p)) + np.sqrt(abs(above_q))
        gain -= np.sqrt(abs(above_p - moved)) + np.sqrt(abs(above_q + moved))
        if gain > best:
            best_i, best_j, best = i, j, gain
    return best_i, best_j, best


@compiled_part
def _replace(values: Int64Array, experts: Int64Array, position: int, value: int, expert: int) -> None:
    """Put (value, expert) in place of the entry at ``position`` of an ascending list, keeping it sorted."""
    while position > 0 and values[position - 1] > value:
        values[position], experts[position] = values[position - 1], experts[position - 1]
        position -= 1
    while position < values.size - 1 and values[position + 1] < value:
        values[position], experts[position] = values[position + 1], experts[position + 1]
        position += 1
    values[position], experts[position] = value, expert


@compiled
def _repair_layers(
    loads: Int64Array, owner_before: Int32Array, num_ranks: int, cv_target: float, move_cost: float, landing: bool
) -> Int32Array:
    """int32 [L, E]: new owners of every layer."""
    owners = owner_before.copy()
    for layer in range(loads.shape[0]):
        _repair_layer(loads[layer], owner_before[layer], owners[layer], num_ranks, cv_target, move_cost, landing)
    return owners


@compiled_part
def _repair_layer(
    load: Int64Array,
    home: Int32Array,
    owner: Int32Array,
    num_ranks: int,
    cv_target: float,
    move_cost: float,
    landing: bool,
) -> None:
    """Change ``owner``, int32 [E], which starts as ``home``."""
    # 1. Experts of every rank by load, and rank loads.
    per_rank = load.size // num_ranks
    values, experts = np.empty((num_ranks, per_rank), np.int64), np.empty((num_ranks, per_rank), np.int64)
    total, filled = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for e in np.argsort(load, kind="mergesort"):
        rank = owner[e]
        values[rank, filled[rank]], experts[rank, filled[rank]] = load[e], e
        filled[rank] += 1
        total[rank] += load[e]
    whole = total.sum()
    mean = whole / num_ranks

    # 2. The best swap of every pair of ranks; then the best of all, until the target is met or nothing helps.
    pair_x, pair_y = np.zeros((num_ranks, num_ranks), np.int64), np.zeros((num_ranks, num_ranks), np.int64)
    gain, stale = np.zeros((num_ranks, num_ranks)), np.ones(num_ranks, np.bool_)
    moved, best_cost, best_owner = 0, float(total.max()), owner.copy()
    while np.sqrt(((total - mean) ** 2).sum() / num_ranks) > cv_target * mean:
        best, p, q = 1e-6, -1, -1
        for a in range(num_ranks):
            for b in range(a + 1, num_ranks):
                if stale[a] or stale[b]:
                    above_a, above_b = total[a] * num_ranks - whole, total[b] * num_ranks - whole
                    pair_x[a, b], pair_y[a, b], gain[a, b] = _best_pair(
                        values[a], values[b], above_a, above_b, num_ranks, landing
                    )
                if gain[a, b] > best:
                    best, p, q = gain[a, b], a, b
        if p < 0 and not landing:
            break
        stale[:] = p < 0
        if p < 0:
            landing = False
            continue
        stale[p] = stale[q] = True
        i, j = pair_x[p, q], pair_y[p, q]
        from_p, from_q = experts[p, i], experts[q, j]
        for expert, rank in ((from_p, q), (from_q, p)):
            moved += int(rank != home[expert]) - int(owner[expert] != home[expert])
            owner[expert] = rank
        total[p] += load[from_q] - load[from_p]
        total[q] += load[from_p] - load[from_q]
        _replace(values[p], experts[p], i, load[from_q], from_q)
        _replace(values[q], experts[q], j, load[from_p], from_p)
        cost = total.max() + move_cost * moved
        if cost < best_cost:
            best_cost = cost
            best_owner[:] = owner

    # 3. The cost-aware stop.
    if move_cost > 0:
        owner[:] = best_owner
