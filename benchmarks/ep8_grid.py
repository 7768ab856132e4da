"""MegaFlux's evaluation grid (section 4.1) on eight ranks, however many GPUs there are; what the EP8 benchmarks share.

Decides shape, ranks, routings and realisations, and how results say on how many GPUs eight ranks ran: with fewer than
eight, ranks share a GPU (*virtual ranks*) and rows are marked ``emulated``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks import cases
from megaflux_serve.planning import workload

RANKS, HIDDEN, INTERMEDIATE, TOP_K = 8, 7168, 2048, 8
EXPERTS = (64, 128, 256)
TOKENS = tuple(1024 * k for k in (1, 2, 4, 8, 16, 32, 64))
ROUTINGS = ("balanced", *workload.BANDS, "zipf-k3", "zipf-k6")
SEEDS = workload.SEEDS
"""Of the three realisations of a routing."""

HIDING_EXPERTS, HIDING_ROUTING, HIDING_TOKENS = 256, "real-high", tuple(1024 * k for k in (1, 2, 4, 6))
"""Where Figure 5 asks how much of the transfer is hidden; 6K tokens are in no other figure."""


class Point(NamedTuple):
    """One realisation of one routing at one batch size."""

    experts: int
    tokens: int
    routing: str
    seed: int

    def routes(self) -> NDArray[np.int32]:
        """int32 [P, M, k]: the experts of every token of every rank."""
        counts = cases.Setting(self.experts, RANKS, self.tokens, self.routing).realisations()[SEEDS.index(self.seed)]
        return workload.realise_routes(counts, RANKS, TOP_K, self.seed)


def replica_slots(num_experts: int) -> int:
    """A quarter of spare capacity."""
    return num_experts // (4 * RANKS)


def points(experts: int, tokens: Sequence[int], routings: Sequence[str], realisations: int) -> list[Point]:
    """The grid for one number of experts, small batches first; with Figure 5's extra size where it lies among them."""
    found = [Point(experts, m, routing, seed) for m in tokens for routing in routings for seed in SEEDS[:realisations]]
    extra = [m for m in HIDING_TOKENS if m not in tokens and min(tokens) < m < max(tokens)]
    if experts == HIDING_EXPERTS and HIDING_ROUTING in routings:
        found += [Point(experts, m, HIDING_ROUTING, seed) for m in extra for seed in SEEDS[:realisations]]
    return sorted(found, key=lambda point: point.tokens)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that cut the grid; real routings are left out of the default where their traces are missing."""
    families, missing = cases.families()
    if missing is not None and os.environ.get("RANK", "0") == "0":
        print(missing, flush=True)
    here = [routing for routing in ROUTINGS if routing in families]
    parser.add_argument("--experts", nargs="+", type=int, default=list(EXPERTS), choices=EXPERTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), choices=TOKENS, help="a rank")
    parser.add_argument("--routings", nargs="+", default=here, choices=here)


def join() -> dist.ProcessGroup:
    """Make this process one of a group that holds the eight ranks, a GPU each.

    Raises:
        SystemExit: a number of processes that eight ranks cannot be dealt to.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if RANKS % dist.get_world_size():
        raise SystemExit(f"{RANKS} ranks on {dist.get_world_size()} GPUs: only 1, 2, 4 or 8 hold equally many")
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def spread(num_gpus: int) -> dict[str, int | bool]:
    """Case keys: how the ranks were spread."""
    return {"ranks": RANKS, "gpus": num_gpus} | ({"emulated": True} if num_gpus < RANKS else {})


__all__ = [
    "EXPERTS",
    "RANKS",
    "ROUTINGS",
    "TOKENS",
    "Point",
    "add_options",
    "join",
    "points",
    "replica_slots",
    "spread",
]
