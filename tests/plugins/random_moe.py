"""Checkpoints with random or exchanged weights, for tests of servers.

Random weights have the usual scale, so that experts matter for the tokens and the most likely token is seldom in doubt.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.plugins.engine_runs import TINY_MOE

QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
SHARED_EXPERTS = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ROUTER_BIAS = 0.1  # its deviation, where scores lie between 0 and 1: it changes which experts are chosen
LOGIT_SCALE = 0.1  # times sqrt(H) is the deviation of the logits: the best token leads by far more than BF16 rounds


def write_checkpoint(folder: Path, num_layers: int, sizes: dict[str, int] | None = None) -> Path:
    """A Qwen3-MoE checkpoint of ``num_layers`` layers in BF16, with tiny-moe's tokenizer.

    Args:
        folder: made.
        num_layers: layers, all with routed experts.
        sizes: replaces values of the configuration; default: Qwen3-30B-A3B's.
    """
    from safetensors.torch import save_file

    shutil.copytree(TINY_MOE, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "*.png", "*.md"))
    config = json.loads((folder / "config.json").read_text())
    config |= QWEN3_30B_A3B | {"max_position_embeddings": 40960} | (sizes or {}) | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*extents: int, scale: float) -> Tensor:
        values = torch.randn(extents, generator=generator, device=device, dtype=torch.bfloat16)
        return (values * scale).cpu()

    hidden, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    ones, one_head = torch.ones(hidden, dtype=torch.bfloat16), torch.ones(head, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": drawn(config["vocab_size"], hidden, scale=0.5),
        "model.norm.weight": ones,
        "lm_head.weight": drawn(config["vocab_size"], hidden, scale=LOGIT_SCALE),
    }
    for index in range(num_layers):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones.clone(),
            f"{layer}.post_attention_layernorm.weight": ones.clone(),
            f"{layer}.self_attn.q_norm.weight": one_head.clone(),
            f"{layer}.self_attn.k_norm.weight": one_head.clone(),
            f"{layer}.self_attn.q_proj.weight": drawn(queries, hidden, scale=hidden**-0.5),
            f"{layer}.self_attn.k_proj.weight": drawn(keys, hidden, scale=hidden**-0.5),
            f"{layer}.self_attn.v_proj.weight": drawn(keys, hidden, scale=hidden**-0.5),
            f"{layer}.self_attn.o_proj.weight": drawn(hidden, queries, scale=queries**-0.5),
            f"{layer}.mlp.gate.weight": drawn(config["num_experts"], hidden, scale=hidden**-0.5),
        }
        for expert in range(config["num_experts"]):
            name = f"{layer}.mlp.experts.{expert}"
            tensors[f"{name}.gate_proj.weight"] = drawn(inner, hidden, scale=hidden**-0.5)
            tensors[f"{name}.up_proj.weight"] = drawn(inner, hidden, scale=hidden**-0.5)
            tensors[f"{name}.down_proj.weight"] = drawn(hidden, inner, scale=inner**-0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_shared_experts(folder: Path) -> Path:
    """A small Qwen2-MoE checkpoint in float32, whose layers have a shared expert, with tiny-moe's tokenizer.

    Args:
        folder: made.
    """
    return write_random(folder, "Qwen2Moe", SHARED_EXPERTS)


def write_random(folder: Path, family: str, sizes: dict[str, Any]) -> Path:
    """A checkpoint in float32 as transformers draws it, with tiny-moe's tokenizer; routers' biases are drawn too.

    Args:
        folder: made.
        family: of the model's classes in transformers, such as ``Qwen2Moe``.
        sizes: of its configuration.
    """
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**sizes)
        model = getattr(transformers, f"{family}ForCausalLM")(config).float()
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(std=ROUTER_BIAS)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MOE / name, folder)
    return folder


def write_neighbours(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint in which every expert has the weights of its neighbour.

    Args:
        checkpoint: as ``write_checkpoint`` leaves it.
        folder: made.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    num_experts = json.loads((checkpoint / "config.json").read_text())["num_experts"]

    def moved(name: str) -> str:
        head, separator, tail = name.partition(".mlp.experts.")
        expert, _, matrix = tail.partition(".")
        return f"{head}{separator}{(int(expert) + 1) % num_experts}.{matrix}" if separator else name

    weights = {moved(name): tensor for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


__all__ = [
    "QWEN3_30B_A3B",
    "SHARED_EXPERTS",
    "write_checkpoint",
    "write_neighbours",
    "write_random",
    "write_shared_experts",
]
