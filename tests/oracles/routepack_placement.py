"""Greedy swap repair as RoutePack section 3.2 states it, over every pair of experts. Slow; imports nothing of the
library."""


def best_swap(load: list[int], owner: list[int], num_ranks: int) -> int:
    """The largest fall of the sum of squared rank loads that one swap across ranks can bring; 0 when none lowers it."""
    totals = [0] * num_ranks
    for expert, rank in enumerate(owner):
        totals[rank] += load[expert]
    best = 0
    for a in range(len(load)):
        for b in range(a):
            p, q = owner[a], owner[b]
            if p == q:
                continue
            after_p, after_q = totals[p] - load[a] + load[b], totals[q] - load[b] + load[a]
            best = max(best, totals[p] ** 2 + totals[q] ** 2 - after_p**2 - after_q**2)
    return best


def fall_of(load: list[int], owner: list[int], swapped: list[int], num_ranks: int) -> int:
    """By how much the sum of squares falls from ``owner`` to ``swapped``."""

    def squares(owners: list[int]) -> int:
        totals = [0] * num_ranks
        for expert, rank in enumerate(owners):
            totals[rank] += load[expert]
        return sum(total**2 for total in totals)

    return squares(owner) - squares(swapped)
