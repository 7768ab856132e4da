"""The exact optimum of a RoutePack schedule with two slots and one shard, by dynamic programming over sets of
trajectories.

Time and memory grow as 3^N and 2^N: up to 14 trajectories. Imports nothing of the library.
"""

import numpy as np
from numpy.typing import NDArray


def optimum(
    lengths: NDArray[np.int64],
    work: NDArray[np.int64],
    stages: list[tuple[float, float]],
    capacity: int,
    num_rows: int,
) -> float:
    """The smallest total cost of ``num_rows`` rows of two non-empty cells.

    Args:
        lengths: [N] tokens.
        work: [N, P, L] routed rows.
        stages: (alpha, beta) of Eq. 2.
        capacity: C.
        num_rows: R.
    """
    size = 1 << lengths.size
    tokens, squares = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    loads = np.zeros((size, *work.shape[1:]), dtype=np.int64)
    for i in range(lengths.size):
        # Sets whose highest trajectory is i are the sets below 2^i with i added.
        low, high = slice(0, 1 << i), slice(1 << i, 2 << i)
        tokens[high], squares[high] = tokens[low] + lengths[i], squares[low] + lengths[i] ** 2
        loads[high] = loads[low] + work[i]
    expert = loads.max(axis=1).sum(axis=1) / capacity
    cost = np.stack([a * tokens / capacity + b * squares / capacity**2 for a, b in stages])

    row = np.full(size, np.inf)
    for members in range(1, size):
        first = _subsets_with_lowest(members)
        second = members ^ first
        legal = (second > 0) & (tokens[first] <= capacity) & (tokens[second] <= capacity)
        if legal.any():
            slowest = np.maximum(cost[:, first[legal]], cost[:, second[legal]]).sum(axis=0)
            row[members] = expert[members] + slowest.min()

    best = np.full(size, np.inf)
    best[0] = 0.0
    for _ in range(num_rows):
        longer = np.full(size, np.inf)
        for members in range(1, size):
            part = _subsets_with_lowest(members)
            longer[members] = (row[part] + best[members ^ part]).min()
        best = longer
    return float(best[size - 1])


def _subsets_with_lowest(members: int) -> NDArray[np.int64]:
    """All subsets of a bit set that hold its lowest bit."""
    subsets = np.array([members & -members], dtype=np.int64)
    rest = members & (members - 1)
    while rest:
        bit = rest & -rest
        subsets = np.concatenate([subsets, subsets | bit])
        rest ^= bit
    return subsets
