"""vLLM's own configuration objects for the tests of checks and adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType


def parallel_config(**changes: Any) -> FusedMoEParallelConfig:
    """Two data-parallel ranks with expert parallelism, seen from rank 0."""
    alone = FusedMoEParallelConfig.make_no_parallel()
    return replace(alone, **({"dp_size": 2, "ep_size": 2, "use_ep": True} | changes))


def moe_config(**changes: Any) -> FusedMoEConfig:
    """A layer of 16 experts that the backend serves."""
    plain = FusedMoEConfig(
        num_experts=16,
        experts_per_token=2,
        hidden_dim=128,
        intermediate_size=64,
        num_local_experts=8,
        num_logical_experts=16,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel_config(),
        in_dtype=torch.bfloat16,
        moe_backend="megaflux",
    )
    return replace(plain, **changes)
