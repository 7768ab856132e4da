"""One annealing chain over layouts, compiled: the inner loop of the schedule search (RoutePack section 4.1).

Decides which moves are proposed and which are taken, at given temperatures. Knows no seeds, populations or time. Cells
are containers that stand in row-shards. Two kinds of move keep every constraint:

* *trajectories*: one leaves its cell, and nobody, one or two of another cell take its place: the paper's relocations
  and swaps, and pairs, without which nearly full cells hardly ever change. Most single swaps are with one of the
  ``LENGTH_SPAN`` next longer or shorter trajectories, wherever it is: in nearly full cells few others fit.
* *cells*: two cells of different row-shards change places, which always fits.

Only the two row-shards that a move touches are scored again: their expert loads in whole numbers, their dense stages
from the two dearest cells of each.

The chain draws from its own generator and compares against a table of exponential quantiles instead of calling ``exp``,
so that a seed gives the same chain on every machine. Its energy is ``max_g U_g`` with a share of ``sum_g U_g``
(``TOTAL_SHARE``); the paper's third term, 1e-9 of the worst row, is left to the exact comparison of results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megaflux_serve.routepack.compiled import compiled, compiled_part
from megaflux_serve.routepack.demand import FloatArray, Int32Array, Int64Array
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.score import LAYER_BLOCK, RANK_BLOCK, Problem

TOTAL_SHARE = 0.5
"""Weight of the shard sum beside the slowest shard in the energy. With the paper's 1e-6, moves in the other shards are
free and undo each other: two shards of 8 slots then lose 1 to 2 of 53 points of excess removed; 0.1 lies between."""
GUIDED_IN_256 = 100
"""Of 256 proposals, how many take the dearer of two random row-shards as source and the cheaper of two as target. The
paper guides most proposals; between 30 and 205 we saw no difference."""
CELLS_IN_256 = 32
"""Of 256 proposals, how many exchange two cells."""
NEIGHBOURS_IN_256 = 144
"""Of 256 proposals, how many swap neighbours in length."""
PAIRS_IN_256 = 40
"""Of 256 proposals, how many exchange one trajectory for two."""
LENGTH_SPAN = 32
"""Largest distance of neighbours in the order by length; a quarter of a small window."""
COOLING_STRIDE = 64
"""Proposals at one temperature before it falls by its share of the geometric schedule."""
QUANTILES = -np.log((np.arange(4096) + 0.5) / 4096)
"""Exponential quantiles: a move that costs d is taken at temperature T when ``d <= T * QUANTILES[random]``."""


class Tables(NamedTuple):
    """A problem as the compiled chain reads it; trajectory N is *nobody*, of no length and work.

    Attributes:
        work: int32 [N + 1, P', X / LAYER_BLOCK, LAYER_BLOCK].
        lengths: int64 [N + 1].
        by_length: int64 [N], trajectories from short to long.
        length_rank: int64 [N], its inverse.
        weights: float64 [S, 2], price of tokens and squared tokens of a cell.
        row_scale: cost of one table entry.
        capacity, slots_per_shard, num_shards: of the topology.
        bubble: PP - 1, or 0 without the pipeline term.
        cell_room: the most trajectories that can share a cell, and two more that a move may bring before one leaves.
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
        num_trajectories, num_ranks, _ = problem.work.shape
        work = np.zeros((num_trajectories + 1, *problem.work.shape[1:]), dtype=np.int32)
        work[:-1] = problem.work
        by_length = np.argsort(lengths, kind="stable").astype(np.int64)
        fitting = np.searchsorted(np.cumsum(lengths[by_length]), topology.capacity, side="right")
        return cls(
            work.reshape(num_trajectories + 1, num_ranks, -1, LAYER_BLOCK),
            np.append(lengths, 0),
            by_length,
            np.argsort(by_length).astype(np.int64),
            problem.stage_weights,
            problem.row_scale,
            topology.capacity,
            topology.slots_per_shard,
            topology.num_shards,
            problem.bubble,
            int(fitting) + 2,
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
    state = _start(tables, layout.cell, layout.num_cells)
    best, weight, accepted = _chain(
        tables, state, num_proposals, hot, cold, reference, np.uint64(seed), QUANTILES, tables.lengths.size - 1
    )
    return ChainResult(_layout_of(state), best, weight, accepted)


class _State(NamedTuple):
    """Where everything is, and what it costs. K cells in U row-shards."""

    cell: Int32Array  # [N], of every trajectory
    members: Int32Array  # [K, room], trajectories of a cell in any order
    position: Int32Array  # [N], index in members
    held: Int64Array  # [K], trajectories of a cell
    tokens: Int64Array  # [K]
    squares: Int64Array  # [K], squared tokens
    stage_cost: FloatArray  # [K, S]
    slowest: Int32Array  # [U, S], the cell whose stage costs most
    slow_cost: FloatArray  # [U, S, 2], its cost, and the most of the unit's other cells
    cell_work: Int32Array  # [K, *] as work
    seat: Int32Array  # [K], unit * slots_per_shard + index: where a cell stands
    occupant: Int32Array  # [K], its inverse
    load: Int32Array  # [U, *] as work
    expert: Int64Array  # [U], sum over layers of the busiest rank, in table entries
    joint: FloatArray  # [U], J
    shard_sum: FloatArray  # [G]


@compiled
def _start(tables: Tables, layout_cell: Int32Array, num_cells: int) -> _State:
    """The state of a layout; cell c of the layout stands at seat c."""
    work, lengths, weights, per_shard = tables.work, tables.lengths, tables.weights, tables.slots_per_shard
    num_units, num_stages = num_cells // per_shard, weights.shape[0]
    state = _State(
        layout_cell.copy(),
        np.empty((num_cells, tables.cell_room), np.int32),
        np.zeros(layout_cell.size, np.int32),
        np.zeros(num_cells, np.int64),
        np.zeros(num_cells, np.int64),
        np.zeros(num_cells, np.int64),
        np.zeros((num_cells, num_stages)),
        np.zeros((num_units, num_stages), np.int32),
        np.zeros((num_units, num_stages, 2)),
        np.zeros((num_cells, *work.shape[1:]), np.int32),
        np.arange(num_cells).astype(np.int32),
        np.arange(num_cells).astype(np.int32),
        np.zeros((num_units, *work.shape[1:]), np.int32),
        np.zeros(num_units, np.int64),
        np.zeros(num_units),
        np.zeros(tables.num_shards),
    )
    for i in range(layout_cell.size):
        c = layout_cell[i]
        state.members[c, state.held[c]] = i
        state.position[i] = state.held[c]
        state.held[c] += 1
        state.tokens[c] += lengths[i]
        state.squares[c] += lengths[i] * lengths[i]
        state.cell_work[c] += work[i]
        state.load[c // per_shard] += work[i]
    for c in range(num_cells):
        for s in range(num_stages):
            state.stage_cost[c, s] = weights[s, 0] * state.tokens[c] + weights[s, 1] * state.squares[c]
    nothing = work[layout_cell.size]
    for u in range(num_units):
        state.expert[u] = _expert_peaks(state.load[u], state.load[u], nothing, nothing)[0]
        _find_slowest(state, u, per_shard)
        state.joint[u] = state.slow_cost[u, :, 0].sum() + state.expert[u] * tables.row_scale
        state.shard_sum[u % tables.num_shards] += state.joint[u]
    return state


@compiled
def _layout_of(state: _State) -> Int32Array:
    """int32 [N]: the layout's cell of every trajectory."""
    return state.seat[state.cell]


@compiled_part
def _draw(bits: Any) -> Any:
    """The next state, uint64, of a xorshift generator."""
    bits ^= bits << np.uint64(13)
    bits ^= bits >> np.uint64(7)
    return bits ^ (bits << np.uint64(17))


@compiled_part
def _pick(bits: Any, lane: int, count: int) -> Any:
    """A number below ``count`` (at most 2**16) from 16-bit lane 0 to 3 of random bits, uint64."""
    chunk = (bits >> np.uint64(16 * lane)) & np.uint64(0xFFFF)
    return np.int64((chunk * np.uint64(count)) >> np.uint64(16))


@compiled_part
def _expert_peaks(load1: Int32Array, load2: Int32Array, leaves: Int32Array, enters: Int32Array) -> tuple[Any, Any]:
    """Sum over layers of the busiest rank of two row-shards, after ``leaves`` and ``enters`` have changed places.

    Tables are int32 [P', X / LAYER_BLOCK, LAYER_BLOCK]. Both block sizes are constants here: a loop over layers of
    unknown length is compiled for runs of 32 layers and more, and goes through those of a small model one by one. Every
    sum is cast back to 32 bits: numba widens int32 sums to 64, which halves the lanes.
    """
    if load1.shape[0] > RANK_BLOCK:
        return _busiest(load1, leaves, enters), _busiest(load2, enters, leaves)
    sum1, sum2 = np.int32(0), np.int32(0)
    for block in range(load1.shape[1]):
        for x in range(LAYER_BLOCK):
            change = np.int32(enters[0, block, x] - leaves[0, block, x])
            most1, most2 = np.int32(load1[0, block, x] + change), np.int32(load2[0, block, x] - change)
            for p in range(1, RANK_BLOCK):
                change = np.int32(enters[p, block, x] - leaves[p, block, x])
                here, there = np.int32(load1[p, block, x] + change), np.int32(load2[p, block, x] - change)
                most1 = here if here > most1 else most1
                most2 = there if there > most2 else most2
            sum1 = np.int32(sum1 + most1)
            sum2 = np.int32(sum2 + most2)
    return sum1, sum2


@compiled_part
def _busiest(load: Int32Array, leaves: Int32Array, enters: Int32Array) -> Any:
    """Sum over layers of the busiest rank of one row-shard with any number of ranks."""
    shape = load.shape[0], load.shape[1] * LAYER_BLOCK
    load, leaves, enters = load.reshape(shape), leaves.reshape(shape), enters.reshape(shape)
    peaks = np.zeros(shape[1], np.int32)
    for p in range(shape[0]):
        for x in range(shape[1]):
            here = np.int32(load[p, x] + np.int32(enters[p, x] - leaves[p, x]))
            peaks[x] = here if here > peaks[x] else peaks[x]
    return np.int32(peaks.sum())


@compiled_part
def _find_slowest(state: _State, unit: int, per_shard: int) -> None:
    """Bring ``slowest`` and ``slow_cost`` of a row-shard up to date."""
    for s in range(state.stage_cost.shape[1]):
        slowest, most, second = -1, 0.0, 0.0
        for at in range(unit * per_shard, (unit + 1) * per_shard):
            c = state.occupant[at]
            value = state.stage_cost[c, s]
            if value > most:
                slowest, most, second = c, value, most
            else:
                second = max(second, value)
        state.slowest[unit, s] = slowest
        state.slow_cost[unit, s, 0], state.slow_cost[unit, s, 1] = most, second


@compiled_part
def _dense_cost(state: _State, unit: int, cell: int, new: FloatArray) -> float:
    """A of a row-shard when one of its cells has new stage costs float64 [S]; the other cells are not looked at."""
    total = 0.0
    for s in range(new.size):
        total += max(new[s], state.slow_cost[unit, s, np.int64(state.slowest[unit, s] == cell)])
    return total


@compiled_part
def _dense_cost_of_both(
    state: _State, unit: int, per_shard: int, cell1: int, new1: FloatArray, cell2: int, new2: FloatArray
) -> float:
    """The same when two of its cells have new stage costs."""
    total = 0.0
    for s in range(new1.size):
        most = max(new1[s], new2[s])
        for at in range(unit * per_shard, (unit + 1) * per_shard):
            c = state.occupant[at]
            if c != cell1 and c != cell2:
                most = max(most, state.stage_cost[c, s])
        total += most
    return total


@compiled_part
def _energy(joint: FloatArray, shard_sum: FloatArray, bubble: float) -> float:
    """The scalar that acceptance compares, from J float64 [U] and its sums float64 [G]."""
    most, total = 0.0, 0.0
    for g in range(shard_sum.size):
        cost = shard_sum[g]
        if bubble > 0:
            peak = 0.0
            for u in range(g, joint.size, shard_sum.size):
                peak = max(peak, joint[u])
            cost += bubble * peak
        most = max(most, cost)
        total += cost
    return (most + TOTAL_SHARE * total) / (1 + TOTAL_SHARE)


@compiled_part
def _shift(load1: Int32Array, load2: Int32Array, leaves: Int32Array, enters: Int32Array) -> None:
    """Let ``leaves`` and ``enters`` change places between two loads."""
    for p in range(load1.shape[0]):
        for block in range(load1.shape[1]):
            for x in range(LAYER_BLOCK):
                change = np.int32(enters[p, block, x] - leaves[p, block, x])
                load1[p, block, x] += change
                load2[p, block, x] -= change


@compiled_part
def _move_one(state: _State, i: int, to: int) -> None:
    """Put trajectory i into another cell; counts, members and positions only."""
    c, at = state.cell[i], state.position[i]
    state.held[c] -= 1
    last = state.members[c, state.held[c]]
    state.members[c, at] = last
    state.position[last] = at
    state.members[to, state.held[to]] = i
    state.position[i] = state.held[to]
    state.held[to] += 1
    state.cell[i] = to


@compiled_part
def _exchange_trajectories(tables: Tables, state: _State, i: int, j: int, k: int, cell1: int, cell2: int) -> None:
    """Move i from cell1 to cell2, and j and k, which may be nobody, the other way; members and dense costs."""
    lengths, weights = tables.lengths, tables.weights
    if j < lengths.size - 1:
        _move_one(state, j, cell1)
    if k < lengths.size - 1:
        _move_one(state, k, cell1)
    _move_one(state, i, cell2)
    longer = lengths[j] + lengths[k] - lengths[i]
    wider = lengths[j] * lengths[j] + lengths[k] * lengths[k] - lengths[i] * lengths[i]
    for c, sign in ((cell1, 1), (cell2, -1)):
        state.tokens[c] += sign * longer
        state.squares[c] += sign * wider
        for s in range(weights.shape[0]):
            state.stage_cost[c, s] = weights[s, 0] * state.tokens[c] + weights[s, 1] * state.squares[c]


@compiled_part
def _exchange_cells(state: _State, cell1: int, cell2: int) -> None:
    """Let two cells change seats."""
    seat1, seat2 = state.seat[cell1], state.seat[cell2]
    state.seat[cell1], state.seat[cell2] = seat2, seat1
    state.occupant[seat1], state.occupant[seat2] = cell2, cell1


@compiled
def _chain(
    tables: Tables,
    state: _State,
    num_proposals: int,
    hot: float,
    cold: float,
    reference: float,
    seed: Any,
    quantiles: FloatArray,
    nobody: int,
) -> tuple[Int32Array, float, int]:
    """Run a chain on ``state`` in place; returns the best layout, the path weight and the moves taken."""
    work, lengths, weights, per_shard = tables.work, tables.lengths, tables.weights, tables.slots_per_shard
    num_units, num_stages = state.joint.size, weights.shape[0]
    new1, new2 = np.zeros(num_stages), np.zeros(num_stages)
    couple = np.zeros(work.shape[1:], np.int32)
    span = min(LENGTH_SPAN, nobody // 4 + 1)
    plain = tables.num_shards == 1 and tables.bubble == 0
    energy = best_energy = _energy(state.joint, state.shard_sum, tables.bubble)
    best, at_best = _layout_of(state), True
    path_weight, accepted, temperature = 0.0, 0, hot
    cooling = (cold / hot) ** (COOLING_STRIDE / max(num_proposals, 1))
    bits = (seed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(8):
        bits = _draw(bits)

    for step in range(num_proposals):
        if step and step % COOLING_STRIDE == 0:
            path_weight -= (1 / (temperature * cooling) - 1 / temperature) * (energy - reference)
            temperature *= cooling

        # 1. Propose: two cells, and what changes places between them.
        bits = _draw(bits)
        unit1, unit2 = _pick(bits, 0, num_units), _pick(bits, 1, num_units)
        choice = _draw(bits)
        if choice & np.uint64(0xFF) < np.uint64(GUIDED_IN_256):
            other1, other2 = _pick(bits, 2, num_units), _pick(bits, 3, num_units)
            if state.joint[other1] > state.joint[unit1]:
                unit1 = other1
            if state.joint[other2] < state.joint[unit2]:
                unit2 = other2
        bits = _draw(choice)
        kind = np.int64((choice >> np.uint64(8)) & np.uint64(0xFF))
        cell1 = state.occupant[unit1 * per_shard + _pick(bits, 0, per_shard)]
        cell2 = state.occupant[unit2 * per_shard + _pick(bits, 1, per_shard)]
        i, j, k = nobody, nobody, nobody
        if kind < CELLS_IN_256:
            if unit1 == unit2:
                continue
            leaves, enters = state.cell_work[cell1], state.cell_work[cell2]
            for s in range(num_stages):
                new1[s], new2[s] = state.stage_cost[cell2, s], state.stage_cost[cell1, s]
        else:
            i = state.members[cell1, _pick(bits, 2, state.held[cell1])]
            if kind < CELLS_IN_256 + NEIGHBOURS_IN_256:
                rank = tables.length_rank[i] + _pick(bits, 3, 2 * span + 1) - span
                if rank < 0 or rank >= nobody:
                    continue
                j = tables.by_length[rank]
                cell2 = state.cell[j]
                unit2 = state.seat[cell2] // per_shard
            elif kind < CELLS_IN_256 + NEIGHBOURS_IN_256 + PAIRS_IN_256:
                if state.held[cell2] < 2:
                    continue
                first = _pick(bits, 3, state.held[cell2])
                second = _pick(choice, 3, state.held[cell2] - 1)
                j = state.members[cell2, first]
                k = state.members[cell2, second + 1 if second >= first else second]
            elif state.held[cell1] == 1 or choice >> np.uint64(63):
                j = state.members[cell2, _pick(bits, 3, state.held[cell2])]
            if cell1 == cell2:
                continue
            longer = lengths[j] + lengths[k] - lengths[i]
            if state.tokens[cell1] + longer > tables.capacity or state.tokens[cell2] - longer > tables.capacity:
                continue
            wider = lengths[j] * lengths[j] + lengths[k] * lengths[k] - lengths[i] * lengths[i]
            for s in range(num_stages):
                more = weights[s, 0] * longer + weights[s, 1] * wider
                new1[s], new2[s] = state.stage_cost[cell1, s] + more, state.stage_cost[cell2, s] - more
            leaves, enters = work[i], work[j]
            if k != nobody:
                for p in range(work.shape[1]):
                    for block in range(work.shape[2]):
                        for x in range(LAYER_BLOCK):
                            couple[p, block, x] = np.int32(work[j, p, block, x] + work[k, p, block, x])
                enters = couple

        # 2. Score the two row-shards.
        old1, old2 = state.joint[unit1], state.joint[unit2]
        expert1, expert2 = state.expert[unit1], state.expert[unit2]
        if unit1 == unit2:
            joint1 = _dense_cost_of_both(state, unit1, per_shard, cell1, new1, cell2, new2) + expert1 * tables.row_scale
            joint2, change2 = joint1, 0.0
        else:
            dense1, dense2 = _dense_cost(state, unit1, cell1, new1), _dense_cost(state, unit2, cell2, new2)
            expert1, expert2 = _expert_peaks(state.load[unit1], state.load[unit2], leaves, enters)
            joint1, joint2 = dense1 + expert1 * tables.row_scale, dense2 + expert2 * tables.row_scale
            change2 = joint2 - old2
        change1 = joint1 - old1
        state.joint[unit1], state.joint[unit2] = joint1, joint2
        state.shard_sum[unit1 % tables.num_shards] += change1
        state.shard_sum[unit2 % tables.num_shards] += change2
        change = change1 + change2 if plain else _energy(state.joint, state.shard_sum, tables.bubble) - energy

        # 3. Refuse or take the move.
        if change > temperature * quantiles[(choice >> np.uint64(16)) & np.uint64(0xFFF)]:
            state.joint[unit1], state.joint[unit2] = old1, old2
            state.shard_sum[unit1 % tables.num_shards] -= change1
            state.shard_sum[unit2 % tables.num_shards] -= change2
            continue
        if change > 0 and at_best:
            best, at_best = _layout_of(state), False
        accepted += 1
        energy += change
        if unit1 != unit2:
            state.expert[unit1], state.expert[unit2] = expert1, expert2
            _shift(state.load[unit1], state.load[unit2], leaves, enters)
        if i == nobody:
            _exchange_cells(state, cell1, cell2)
        else:
            _exchange_trajectories(tables, state, i, j, k, cell1, cell2)
            _shift(state.cell_work[cell1], state.cell_work[cell2], leaves, enters)
        _find_slowest(state, unit1, per_shard)
        _find_slowest(state, unit2, per_shard)
        if energy < best_energy:
            best_energy, at_best = energy, True
    if at_best:
        best = _layout_of(state)
    return best, path_weight, accepted
