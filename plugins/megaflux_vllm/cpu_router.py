"""The top-k operator that vLLM's CPU wheels may lack.

Decides nothing about routing: it gives vLLM's own router the operator that its decomposed path calls. On a GPU, and on
wheels that bring the operator, it does nothing. vLLM's stock CPU backend routes inside its fused layer and never calls
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCHEMA = (
    "topk_softmax(Tensor(a!) topk_weights, Tensor(b!) topk_indices, Tensor(c!) token_expert_indices, "
    "Tensor gating_output, bool renormalize, Tensor? bias=None, Tensor? is_padding=None) -> ()"
)
_library: torch.library.Library | None = None  # the registration lives as long as this object


def provide_missing_operators() -> None:
    """Define ``_moe_C::topk_softmax`` for the CPU where vLLM runs on the CPU without it."""
    global _library
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(torch.ops._moe_C, "topk_softmax"):
        return
    _library = torch.library.Library("_moe_C", "FRAGMENT")
    _library.define(SCHEMA)
    _library.impl("topk_softmax", topk_softmax, "CPU")


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool,
    bias: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> None:
    """Softmax over experts, then the k largest, as the device operator of the same name.

    Args:
        topk_weights: float32 [M, k], written: probabilities, with sum 1 a row if ``renormalize``.
        topk_indices: integer [M, k], written: expert ids, largest probability first.
        token_expert_indices: int32 [M, k]; scratch of the device operator, left alone.
        gating_output: [M, E] router logits.
        renormalize: whether to divide the k weights of a row by their sum.
        bias: float [E], added to the probabilities for the choice only.
        is_padding: bool [M]; marks rows whose result nobody reads. They are routed as any other row.
    """
    probabilities = torch.softmax(gating_output.float(), dim=-1)
    scores = probabilities if bias is None else probabilities + bias
    chosen = scores.topk(topk_indices.shape[1], dim=-1).indices
    weights = probabilities.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(chosen)


__all__ = ["provide_missing_operators", "topk_softmax"]
