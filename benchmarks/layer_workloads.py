"""Shapes and routings of the layer benchmarks, and the least time that a batch can take.

Routings: ``balanced``; ``zipf-3`` and ``zipf-6``, Zipf shares with that kappa (MegaFlux section 2.2) as far as top-k
allows; any family of ``cases.REAL``, a histogram of a real model's routes, rebinned to the shape's E; and each with
``-one-rank``, which homes the most loaded experts together, the worst placement.
"""

from __future__ import annotations

import numpy as np
from megaflux_kernels.worklist import LayerShape
from numpy.typing import NDArray

from benchmarks import cases
from benchmarks.layer_rig import draw_routes
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.workload import concentrated_home, permute, realise_routes, scale_counts, zipf_shares

MATRIX_TFLOPS, MEMORY_GBPS, LINK_GBPS = 788.0, 4300.0, 394.0
"""Ceilings measured on an H200: cuBLAS 8192 cubed, device copy (read + write), copy engine over NVLink a direction."""

SHAPES = {  # E, H, I, k, replica slots
    "qwen3-30b-a3b": (128, 2048, 768, 8, 4),
    "mixtral-8x7b": (8, 4096, 14336, 2, 1),
    "deepseek-v3-e64": (64, 7168, 2048, 8, 4),
    "olmoe": (64, 2048, 1024, 8, 4),
    "gpt-oss-20b": (32, 2880, 2880, 4, 2),
}
ONE_RANK = "-one-rank"
ROUTINGS = tuple(name + suffix for name in ("balanced", "zipf-3", "zipf-6", *cases.REAL) for suffix in ("", ONE_RANK))
SEED = 17


def routes(shape: LayerShape, tokens: int, routing: str) -> tuple[list[NDArray[np.int64]], NDArray[np.int32] | None]:
    """(ids of every rank, home map or None for the usual one).

    Raises:
        FileNotFoundError: a real routing without its trace, see ``cases``.
    """
    name = routing.removesuffix(ONE_RANK)
    if name == "balanced":
        return draw_routes(shape, [tokens] * shape.num_ranks, seed=SEED), None
    if name.startswith("zipf-"):
        skew = min(float(name.removeprefix("zipf-")), 0.9 * shape.num_experts / shape.top_k)
        shares = zipf_shares(shape.num_experts, skew)
    else:
        shares = cases.family_shares(name, shape.num_experts)[0]
    rows = permute(scale_counts(shares, shape.num_ranks * tokens, shape.top_k), SEED)
    home = concentrated_home(rows, shape.num_ranks) if routing.endswith(ONE_RANK) else None
    ids = realise_routes(rows, shape.num_ranks, shape.top_k, SEED)
    return list(ids.reshape(shape.num_ranks, tokens, shape.top_k).astype(np.int64)), home


def roofline_ms(shape: LayerShape, plan: ReplicaPlan, topk: list[NDArray[np.int64]]) -> float:
    """Largest of matrix, memory and link time of the busiest rank, from the rows that it receives."""
    hidden, intermediate = shape.hidden, shape.intermediate
    rows = plan.rows().sum(axis=0)
    moved = np.bincount(plan.transfers[:, 1], minlength=shape.num_ranks) if len(plan.transfers) else np.zeros(1)
    matrix = rows.max() * 6 * hidden * intermediate / (MATRIX_TFLOPS * 1e9)
    weights = shape.slots * 6 * hidden * intermediate
    memory = (weights + rows.max() * 2 * (4 * hidden + 2 * intermediate)) / (MEMORY_GBPS * 1e6)
    home = plan.layout.home_rank
    remote = 0
    for rank in range(shape.num_ranks):
        ids = np.concatenate([ids for source, ids in enumerate(topk) if source != rank] or [np.empty((0, 1), int)])
        remote = max(remote, int((home[ids] == rank).any(axis=1).sum()))
    link = (remote * 2 * hidden + moved.max() * 6 * hidden * intermediate) / (LINK_GBPS * 1e6)
    return float(max(matrix, memory, link))


__all__ = ["ROUTINGS", "SHAPES", "roofline_ms", "routes"]
