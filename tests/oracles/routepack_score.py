"""The score of a RoutePack schedule in plain Python, from Eq. 12 to 16 and the written definitions of the two extra
terms.

Slow; imports nothing of the library.
"""

from collections.abc import Sequence


def score(
    cells: Sequence[Sequence[int]],
    demand: Sequence[Sequence[Sequence[int]]],
    owner: Sequence[Sequence[int]],
    lengths: Sequence[int],
    stages: Sequence[tuple[float, float]],
    *,
    num_ranks: int,
    num_slots: int,
    num_shards: int,
    capacity: int,
    bubble: float = 0.0,
    communication: float = 0.0,
    copies: Sequence[Sequence[Sequence[int]]] | None = None,
) -> tuple[float, float, float]:
    """(max_g U_g, sum_g U_g, max J) of the schedule whose cell ``r * num_slots + d`` trains ``cells[...]``.

    ``demand[i][l][e]`` routed rows, ``owner[l][e]`` ranks, ``copies[i][p][l]`` token copies, stages (alpha, beta).
    """
    num_rows, per_shard = len(cells) // num_slots, num_slots // num_shards
    shard_costs, row_costs = [], []
    for g in range(num_shards):
        rows = []
        for r in range(num_rows):
            first = r * num_slots + g * per_shard
            mine = cells[first : first + per_shard]
            cost = 0.0
            for alpha, beta in stages:
                cost += max(
                    alpha * sum(lengths[i] for i in cell) / capacity
                    + beta * sum((lengths[i] / capacity) ** 2 for i in cell)
                    for cell in mine
                )
            for layer, owners in enumerate(owner):
                loads, received = [0] * num_ranks, [0] * num_ranks
                for cell in mine:
                    for i in cell:
                        for expert, rank in enumerate(owners):
                            loads[rank] += demand[i][layer][expert]
                        if copies is not None:
                            for rank in range(num_ranks):
                                received[rank] += copies[i][rank][layer]
                cost += (max(loads) + communication * max(received)) / capacity
            rows.append(cost)
        row_costs += rows
        shard_costs.append(sum(rows) + bubble * max(rows))
    return max(shard_costs), sum(shard_costs), max(row_costs)
