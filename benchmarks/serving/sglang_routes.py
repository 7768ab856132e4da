"""What a benchmark adds to SGLang's schedulers: random weights, routes that follow a table, a count of what was routed.

Enters as a plugin of its own (``bench_sglang_prefill`` writes its metadata), and is never in the product's path. A file
says what to do, so that a running server can be told: ``{"table": path of a .npy or null, "count": true or false}``.
Routes are forced in batches of prompts; batches of decode, which replay captured graphs, keep the model's own router.
Routing weights are the softmax of the model's own logits over the forced experts, for every backend alike.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.serving.weights import checkpoint
from megaflux_serve.durable import write_atomically

CONTROL = "MEGAFLUX_BENCHMARK_ROUTES"
"""Environment variable that names the folder of ``control.json`` and of the counts, ``counts-RANK.npy``."""


def register() -> None:
    """Hook the model's loading and its forward; without the variable nothing is hooked."""
    if CONTROL not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    routes = ForcedRoutes(Path(os.environ[CONTROL]))
    runner = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(runner, routes.take_model, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.models.qwen3_moe.Qwen3MoeForCausalLM.forward", routes.before_forward, HookType.BEFORE
    )


class ForcedRoutes:
    """The routers of one rank.

    Args:
        folder: of the control file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.changed_ns = folder, 0
        self.table: Tensor | None = None  # int16 [layers, vocabulary, k]
        self.counts: Tensor | None = None  # int64 [layers, E]
        self.tokens: Tensor | None = None  # of the rows that routers see in this batch, None where they decide

    def take_model(self, result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
        """After the model was built: give it weights, and have its routers ask ``route``."""
        from sglang.srt.layers.moe.topk import TopK

        config = runner.model_config.hf_text_config
        self.device, self.num_experts = torch.device(runner.device), config.num_experts
        runner.model.load_weights(checkpoint(config, runner.model_config.dtype, self.device))
        for module in runner.model.modules():
            if isinstance(module, TopK):
                module.topk_config.custom_routing_function = self.router(module.layer_id)

    def router(self, layer: int) -> Callable[..., tuple[Tensor, Tensor]]:
        """A routing function of SGLang's form for one layer."""

        def route(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
            if self.table is None or self.tokens is None:
                values, ids = torch.topk(torch.softmax(gating_output.float(), dim=-1), topk, dim=-1)
                return values / values.sum(dim=-1, keepdim=True) if renormalize else values, ids.to(torch.int32)
            if len(self.tokens) != len(gating_output):
                raise ValueError(f"{len(gating_output)} rows to route, for {len(self.tokens)} token ids")
            ids = self.table[layer].index_select(0, self.tokens).long()
            if self.counts is not None:
                flat = ids.flatten()
                self.counts[layer].scatter_add_(0, flat, torch.ones_like(flat))
            return gating_output.gather(1, ids).float().softmax(dim=1), ids.to(torch.int32)

        return route

    def before_forward(
        self, model: Any, input_ids: Tensor, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Before the model's forward: which tokens this rank's routers will see."""
        self.follow_control()
        # Under DP attention the first is true on all ranks if any of them has prompts.
        has_prompts = forward_batch.is_extend_in_batch or forward_batch.forward_mode.is_extend()
        self.tokens = rows_of_routers(input_ids, forward_batch) if self.table is not None and has_prompts else None

    def follow_control(self) -> None:
        """Read the control file if it has changed."""
        path = self.folder / "control.json"
        changed_ns = path.stat().st_mtime_ns if path.exists() else 0
        if changed_ns == self.changed_ns:
            return
        self.changed_ns = changed_ns
        order = json.loads(path.read_text())
        if self.counts is not None:
            self.write_counts()
        self.table = None if order["table"] is None else torch.from_numpy(np.load(order["table"])).to(self.device)
        self.counts = None
        if order["count"] and self.table is not None:
            self.counts = torch.zeros(len(self.table), self.num_experts, dtype=torch.int64, device=self.device)

    def write_counts(self) -> None:
        """What this rank's routers have counted."""
        assert self.counts is not None
        content = io.BytesIO()
        np.save(content, self.counts.cpu().numpy())
        write_atomically(self.folder / f"counts-{dist.get_rank()}.npy", content.getvalue())


def rows_of_routers(input_ids: Tensor, forward_batch: Any) -> Tensor:
    """The token ids of the rows that this rank's routers see, padding included.

    Args:
        input_ids: [N] of this rank's batch.
        forward_batch: SGLang's.
    """
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if not get_moe_a2a_backend().is_none():  # rows are scattered over the ranks that share a batch
        size = len(input_ids) // parallel.attn_tp_size
        return input_ids[parallel.attn_tp_rank * size :][:size]
    if not is_dp_attention_enabled():
        return input_ids
    lengths = list(forward_batch.global_num_tokens_cpu)  # every rank routes the rows of all
    own = input_ids.new_zeros(max(lengths))
    own[: len(input_ids)] = input_ids
    everybody = own.new_empty(len(lengths) * len(own))
    dist.all_gather_into_tensor(everybody, own, group=parallel.tp_group.device_group)
    return torch.cat([row[:length] for row, length in zip(everybody.view(len(lengths), -1), lengths, strict=True)])
