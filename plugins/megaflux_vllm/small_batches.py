"""Batches too small for replicas to pay, handed to vLLM's own kernels, which read the same weights.

Decides which batches those are, by numbers that all ranks know and agree on, and how vLLM's dispatch, fused experts and
combine are called. Routing and home placement are the same either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def rows_of_largest_rank(num_rows: int) -> int:
    """Rows of the data-parallel rank that brings most to this step; equal on all ranks.

    Args:
        num_rows: rows of this rank; tensor-parallel ranks without data parallelism all hold the same.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    return num_rows if metadata is None else int(metadata.num_tokens_across_dp_cpu.max())


def compute(layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """[M, H]: the routed experts' output for this rank's rows; collective where vLLM gathers rows.

    Args:
        layer: vLLM's layer; its weights are E/P experts, ``w13_weight`` [E/P, 2I, H] and ``w2_weight`` [E/P, H, I].
        x: [M, H].
        topk_weights: float32 [M, k].
        topk_ids: int32 [M, k].
    """
    from vllm.distributed import get_ep_group, tensor_model_parallel_all_reduce
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    parallel = layer.moe_config.moe_parallel_config
    group, is_cut = get_ep_group(), parallel.is_sequence_parallel
    is_spread = is_cut or parallel.dp_size > 1
    if is_spread:
        x, topk_weights, topk_ids = group.dispatch(x, topk_weights, topk_ids, is_cut)
    out: Tensor = fused_experts(
        x,
        layer.w13_weight,
        layer.w2_weight,
        topk_weights,
        topk_ids,
        activation=layer.activation,
        global_num_experts=layer.moe_config.num_experts,
        expert_map=layer.expert_map,
    )
    if is_spread:
        out = group.combine(out, is_cut)
    if not is_cut:
        out = tensor_model_parallel_all_reduce(out)
    return out


__all__ = ["compute", "rows_of_largest_rank"]
