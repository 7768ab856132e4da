"""What else computes the layer on the same ranks: rows gathered, the local experts' products, results reduce-scattered.

Three libraries do the products; all share the collectives of NCCL, the weights of the rig and its inputs. What depends
on routes alone is done before the clock starts for all of them: ids and routing weights are gathered, and rows are
sorted by expert for the two grouped products. Outputs are checked against the megakernel's.

========================== ===========================================================================================
all-gather + grouped_mm    torch: indexed rows, ``_grouped_mm``, SwiGLU, ``_grouped_mm``, scaled and added up by token
all-gather + quack         quack: a grouped product that gathers rows and applies SwiGLU, another; added up as above
all-gather + fused_experts vLLM: its Triton kernels, which sort and add up by themselves
========================== ===========================================================================================

quack and vLLM run with their default tiles: vLLM ships none tuned for these numbers of local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.layer_rig import Rig, relative_l2
from benchmarks.layer_timing import gather, say

LIMIT = 0.01
"""Relative L2 against the megakernel: both round to BF16, and the peers round once more where results are summed."""

Step = Callable[[], Tensor]


class Gathered:
    """Routes, rows and results of all ranks on this one, for the experts that live here."""

    def __init__(self, rig: Rig, topk: list[NDArray[np.int64]]) -> None:
        shape, self.rank = rig.shape, rig.ranks[0]
        self.tokens = len(topk[0])
        every = shape.num_ranks * self.tokens
        self.ids = torch.from_numpy(np.concatenate(topk)).int().cuda()
        self.local = torch.full((shape.num_experts,), -1, dtype=torch.int32, device="cuda")
        home = torch.from_numpy(rig.layout.home_experts(self.rank.rank)).long().cuda()
        self.local[home] = torch.arange(shape.home_slots, dtype=torch.int32, device="cuda")
        self.weights = torch.empty(every, shape.top_k, device="cuda")
        dist.all_gather_into_tensor(self.weights, rig.topk_weights[0][: self.tokens].contiguous())
        self.rows = torch.empty(every, shape.hidden, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty(self.tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")
        self.w13, self.w2 = rig.pools[0].w1, rig.pools[0].w2

        slot = self.local[self.ids.long()]
        token, choice = (slot >= 0).nonzero(as_tuple=True)
        order = slot[token, choice].argsort(stable=True)
        token, choice = token[order], choice[order]
        self.token, self.scale = token, self.weights[token, choice, None].bfloat16()
        rows_of_slot = torch.bincount(slot[token, choice].long(), minlength=shape.home_slots)
        self.offsets = rows_of_slot.cumsum(0).int()

    def gather_rows(self) -> Tensor:
        """BF16 [P M, H]: everybody's rows."""
        dist.all_gather_into_tensor(self.rows, self.rank.x[: self.tokens])
        return self.rows

    def sum_and_return(self, results: Tensor) -> Tensor:
        """Scale the results of the sorted rows, add them up by token, and give every rank its own."""
        return self.return_sums(torch.zeros_like(self.rows).index_add_(0, self.token, results * self.scale))

    def return_sums(self, sums: Tensor) -> Tensor:
        """BF16 [M, H] of this rank out of [P M, H] partial sums of every rank."""
        dist.reduce_scatter_tensor(self.out, sums)
        return self.out


def torch_grouped(at: Gathered) -> Step:
    """torch's grouped products."""
    w13, w2 = at.w13.transpose(1, 2), at.w2.transpose(1, 2)

    def step() -> Tensor:
        gate, up = torch._grouped_mm(at.gather_rows()[at.token], w13, offs=at.offsets).chunk(2, dim=1)
        return at.sum_and_return(torch._grouped_mm(F.silu(gate) * up, w2, offs=at.offsets))

    return step


def quack_grouped(at: Gathered) -> Step:
    """quack's grouped products, the first with gathered rows.

    Its product with SwiGLU inside does not start with the kernel language that these kernels need (quack 0.6.5, 4.8.1).
    """
    from quack.gemm_interface import gemm

    w13, w2 = at.w13.transpose(1, 2), at.w2.transpose(1, 2)
    bounds, token = F.pad(at.offsets, (1, 0)), at.token.int()

    def step() -> Tensor:
        gate, up = gemm(at.gather_rows(), w13, cu_seqlens_m=bounds, A_idx=token, tuned=False).chunk(2, dim=1)
        return at.sum_and_return(gemm(F.silu(gate) * up, w2, cu_seqlens_m=bounds, tuned=False))

    return step


def vllm_fused(at: Gathered) -> Step:
    """vLLM's fused experts; a rank's kernels skip what other ranks hold."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def step() -> Tensor:
        rows = at.gather_rows()
        experts = {"global_num_experts": len(at.local), "expert_map": at.local}
        return at.return_sums(fused_experts(rows, at.w13, at.w2, at.weights, at.ids, **experts))

    return step


PEERS: dict[str, tuple[str, Callable[[Gathered], Step]]] = {
    "all-gather + grouped_mm": ("torch", torch_grouped),
    "all-gather + quack": ("quack-kernels", quack_grouped),
    "all-gather + fused_experts": ("vllm", vllm_fused),
}
"""Name -> (package that must be installed, maker)."""


def installed_peers() -> tuple[list[str], list[str]]:
    """(names that can run here, why each other one cannot)."""
    names, reasons = [], []
    for name, (package, _) in PEERS.items():
        try:
            version(package)
            names.append(name)
        except PackageNotFoundError:
            reasons.append(f"{name} is left out: {package} is not installed")
    return names, reasons


def make_peer(name: str, at: Gathered, expected: Tensor) -> Step:
    """One step of a peer, after it has been checked.

    Args:
        name: of ``PEERS``.
        at: the batch.
        expected: BF16 [M, H], the megakernel's output.

    Raises:
        RuntimeError: another result.
    """
    step = PEERS[name][1](at)
    error = relative_l2(step(), expected.double())
    if not error < LIMIT:
        raise RuntimeError(f"relative L2 {error:.4f} against the megakernel")
    return step


def make_peers(names: Sequence[str], at: Gathered, expected: Tensor) -> dict[str, Step]:
    """A step of every peer that runs and is right on all ranks; the others are left out with a word."""
    steps = {}
    for name in names:
        problem = None
        try:
            steps[name] = make_peer(name, at, expected)
        except Exception as error:  # whatever another library raises is its own
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        problems = [of_rank for of_rank in gather(problem) if of_rank]
        if problems:
            say(f"{name} is left out: {problems[0]}")
            steps.pop(name, None)
    return steps


__all__ = ["PEERS", "Gathered", "installed_peers", "make_peers"]
