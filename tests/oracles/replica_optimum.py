"""The exact optimum of Eq. 3 on small instances, by trying every placement of replicas; imports no library code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product


def optimal_max_load(blocks: Sequence[int], home: Sequence[int], num_ranks: int, num_replica_slots: int) -> int:
    """The smallest possible maximum of blocks on a rank.

    Args:
        blocks: b_e of every expert.
        home: the rank that owns each expert.
        num_ranks: P.
        num_replica_slots: s, replicas that a rank may hold.
    """
    return min(max_load_of(blocks, copies, num_ranks) for copies in placements(home, num_ranks, num_replica_slots))


def placements(home: Sequence[int], num_ranks: int, num_replica_slots: int) -> Iterator[list[set[int]]]:
    """Every way to fill all replica slots (more copies never hurt): for each expert the ranks that hold it."""
    choices = []
    for rank in range(num_ranks):
        foreign = [expert for expert, owner in enumerate(home) if owner != rank]
        choices.append(list(combinations(foreign, min(num_replica_slots, len(foreign)))))
    for chosen in product(*choices):
        copies = [{owner} for owner in home]
        for rank, experts in enumerate(chosen):
            for expert in experts:
                copies[expert].add(rank)
        yield copies


def max_load_of(blocks: Sequence[int], copies: Sequence[set[int]], num_ranks: int) -> int:
    """The best maximum load when expert e may run on the ranks ``copies[e]`` only.

    A set of ranks must carry the experts that can run nowhere else; by Hall's theorem (max flow = min cut, and flows
    with whole capacities are whole) the largest such bound is reached.
    """
    bound = 0
    for size in range(1, num_ranks + 1):
        for ranks in combinations(range(num_ranks), size):
            captive = sum(num for num, where in zip(blocks, copies, strict=True) if where <= set(ranks))
            bound = max(bound, -(-captive // size))
    return bound
