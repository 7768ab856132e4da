"""A small model of every class that the SGLang plugin serves and SGLang itself does not run on a CPU, for its tests.

Each has what its class has beside routed experts, since that is what a backend can get wrong: shared experts, dense
layers before the first routed one, a bias on the router's choice, groups of experts, a factor on the routed part.
"""

from __future__ import annotations

from typing import Any

from tests.plugins.random_moe import SHARED_EXPERTS

COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_layer_freq": 1,
    "rope_parameters": {  # the only kind that SGLang computes on a CPU
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}
BIASED: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
ONE_GROUP: dict[str, Any] = {"n_group": 1, "topk_group": 1}
TWO_OF_FOUR_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}

MODELS: dict[str, dict[str, Any]] = {
    "Qwen2Moe": SHARED_EXPERTS,
    "Glm4Moe": COMMON
    | ONE_GROUP
    | {"num_key_value_heads": 2, "head_dim": 32, "norm_topk_prob": True, "routed_scaling_factor": 1.7}
    | {"use_qk_norm": True, "attention_bias": True},
    "Glm4MoeLite": COMMON | LATENT_ATTENTION | BIASED | ONE_GROUP | {"routed_scaling_factor": 1.8},
    "DeepseekV2": COMMON
    | LATENT_ATTENTION
    | TWO_OF_FOUR_GROUPS
    | {"topk_method": "group_limited_greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    | {"n_shared_experts": 2, "routed_scaling_factor": 2.0},
    "DeepseekV3": COMMON | LATENT_ATTENTION | BIASED | TWO_OF_FOUR_GROUPS | {"routed_scaling_factor": 2.5},
    "MiniMaxM2": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
"""Sizes by the name of the class's family in transformers."""

WITHOUT_DP_LM_HEAD = "MiniMaxM2"
"""Its class takes no notice of --enable-dp-lm-head, and SGLang 0.5.17 then gives wrong tokens with any backend."""

__all__ = ["MODELS", "WITHOUT_DP_LM_HEAD"]
