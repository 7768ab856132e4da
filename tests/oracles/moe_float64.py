"""What an MoE layer computes, in float64 and one token at a time. Imports nothing from the library."""

import torch
from torch import Tensor


def moe_float64(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """float64 [M, H]: sum over a token's experts of weight * W2 (silu(W_gate x) * W_up x).

    Args:
        hidden: [M, H].
        topk_ids: integer [M, k].
        topk_weights: [M, k].
        w13: [E, 2I, H], gate rows, then up rows.
        w2: [E, H, I].
    """
    intermediate = w2.shape[2]
    output = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, x in enumerate(hidden.double()):
        for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token].tolist(), strict=True):
            gate = w13[expert, :intermediate].double() @ x
            up = w13[expert, intermediate:].double() @ x
            output[token] += weight * (w2[expert].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return output
