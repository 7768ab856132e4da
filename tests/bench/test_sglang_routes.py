"""Forced routes of the SGLang benchmark: which tokens a rank's routers see, what they choose, and what is counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.serving import sglang_routes
from benchmarks.serving.sglang_routes import ForcedRoutes, rows_of_routers

LAYERS, VOCABULARY, EXPERTS, TOP_K = 2, 10, 4, 2


@pytest.fixture
def table() -> np.ndarray:
    """Experts of every token id: (t, t + 1) modulo E in layer 0, (t + 2, t + 3) in layer 1."""
    tokens = np.arange(VOCABULARY)
    layers = [np.stack([tokens + 2 * layer, tokens + 2 * layer + 1], axis=1) % EXPERTS for layer in range(LAYERS)]
    return np.array(layers, dtype=np.int16)


def sglang(monkeypatch: pytest.MonkeyPatch, is_none: bool, is_data_parallel: bool, tp: tuple[int, int]) -> None:
    """What ``rows_of_routers`` asks SGLang: all-to-all backend, kind of attention, (attention-TP rank, size)."""
    parallel = SimpleNamespace(attn_tp_rank=tp[0], attn_tp_size=tp[1], tp_group=SimpleNamespace(device_group=None))
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: is_data_parallel},
        "sglang.srt.layers.moe.utils": {"get_moe_a2a_backend": lambda: SimpleNamespace(is_none=lambda: is_none)},
        "sglang.srt.runtime_context": {"get_parallel": lambda: parallel},
    }
    for name, content in contents.items():
        for depth in range(1, name.count(".") + 1):
            monkeypatch.setitem(sys.modules, name.rsplit(".", depth)[0], ModuleType(name.rsplit(".", depth)[0]))
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def test_every_rank_of_a_stock_server_routes_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang(monkeypatch, is_none=True, is_data_parallel=False, tp=(1, 2))
    assert rows_of_routers(torch.tensor([3, 1, 4]), None).tolist() == [3, 1, 4]


def test_ranks_that_share_a_batch_route_their_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, rows in enumerate([[3, 1], [4, 0]]):
        sglang(monkeypatch, is_none=False, is_data_parallel=False, tp=(rank, 2))
        assert rows_of_routers(torch.tensor([3, 1, 4, 0]), None).tolist() == rows


def test_stock_data_parallel_ranks_route_the_rows_of_all_in_the_order_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sglang(monkeypatch, is_none=True, is_data_parallel=True, tp=(0, 1))
    of_ranks = [[3, 1, 4], [7]]

    def all_gather(everybody: torch.Tensor, own: torch.Tensor, group: None) -> None:
        assert own.tolist() == [7, 0, 0]
        everybody.copy_(torch.tensor([*of_ranks[0], 7, 0, 0]))

    monkeypatch.setattr(sglang_routes.dist, "all_gather_into_tensor", all_gather)
    batch = SimpleNamespace(global_num_tokens_cpu=[3, 1])
    assert rows_of_routers(torch.tensor(of_ranks[1]), batch).tolist() == [3, 1, 4, 7]


def test_routers_follow_the_control_file_and_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: np.ndarray
) -> None:
    sglang(monkeypatch, is_none=True, is_data_parallel=False, tp=(0, 1))
    monkeypatch.setattr(sglang_routes.dist, "get_rank", lambda: 0)
    routes = ForcedRoutes(tmp_path)
    routes.device, routes.num_experts = torch.device("cpu"), EXPERTS
    routers = [routes.router(layer) for layer in range(LAYERS)]
    batch = SimpleNamespace(is_extend_in_batch=False, forward_mode=SimpleNamespace(is_extend=lambda: True))
    logits = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(0))

    def forward(tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        routes.before_forward(None, torch.tensor(tokens), None, batch, pp_proxy_tensors=None)
        return [router(logits[:, :1], logits[: len(tokens)], TOP_K, True) for router in routers]

    (weights, ids), _ = forward([0, 1, 2])  # without a table the model decides
    assert ids.tolist() == logits.topk(TOP_K).indices.tolist()
    assert torch.allclose(weights.sum(dim=1), torch.ones(3))

    np.save(tmp_path / "table.npy", table)
    control = tmp_path / "control.json"
    control.write_text(json.dumps({"table": str(tmp_path / "table.npy"), "count": True}))
    for layer, (weights, ids) in enumerate(forward([0, 9, 9])):
        assert ids.tolist() == table[layer, [0, 9, 9]].tolist()
        assert torch.allclose(weights, logits.gather(1, ids.long()).softmax(dim=1))
    routes.changed_ns = 0  # file times may be coarse
    control.write_text(json.dumps({"table": str(tmp_path / "table.npy"), "count": False}))
    forward([5])
    counts = np.load(tmp_path / "counts-0.npy")
    expected = [np.bincount(table[layer, [0, 9, 9]].ravel(), minlength=EXPERTS) for layer in range(LAYERS)]
    np.testing.assert_array_equal(counts, expected)

    batch.forward_mode.is_extend = lambda: False  # decode keeps the model's own router
    (_, ids), _ = forward([5])
    assert ids.tolist() == logits[:1].topk(TOP_K).indices.tolist()
