"""One annealing chain over layouts, compiled: the inner loop of the schedule search (RoutePack section 4.1).

Decides which moves are proposed and which are taken, at given temperatures. Knows no seeds, populations or time. A move
swaps two trajectories between cells or relocates one without emptying its cell; both keep the capacity. Only the two
row-shards that it touches are scored again: their expert loads with whole numbers, their dense stages from the stored
cost of every cell. A relocation is a swap with *nobody*, the all-zero entry N of the tables.

Three in four proposals follow the paper: a dear source, a cheap target, and whoever lives there. The rest swap with one
of the ``LENGTH_SPAN`` next longer or shorter trajectories, wherever it is: in nearly full cells few other swaps fit.

The chain draws from its own generator and compares against a table of exponential quantiles instead of calling ``exp``,
so that a seed gives the same chain on every machine. Its energy is ``max_g U_g`` with a share of ``sum_g U_g``: with
the paper's share of 1e-6, moves in shards that are not the slowest are free, and those shards drift apart
(``TOTAL_SHARE``). The paper's third term, 1e-9 of the worst row, is left to the exact comparison of results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.routepack.compiled import compiled
from megaflux_serve.routepack.demand import FloatArray, Int32Array, Int64Array
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.score import Problem

TOTAL_SHARE = 0.1
"""Weight of the shard sum beside the slowest shard in the energy."""
GUIDED_IN_256 = 205
"""Of 256 proposals, how many take the dearer of two random row-shards as source and the cheaper of two as target."""
NEIGHBOURS_IN_256 = 128
"""Of 256 proposals, how many swap neighbours in length."""
LENGTH_SPAN = 16
"""Largest distance of such neighbours in the order by length."""
COOLING_STRIDE = 64
"""Proposals at one temperature before it falls by its share of the geometric schedule."""
QUANTILES = -np.log((np.arange(4096) + 0.5) / 4096)
"""Exponential quantiles: a move that costs d is taken at temperature T when ``d <= T * QUANTILES[random]``."""


class Tables(NamedTuple):
    """A problem as the compiled chain reads it.

    ``work`` int32 [N + 1, P', X] and ``lengths`` int64 [N + 1] end with nobody; ``by_length`` int64 [N] lists
    trajectories from short to long and ``length_rank`` int64 [N] is its inverse; ``weights`` float64 [S, 2] price
    tokens and squared tokens of a cell; ``cell_room`` is the most trajectories that can share a cell.
    """

    work: Int32Array
    lengths: Int64Array
    by_length: Int64Array
    length_rank: Int64Array
    weights: FloatArray
    row_scale: float
    capacity: int
    slots_per_shard: int
    num_shards: int
    bubble: float
    cell_room: int

    @classmethod
    def of(cls, problem: Problem) -> Tables:
        """The tables of a problem; made once, shared by all chains."""
        topology, lengths = problem.topology, problem.lengths
        nobody = np.zeros((1, *problem.work.shape[1:]), dtype=np.int32)
        by_length = np.argsort(lengths, kind="stable").astype(np.int64)
        fitting = np.searchsorted(np.cumsum(lengths[by_length]), topology.capacity, side="right")
        return cls(
            np.concatenate([problem.work, nobody]),
            np.append(lengths, 0),
            by_length,
            np.argsort(by_length).astype(np.int64),
            problem.stage_weights,
            problem.row_scale,
            topology.capacity,
            topology.slots_per_shard,
            topology.num_shards,
            problem.bubble,
            int(fitting),
        )


class ChainResult(NamedTuple):
    """What a chain leaves: its last state and the best it passed, int32 [N] cells each, with the path weight of
    appendix E.2, ``-sum (1/T_k - 1/T_{k-1}) (E_{k-1} - E_ref)``, and the number of moves it took."""

    last: Int32Array
    best: Int32Array
    path_weight: float
    accepted: int


def run_chain(
    tables: Tables, layout: Layout, num_proposals: int, hot: float, cold: float, reference: float, seed: int
) -> ChainResult:
    """Anneal a layout from temperature ``hot`` to ``cold``, both in cost units.

    Args:
        tables: the problem.
        layout: where the chain starts; a legal layout.
        num_proposals: moves proposed, most of which are refused.
        hot, cold: first and last temperature, above 0.
        reference: E_ref of the path weight.
        seed: of the chain's own random numbers; the result depends on nothing else.
    """
    last, best, weight, accepted = _chain(
        tables.work,
        tables.lengths,
        tables.by_length,
        tables.length_rank,
        tables.weights,
        tables.row_scale,
        tables.capacity,
        tables.slots_per_shard,
        tables.num_shards,
        tables.bubble,
        tables.cell_room,
        layout.cell,
        layout.num_cells,
        num_proposals,
        hot,
        cold,
        reference,
        np.uint64(seed),
        QUANTILES,
    )
    return ChainResult(last, best, weight, accepted)


@compiled
def _draw(state: Any) -> Any:
    """The next state, uint64, of a xorshift generator."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@compiled
def _pick(bits: Any, lane: int, count: int) -> Any:
    """A number below ``count`` (at most 2**16) from 16-bit lane 0 to 3 of random bits, uint64."""
    chunk = (bits >> np.uint64(16 * lane)) & np.uint64(0xFFFF)
    return np.int64((chunk * np.uint64(count)) >> np.uint64(16))


@compiled
def _expert_peaks(
    load1: Int32Array, load2: Int32Array, leaves: Int32Array, enters: Int32Array, peaks: Int32Array
) -> tuple[Any, Any]:
    """Sum over layers of the busiest rank of two row-shards, after ``leaves`` and ``enters`` have changed places.

    Tables are int32 [P', X] with P' a multiple of 8; ``peaks`` int32 [2, X] is scratch. Every product is cast back to
    32 bits: numba widens int32 sums to 64, which halves the lanes. The ranks of a block are unrolled: 12 M evaluations
    a second with 8 ranks and 24 layers on one core, against 7 M with the loop over ranks outside.
    """
    num_ranks, num_layers = load1.shape
    sum1, sum2 = np.int32(0), np.int32(0)
    for block in range(0, num_ranks, 8):
        for x in range(num_layers):
            change = np.int32(enters[block, x] - leaves[block, x])
            most1, most2 = np.int32(load1[block, x] + change), np.int32(load2[block, x] - change)
            for p in range(1, 8):
                change = np.int32(enters[block + p, x] - leaves[block + p, x])
                here, there = np.int32(load1[block + p, x] + change), np.int32(load2[block + p, x] - change)
                most1 = here if here > most1 else most1
                most2 = there if there > most2 else most2
            if block:
                most1 = max(most1, peaks[0, x])
                most2 = max(most2, peaks[1, x])
            if block + 8 < num_ranks:
                peaks[0, x] = most1
                peaks[1, x] = most2
            else:
                sum1 = np.int32(sum1 + most1)
                sum2 = np.int32(sum2 + most2)
    return sum1, sum2


@compiled
def _dense_cost(
    stage_cost: FloatArray, first: int, last: int, cell1: int, new1: FloatArray, cell2: int, new2: FloatArray
) -> float:
    """A_{r,g} of cells ``first`` to ``last - 1`` when two cells have new stage costs float64 [S]."""
    total = 0.0
    for s in range(stage_cost.shape[1]):
        most = 0.0
        for c in range(first, last):
            value = stage_cost[c, s]
            if c == cell1:
                value = new1[s]
            elif c == cell2:
                value = new2[s]
            most = max(most, value)
        total += most
    return total


@compiled
def _energy(joint: FloatArray, shard_sum: FloatArray, bubble: float) -> float:
    """The scalar that acceptance compares, from J float64 [R * G] and its sums float64 [G]."""
    num_shards = shard_sum.size
    most, total = 0.0, 0.0
    for g in range(num_shards):
        cost = shard_sum[g]
        if bubble > 0:
            peak = 0.0
            for u in range(g, joint.size, num_shards):
                peak = max(peak, joint[u])
            cost += bubble * peak
        most = max(most, cost)
        total += cost
    return (most + TOTAL_SHARE * total) / (1 + TOTAL_SHARE)


@compiled
def _chain(
    work: Int32Array,
    lengths: Int64Array,
    by_length: Int64Array,
    length_rank: Int64Array,
    weights: FloatArray,
    row_scale: float,
    capacity: int,
    slots_per_shard: int,
    num_shards: int,
    bubble: float,
    cell_room: int,
    start: Int32Array,
    num_cells: int,
    num_proposals: int,
    hot: float,
    cold: float,
    reference: float,
    seed: Any,
    quantiles: FloatArray,
) -> tuple[NDArray[np.int32], NDArray[np.int32], float, int]:
    nobody, num_stages, num_units = lengths.size - 1, weights.shape[0], num_cells // slots_per_shard

    # State: members of every cell, loads of every row-shard, and the costs that follow from them.
    cell = start.copy()
    members = np.empty((num_cells, cell_room), np.int32)
    position = np.zeros(nobody, np.int32)
    count = np.zeros(num_cells, np.int64)
    tokens = np.zeros(num_cells, np.int64)
    squares = np.zeros(num_cells, np.int64)
    loads = np.zeros((num_units, work.shape[1], work.shape[2]), np.int32)
    for i in range(nobody):
        c = cell[i]
        position[i] = count[c]
        members[c, count[c]] = i
        count[c] += 1
        tokens[c] += lengths[i]
        squares[c] += lengths[i] * lengths[i]
        unit = c // slots_per_shard
        for p in range(work.shape[1]):
            for x in range(work.shape[2]):
                loads[unit, p, x] += work[i, p, x]
    stage_cost = np.zeros((num_cells, num_stages))
    for c in range(num_cells):
        for s in range(num_stages):
            stage_cost[c, s] = weights[s, 0] * tokens[c] + weights[s, 1] * squares[c]
    new1, new2 = np.zeros(num_stages), np.zeros(num_stages)
    peaks = np.zeros((2, work.shape[2]), np.int32)
    dense, expert, joint = np.zeros(num_units), np.zeros(num_units, np.int64), np.zeros(num_units)
    shard_sum = np.zeros(num_shards)
    for u in range(num_units):
        dense[u] = _dense_cost(stage_cost, u * slots_per_shard, (u + 1) * slots_per_shard, -1, new1, -1, new2)
        expert[u], _ = _expert_peaks(loads[u], loads[u], work[nobody], work[nobody], peaks)
        joint[u] = dense[u] + expert[u] * row_scale
        shard_sum[u % num_shards] += joint[u]

    energy = best_energy = _energy(joint, shard_sum, bubble)
    best, at_best = cell.copy(), True
    path_weight, accepted = 0.0, 0
    cooling = (cold / hot) ** (COOLING_STRIDE / max(num_proposals, 1))
    temperature = hot
    state = (seed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(8):
        state = _draw(state)

    for step in range(num_proposals):
        if step and step % COOLING_STRIDE == 0:
            path_weight -= (1 / (temperature * cooling) - 1 / temperature) * (energy - reference)
            temperature *= cooling

        # Propose: two cells, and who leaves each.
        state = _draw(state)
        unit1, unit2 = _pick(state, 0, num_units), _pick(state, 1, num_units)
        choice = _draw(state)
        if choice & np.uint64(0xFF) < np.uint64(GUIDED_IN_256):
            other1, other2 = _pick(state, 2, num_units), _pick(state, 3, num_units)
            if joint[other1] > joint[unit1]:
                unit1 = other1
            if joint[other2] < joint[unit2]:
                unit2 = other2
        state = _draw(choice)
        cell1 = unit1 * slots_per_shard + _pick(state, 0, slots_per_shard)
        leaves = members[cell1, _pick(state, 1, count[cell1])]
        if (choice >> np.uint64(8)) & np.uint64(0xFF) < np.uint64(NEIGHBOURS_IN_256):
            rank = length_rank[leaves] + _pick(state, 2, 2 * LENGTH_SPAN + 1) - LENGTH_SPAN
            if rank < 0 or rank >= nobody:
                continue
            enters = int(by_length[rank])
            cell2 = int(cell[enters])
            unit2 = cell2 // slots_per_shard
        else:
            cell2 = unit2 * slots_per_shard + _pick(state, 2, slots_per_shard)
            enters = nobody
            if count[cell1] == 1 or choice >> np.uint64(63):
                enters = int(members[cell2, _pick(state, 3, count[cell2])])
        if cell1 == cell2:
            continue
        longer = lengths[enters] - lengths[leaves]
        if tokens[cell1] + longer > capacity or tokens[cell2] - longer > capacity:
            continue

        # Score the two row-shards.
        wider = lengths[enters] * lengths[enters] - lengths[leaves] * lengths[leaves]
        for s in range(num_stages):
            new1[s] = weights[s, 0] * (tokens[cell1] + longer) + weights[s, 1] * (squares[cell1] + wider)
            new2[s] = weights[s, 0] * (tokens[cell2] - longer) + weights[s, 1] * (squares[cell2] - wider)
        dense1 = _dense_cost(
            stage_cost, unit1 * slots_per_shard, (unit1 + 1) * slots_per_shard, cell1, new1, cell2, new2
        )
        dense2, expert1, expert2 = dense1, expert[unit1], expert[unit2]
        if unit1 != unit2:
            dense2 = _dense_cost(
                stage_cost, unit2 * slots_per_shard, (unit2 + 1) * slots_per_shard, cell1, new1, cell2, new2
            )
            expert1, expert2 = _expert_peaks(loads[unit1], loads[unit2], work[leaves], work[enters], peaks)
        old1, old2 = joint[unit1], joint[unit2]
        joint1, joint2 = dense1 + expert1 * row_scale, dense2 + expert2 * row_scale
        change2 = joint2 - old2 if unit1 != unit2 else 0.0
        if num_shards == 1 and bubble == 0:
            change = joint1 - old1 + change2
        else:
            joint[unit1], joint[unit2] = joint1, joint2
            shard_sum[unit1 % num_shards] += joint1 - old1
            shard_sum[unit2 % num_shards] += change2
            change = _energy(joint, shard_sum, bubble) - energy
        if change > temperature * quantiles[(choice >> np.uint64(16)) & np.uint64(0xFFF)]:
            if num_shards > 1 or bubble > 0:
                joint[unit1], joint[unit2] = old1, old2
                shard_sum[unit1 % num_shards] -= joint1 - old1
                shard_sum[unit2 % num_shards] -= change2
            continue

        # Take the move.
        if change > 0 and at_best:
            best[:] = cell
            at_best = False
        accepted += 1
        energy += change
        if unit1 != unit2:
            for p in range(work.shape[1]):
                for x in range(work.shape[2]):
                    moved = np.int32(work[enters, p, x] - work[leaves, p, x])
                    loads[unit1, p, x] += moved
                    loads[unit2, p, x] -= moved
        dense[unit1], dense[unit2] = dense1, dense2
        expert[unit1], expert[unit2] = expert1, expert2
        joint[unit1], joint[unit2] = joint1, joint2
        tokens[cell1] += longer
        tokens[cell2] -= longer
        squares[cell1] += wider
        squares[cell2] -= wider
        for s in range(num_stages):
            stage_cost[cell1, s] = new1[s]
            stage_cost[cell2, s] = new2[s]
        place = position[leaves]
        if enters == nobody:
            count[cell1] -= 1
            members[cell1, place] = members[cell1, count[cell1]]
            position[members[cell1, place]] = place
            position[leaves] = count[cell2]
            count[cell2] += 1
        else:
            members[cell1, place] = enters
            position[leaves] = position[enters]
            position[enters] = place
            cell[enters] = cell1
        members[cell2, position[leaves]] = leaves
        cell[leaves] = cell2
        if energy < best_energy:
            best_energy, at_best = energy, True
    if at_best:
        best[:] = cell
    return cell, best, path_weight, accepted
