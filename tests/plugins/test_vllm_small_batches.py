"""Batches handed to vLLM's kernels: ranks decide alike, and dispatch, experts and combine give every rank its rows.

Threads stand for ranks. vLLM's own manager of its default all-to-all and its own record of rows run on them; only the
exchange of tensors and the fused experts, which need a GPU, are replaced.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed")

from megaflux_vllm import small_batches
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.device_communicators import all2all
from vllm.forward_context import DPMetadata, set_forward_context
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

from tests.oracles.moe_float64 import moe_float64

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 32, 16


@pytest.mark.parametrize("rows_of_ranks", [[255, 255], [1, 255], [256, 1], [3, 300]])
def test_every_data_parallel_rank_sees_the_rows_of_the_largest(rows_of_ranks: list[int]) -> None:
    across = torch.tensor(rows_of_ranks, dtype=torch.int32)  # what vLLM has agreed on for the step
    for rank, rows in enumerate(rows_of_ranks):
        config = VllmConfig(parallel_config=ParallelConfig(data_parallel_size=2, data_parallel_rank=rank))
        with set_forward_context(None, config, num_tokens=rows, num_tokens_across_dp=across):
            assert small_batches.rows_of_largest_rank(rows) == max(rows_of_ranks)


def test_ranks_that_share_rows_see_what_they_hold() -> None:
    with set_forward_context(None, VllmConfig(), num_tokens=7):
        assert small_batches.rows_of_largest_rank(7) == 7
    assert small_batches.rows_of_largest_rank(7) == 7  # outside a step of vLLM


class Ranks:
    """Threads as ranks, data-parallel ones outermost.

    Args:
        dp: data-parallel ranks.
        tp: tensor-parallel ranks in each.
    """

    def __init__(self, dp: int, tp: int) -> None:
        self.dp, self.tp, self.count = dp, tp, dp * tp
        self.own = threading.local()
        self.barrier, self.brought = threading.Barrier(self.count, timeout=60), [None] * self.count

    @property
    def number(self) -> int:
        return self.own.number

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """What every rank returns."""

        def as_rank(number: int) -> Tensor:
            self.own.number = number
            return work(number)

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(as_rank, range(self.count)))

    def exchange(self, members: Sequence[int], value: Any) -> list[Any]:
        """What the members bring; every rank takes part."""
        self.brought[self.number] = value
        self.barrier.wait()
        got = [self.brought[member] for member in members]
        self.barrier.wait()
        return got


class Group:
    """A group of vLLM's, as the manager of its all-to-all uses it.

    Args:
        ranks: all of them.
        members: of a rank's group, in order.
    """

    def __init__(self, ranks: Ranks, members: Callable[[int], Sequence[int]]) -> None:
        self.ranks, self.members_of = ranks, members

    @property
    def members(self) -> Sequence[int]:
        return self.members_of(self.ranks.number)

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def rank_in_group(self) -> int:
        return self.members.index(self.ranks.number)

    def all_gatherv(self, tensors: list[Tensor], dim: int, sizes: list[int]) -> list[Tensor]:
        parts = self.ranks.exchange(self.members, tensors)
        assert [part[0].shape[0] for part in parts] == sizes
        return [torch.cat(column, dim) for column in zip(*parts, strict=True)]

    def reduce_scatterv(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        return self.all_reduce(tensor).split(sizes, dim)[self.rank_in_group]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.ranks.exchange(self.members, tensor)).sum(0)


def connect(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """Put vLLM's groups onto the threads, and its fused experts onto the CPU."""
    tp = ranks.tp
    everyone = Group(ranks, lambda own: range(ranks.count))
    data = Group(ranks, lambda own: range(own % tp, ranks.count, tp))
    tensor = Group(ranks, lambda own: range(own - own % tp, own - own % tp + tp))
    manager = object.__new__(all2all.AgRsAll2AllManager)
    manager.dp_world_size, manager.tp_group, manager.use_ep = ranks.dp, tensor, True
    everyone.dispatch, everyone.combine = manager.dispatch, manager.combine
    alone = Group(ranks, lambda own: (own,))
    for name, group in (("get_ep_group", everyone), ("get_dp_group", data), ("get_pcp_group", alone)):
        monkeypatch.setattr(all2all, name, lambda group=group: group, raising=False)
    monkeypatch.setattr("vllm.distributed.get_ep_group", lambda: everyone)
    monkeypatch.setattr("vllm.distributed.tensor_model_parallel_all_reduce", tensor.all_reduce)

    def fused_experts(
        x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, *, expert_map: Tensor | None, **_: Any
    ) -> Tensor:
        local = ids if expert_map is None else expert_map[ids]
        return moe_float64(x, local.clamp(min=0), weights * (local >= 0), w13, w2)

    fake = SimpleNamespace(fused_experts=fused_experts)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe.fused_moe", fake)


@pytest.mark.parametrize(
    ("dp", "tp", "is_cut"),
    [(1, 1, False), (2, 1, False), (1, 2, False), (2, 2, True), (2, 2, False)],
    ids=["one rank", "data", "tensor", "both, rows cut by vLLM", "both, rows held by all"],
)
def test_vllm_gives_every_rank_its_rows_however_ranks_are_spread(
    monkeypatch: pytest.MonkeyPatch, dp: int, tp: int, is_cut: bool
) -> None:
    ranks, generator = Ranks(dp, tp), torch.Generator().manual_seed(0)
    connect(monkeypatch, ranks)
    rows = torch.tensor([6, 2][:dp], dtype=torch.int32)
    x = torch.randn(int(rows.sum()), HIDDEN, generator=generator)
    weights, ids = torch.randn(len(x), EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator)

    def own_rows(number: int, tensor: Tensor) -> Tensor:
        of_group = tensor.split(rows.tolist())[number // tp]
        return of_group.chunk(tp)[number % tp] if is_cut else of_group

    def compute(number: int) -> Tensor:
        expert_map = determine_expert_map(ranks.count, number, EXPERTS, "linear")[1]
        own = slice(None) if expert_map is None else (expert_map >= 0).nonzero().flatten()
        layer = SimpleNamespace(w13_weight=w13[own], w2_weight=w2[own], expert_map=expert_map, activation=None)
        parallel = SimpleNamespace(is_sequence_parallel=is_cut, dp_size=dp)
        layer.moe_config = SimpleNamespace(moe_parallel_config=parallel, num_experts=EXPERTS)
        return small_batches.compute(layer, *(own_rows(number, tensor) for tensor in (x, weights, ids)))

    metadata = DPMetadata(rows) if dp > 1 else None
    monkeypatch.setattr("vllm.forward_context._forward_context", SimpleNamespace(dp_metadata=metadata))
    if metadata is None:
        outputs = ranks.run(compute)
    else:
        with metadata.sp_local_sizes(tp if is_cut else 1):  # as vLLM's runner does around a layer
            outputs = ranks.run(compute)
    exact = moe_float64(x, ids, weights, w13, w2)
    for number, output in enumerate(outputs):
        torch.testing.assert_close(output, own_rows(number, exact))
