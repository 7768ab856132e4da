"""One MoE layer on the forward megakernel, for tests and benchmarks: weights, routes, host-made tables, reference.

A process holds the *local ranks*: its own, or all P of them on one GPU (``virtual_rig``), each
with its share of the SMs and a stream of its own. Tables are made on the host by ``worklist.forward_work`` and copied
inside the stream, so that batches can change from launch to launch without a synchronisation. A debugging path: the
layer itself plans and routes on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from megaflux_kernels.forward import ForwardConfig, shared_config
from megaflux_kernels.forward_buffers import ForwardBuffers, ForwardLayer, WeightPool
from megaflux_kernels.forward_map import ForwardMap, WeightMap
from megaflux_kernels.symmetric import SymmetricMemory
from megaflux_kernels.worklist import BLOCK_ROWS, SOURCE_SHIFT, LayerShape, Tiling, WorkHeader, forward_work
from numpy.typing import NDArray
from torch import Tensor

from megaflux_serve.planning.plan import ReplicaPlan, fixed_plan
from megaflux_serve.planning.planner import plan_replicas
from megaflux_serve.planning.routes import map_blocks, source_routes
from megaflux_serve.routing import expert_counts
from megaflux_serve.slots import SlotLayout


def draw_routes(
    shape: LayerShape, tokens: Sequence[int], seed: int, skew: float = 0.0, hot: Sequence[int] = ()
) -> list[NDArray[np.int64]]:
    """int64 [M_r, k] distinct ids a rank; ``skew`` spreads popularity, every token picks the ``hot`` experts."""
    rng = np.random.default_rng(seed)
    popularity = skew * rng.normal(size=shape.num_experts)
    popularity[list(hot)] = 100.0
    scores = [rng.gumbel(size=(n, shape.num_experts)) + popularity for n in tokens]
    return [np.argsort(-s, axis=1)[:, : shape.top_k].astype(np.int64) for s in scores]


def expert_weights(shape: LayerShape, expert: int, seed: int) -> tuple[Tensor, Tensor]:
    """(w13 BF16 [2I, H], w2 BF16 [H, I]) of one expert, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(1_000_003 * seed + expert)
    hidden, intermediate = shape.hidden, shape.intermediate
    w13 = torch.randn(2 * intermediate, hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(hidden, intermediate, generator=generator, device="cuda", dtype=torch.bfloat16)
    return w13 * hidden**-0.5, w2 * intermediate**-0.5


class Rig:
    """The local ranks' buffers, inputs and streams.

    Args:
        shape: the layer.
        config: launch choices; ``num_ctas`` of one rank.
        memories: (buffers, weights) a local rank, see ``memory_sizes``.
        seed: of weights, rows and routing weights.
        timeout_s: bound of every wait.
        home_rank: int32 [E], see ``SlotLayout``; default: consecutive experts.
    """

    def __init__(
        self,
        shape: LayerShape,
        config: ForwardConfig,
        memories: Sequence[tuple[SymmetricMemory, SymmetricMemory]],
        seed: int = 0,
        timeout_s: float = 5.0,
        home_rank: NDArray[np.int32] | None = None,
    ) -> None:
        self.shape, self.config, self.seed = shape, config, seed
        self.ranks = [ForwardBuffers(shape, config, memory, timeout_s) for memory, _ in memories]
        home, replicas = weight_maps(shape)
        self.pools = [WeightPool(home, memory) for _, memory in memories]
        extents = [region.extents for region in replicas.regions.values()]
        self.replicas: list[tuple[Tensor, Tensor]] = []
        for _ in memories:
            w1, w2 = (torch.zeros(extent, dtype=torch.bfloat16, device="cuda") for extent in extents)
            self.replicas.append((w1, w2))
        self.layers = [ForwardLayer(*of_rank) for of_rank in zip(self.ranks, self.pools, self.replicas, strict=True)]
        self.streams = [torch.cuda.Stream() for _ in self.ranks]
        self.topk_weights, self.out = [], []
        for rank in self.ranks:
            generator = torch.Generator("cuda").manual_seed(7919 * seed + rank.rank)
            rank.x.normal_(generator=generator)
            weights = torch.rand(shape.max_tokens, shape.top_k, generator=generator, device="cuda")
            self.topk_weights.append(weights / weights.sum(1, keepdim=True))
            self.out.append(torch.empty(shape.max_tokens, shape.hidden, device="cuda", dtype=torch.bfloat16))
        self.place(home_rank)

    def place(self, home_rank: NDArray[np.int32] | None) -> None:
        """Put the home weights where ``home_rank`` says."""
        shape = self.shape
        self.layout = SlotLayout(
            shape.num_experts,
            shape.num_ranks,
            shape.num_replica_slots,
            home_rank,  # type: ignore[arg-type]
        )
        torch.cuda.synchronize()
        for rank, pool in zip(self.ranks, self.pools, strict=True):
            for index, expert in enumerate(self.layout.home_experts(rank.rank)):
                pool.w1[index], pool.w2[index] = expert_weights(shape, int(expert), self.seed)
        torch.cuda.synchronize()

    def plan(self, topk: Sequence[NDArray[np.int64]], replicate: bool) -> ReplicaPlan:
        """The planner's plan, or the fixed placement."""
        counts = np.stack([expert_counts(ids, self.shape.num_experts) for ids in topk])
        return plan_replicas(counts, self.layout) if replicate else fixed_plan(counts, self.layout, BLOCK_ROWS)

    def tables(self, topk: Sequence[NDArray[np.int64]], plan: ReplicaPlan) -> list[dict[str, Tensor]]:
        """Device copies of every local rank's tables for one batch."""
        blocks = map_blocks(plan)
        routes = [source_routes(plan, blocks, rank, ids) for rank, ids in enumerate(topk)]
        result = []
        for rank in (r.rank for r in self.ranks):
            moved = [
                (self.layout.home_rank[e], self.layout.home_index[e], self.layout.experts_per_rank + slot, e)
                for e, to, slot in plan.transfers
                if to == rank
            ]
            work = forward_work(
                rank,
                0,
                self.shape,
                self.config.tiling,
                np.bincount(blocks.slot[blocks.rank == rank], minlength=self.shape.slots),
                [r.rank for r in routes],
                [r.pool_row(BLOCK_ROWS) for r in routes],
                np.array(moved, dtype=np.int32).reshape(-1, 4),
            )
            names = ("header", "tasks", "row_source", "places", "transfers")
            result.append({name: torch.from_numpy(getattr(work, name)).cuda() for name in names})
        return result

    def load(self, tables: Sequence[dict[str, Tensor]]) -> None:
        """Copy tables into place, in each local rank's stream; the launch number stays."""
        for rank, stream, table in zip(self.ranks, self.streams, tables, strict=True):
            with torch.cuda.stream(stream):
                for name, values in table.items():
                    live = getattr(rank, name)
                    values = values[: WorkHeader.LAUNCH] if name == "header" else values
                    live[: len(values)].copy_(values)

    def launch(self, tokens: Sequence[int], staged: bool = False, combine: bool = True) -> None:
        """One layer on every local rank: number the launch, forward, combine the ``tokens[r]`` tokens of rank r."""
        for i, (rank, stream) in enumerate(zip(self.ranks, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                rank.next_launch()
                if staged:
                    self.layers[i].transfer()
                self.layers[i].forward(pull_weights=not staged)
                if combine:
                    rank.combine(self.topk_weights[i][: tokens[rank.rank]], self.out[i][: tokens[rank.rank]])

    def poison(self) -> None:
        """NaN in every buffer that a launch must fill before it reads it."""
        torch.cuda.synchronize()
        for rank, replicas, out in zip(self.ranks, self.replicas, self.out, strict=True):
            for buffer in (rank.pool, rank.act, rank.results, out, *replicas):
                buffer.fill_(float("nan"))
        torch.cuda.synchronize()

    def reference(self, topk: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """float64 [M, k, H] a local rank: every assignment's exact result on the BF16 inputs."""
        results = [
            torch.full((len(topk[r.rank]), self.shape.top_k, self.shape.hidden), torch.nan, dtype=torch.float64).cuda()
            for r in self.ranks
        ]
        for expert in range(self.shape.num_experts):
            places = [torch.from_numpy(np.argwhere(topk[r.rank] == expert)).cuda() for r in self.ranks]
            if not any(len(place) for place in places):
                continue
            w13, w2 = (weights.double() for weights in expert_weights(self.shape, expert, self.seed))
            for rank, place, result in zip(self.ranks, places, results, strict=True):
                token, choice = place[:, 0], place[:, 1]
                gate, up = (rank.x[token].double() @ w13.T).chunk(2, dim=1)
                result[token, choice] = (torch.nn.functional.silu(gate) * up) @ w2.T
        return results

    def errors(self, topk: Sequence[NDArray[np.int64]]) -> list[tuple[float, float]]:
        """Relative L2 of (results, out) against float64 a local rank, NaN if any value is."""
        torch.cuda.synchronize()
        values = []
        for i, (rank, exact) in enumerate(zip(self.ranks, self.reference(topk), strict=True)):
            tokens = len(exact)
            total = (exact * self.topk_weights[i][:tokens, :, None].double()).sum(1)
            values.append((relative_l2(rank.results[:tokens], exact), relative_l2(self.out[i][:tokens], total)))
        return values

    def stage_errors(self, topk: Sequence[NDArray[np.int64]]) -> list[tuple[float, float]]:
        """Relative L2 of (pool, act) against float64 a virtual rank, to see which stage went wrong; all P are local."""
        x = [rank.x.double() for rank in self.ranks]
        values = []
        for rank in self.ranks:
            code = rank.row_source[: int(rank.header[WorkHeader.NUM_BLOCKS]) * BLOCK_ROWS]
            rows = (code >= 0).nonzero()[:, 0]
            origins = [(int(c) >> SOURCE_SHIFT, int(c) & ((1 << SOURCE_SHIFT) - 1)) for c in code[rows].tolist()]
            expert = np.array([topk[s].reshape(-1)[a] for s, a in origins], dtype=np.int64)
            pool = torch.stack([x[s][a // self.shape.top_k] for s, a in origins])
            act = torch.empty(len(rows), self.shape.intermediate, dtype=torch.float64, device="cuda")
            for e in np.unique(expert):
                at = torch.from_numpy(np.flatnonzero(expert == e)).cuda()
                gate, up = (pool[at] @ expert_weights(self.shape, int(e), self.seed)[0].double().T).chunk(2, dim=1)
                act[at] = torch.nn.functional.silu(gate) * up
            values.append((relative_l2(rank.pool[rows], pool), relative_l2(rank.act[rows], act)))
        return values

    def failures(self) -> list[str]:
        """Failed waits of the local ranks."""
        return [f"rank {rank.rank}: {failure}" for rank in self.ranks if (failure := rank.failure()) is not None]


def relative_l2(value: Tensor, exact: Tensor) -> float:
    """||value - exact|| / ||exact||, 0 for empty tensors."""
    if exact.numel() == 0:
        return 0.0
    return float((value.double() - exact).norm() / exact.norm())


def weight_maps(shape: LayerShape) -> tuple[WeightMap, WeightMap]:
    """Extents of a rank's (home slots, replica slots)."""
    home, replicas = (
        WeightMap(slots, shape.hidden, shape.intermediate) for slots in (shape.home_slots, shape.num_replica_slots)
    )
    return home, replicas


def memory_sizes(shape: LayerShape, tiling: Tiling) -> tuple[int, int]:
    """Symmetric bytes of a rank: (buffers, weights)."""
    return ForwardMap(shape, tiling).symmetric_bytes, weight_maps(shape)[0].num_bytes


def virtual_rig(shape: LayerShape, seed: int = 0, timeout_s: float = 5.0, **options: object) -> Rig:
    """All P ranks on the current GPU; ``options`` are those of ``ForwardConfig``."""
    config = dataclasses.replace(shared_config(shape.num_ranks), **options)  # type: ignore[arg-type]
    memories = [SymmetricMemory.allocate(size, shape.num_ranks) for size in memory_sizes(shape, config.tiling)]
    return Rig(shape, config, list(zip(*memories, strict=True)), seed, timeout_s)


__all__ = [
    "Rig",
    "draw_routes",
    "expert_weights",
    "memory_sizes",
    "relative_l2",
    "virtual_rig",
]
