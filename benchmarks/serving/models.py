"""Models to serve: real shapes with fewer layers, written as a checkpoint folder that has a configuration only.

Decides shapes. All of them are of vLLM's Qwen3-MoE architecture, whose experts are plain BF16; weights are made by
``worker.RandomWeights``. A vocabulary has one token id a token of the routing trace (``routes``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megaflux_serve.durable import write_atomically

NUM_WINDOWS = 19
"""Windows of ``cases.EVENT_TOKENS`` = 8,192 tokens that the gpt-oss-20b trace fills."""

TRACE_VOCABULARY = NUM_WINDOWS * 8192
"""Token ids of the models for GPUs: one a token of those windows."""


@dataclass(frozen=True)
class ServedModel:
    """A mixture-of-experts model.

    Attributes:
        name: as in result rows.
        layers: all of them MoE layers.
        hidden, intermediate: H and I of an expert.
        experts, top_k: E and k.
        heads, kv_heads, head_dim: attention.
        vocabulary: token ids.
        max_len: longest sequence.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = TRACE_VOCABULARY
    max_len: int = 8448

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in BF16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def write(self, folder: Path) -> Path:
        """Write ``config.json`` below ``folder``; returns the model's folder."""
        config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "decoder_sparse_step": 1,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": 2 * self.hidden,
            "max_position_embeddings": self.max_len,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": self.vocabulary,
        }
        path = folder / self.name
        write_atomically(path / "config.json", json.dumps(config, indent=2).encode())
        return path


MODELS = {
    model.name: model
    for model in (
        # Qwen3-30B-A3B has 48 such layers.
        ServedModel("qwen3-30b-a3b", 8, 2048, 768, 128, 8, heads=32, kv_heads=4, head_dim=128),
        # DeepSeek-V3's H, I, k and number of heads, with 64 of its 256 experts; 4 layers of grouped-query attention.
        ServedModel("deepseek-v3-like", 4, 7168, 2048, 64, 8, heads=128, kv_heads=8, head_dim=128),
        # For a CPU.
        ServedModel("tiny", 2, 128, 64, 16, 2, heads=4, kv_heads=2, head_dim=32, vocabulary=1216, max_len=256),
    )
}
