"""Independent checks of constructed workloads, in exact arithmetic and plain loops; imports no library code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction


def rebinned(histogram: Sequence[int], num_experts: int) -> list[Fraction]:
    """Eq. 7 as an integral: bin e collects the density of the sorted source bins that it overlaps."""
    ordered, total = sorted(histogram, reverse=True), sum(histogram)
    shares = []
    for e in range(num_experts):
        share = Fraction(0)
        for i, rows in enumerate(ordered):
            left = max(Fraction(e, num_experts), Fraction(i, len(ordered)))
            right = min(Fraction(e + 1, num_experts), Fraction(i + 1, len(ordered)))
            if right > left:
                share += (right - left) * len(ordered) * Fraction(rows, total)
        shares.append(share)
    return shares


def scaling_problem(shares: Sequence[float], counts: Sequence[int], num_tokens: int, top_k: int) -> str | None:
    """What is wrong with counts that should be shares times one factor, capped at the tokens, rounded; or None."""
    if sum(counts) != num_tokens * top_k:
        return f"{sum(counts)} rows instead of {num_tokens * top_k}"
    if max(counts) > num_tokens or min(counts) < 0:
        return f"counts from {min(counts)} to {max(counts)}"
    free = [(share, rows) for share, rows in zip(shares, counts, strict=True) if rows < num_tokens and share > 0]
    factors = [Fraction(rows) / Fraction(share) for share, rows in free]
    slack = [1 / Fraction(share) for share, _ in free]  # one row more or less
    lowest = min((factor + width for factor, width in zip(factors, slack, strict=True)), default=None)
    highest = max((factor - width for factor, width in zip(factors, slack, strict=True)), default=None)
    if lowest is not None and highest is not None and highest > lowest:
        return f"no single factor fits all: {float(highest)} > {float(lowest)}"
    for share, rows in zip(shares, counts, strict=True):
        if rows == num_tokens and lowest is not None and share * lowest < num_tokens - 1:
            return f"share {share} was raised to the cap"
        if share == 0 and rows:
            return f"{rows} rows for an expert without a share"
    return None


def routes_problem(routes: Sequence[Sequence[Sequence[int]]], counts: Sequence[int], top_k: int) -> str | None:
    """What is wrong with routes [rank][token][position] that should realise the counts; or None."""
    if len({len(tokens) for tokens in routes}) > 1:
        return "ranks hold different numbers of tokens"
    seen: Counter[int] = Counter()
    for rank, tokens in enumerate(routes):
        for token, experts in enumerate(tokens):
            if len(experts) != top_k or len(set(experts)) != top_k:
                return f"rank {rank}, token {token} has {experts}"
            seen.update(experts)
    wrong = [e for e in range(len(counts)) if seen[e] != counts[e]]
    return f"expert {wrong[0]} has {seen[wrong[0]]} rows instead of {counts[wrong[0]]}" if wrong else None
