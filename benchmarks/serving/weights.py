"""The weights of a checkpoint that was never written: random, and the same for every backend and engine.

Decides values. A tensor depends on its name only. Matrices are normal with variance 1 / inputs, so activations stay of
order 1; norms are 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def checkpoint(config: Any, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a Qwen3-MoE checkpoint, in its order."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_heads, intermediate = config.num_key_value_heads * config.head_dim, config.moe_intermediate_size
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv_heads, hidden),
        "self_attn.v_proj.weight": (kv_heads, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate.weight": (config.num_experts, hidden),
    }
    for expert in range(config.num_experts):
        layer[f"mlp.experts.{expert}.gate_proj.weight"] = (intermediate, hidden)
        layer[f"mlp.experts.{expert}.up_proj.weight"] = (intermediate, hidden)
        layer[f"mlp.experts.{expert}.down_proj.weight"] = (hidden, intermediate)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}
    generator = torch.Generator(device)
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            yield name, tensor.fill_(1.0)
        else:
            scale = 1.0 if "embed" in name else shape[1] ** -0.5
            yield name, tensor.normal_(0.0, scale, generator=generator.manual_seed(zlib.crc32(name.encode())))


__all__ = ["checkpoint"]
