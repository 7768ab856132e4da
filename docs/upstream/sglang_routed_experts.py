"""SGLang returns another rank's routes under DP attention with an all-to-all backend other than DeepEP's.

Needs SGLang 0.5.14 to 0.5.23 and no GPU: SGLANG_USE_CPU_ENGINE=1 SGLANG_PLUGINS=none python sglang_routed_experts.py

Attention-DP rank 1 of 2 captures the experts of its own two rows, as a rank does whose MoE layer gets only its own rows
(FlashInfer, Mooncake, NIXL, MoRI, PPLX, MegaMoE), and asks the capturer for them. Rank 0 has three rows.
"""

from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.layers import dp_attention
from sglang.srt.layers.moe.utils import MoeA2ABackend
from sglang.srt.state_capturer import routed_experts
from sglang.srt.state_capturer.base import BaseDeviceCache

LAYERS, TOP_K, OWN_ROWS, ROWS_BY_RANK = 1, 2, 2, [3, 2]


def returned_routes(backend: MoeA2ABackend) -> list[list[int]]:
    """What rank 1 returns for its two rows, whose experts are [10, 11] and [12, 13]."""
    capturer = object.__new__(routed_experts.RoutedExpertsCapturer)
    capturer.topk_size = TOP_K
    capturer.device_cache = BaseDeviceCache(8, LAYERS, TOP_K, "cpu", "routed_experts")
    capturer.device_cache.buffer.fill_(-7)  # rows of earlier batches
    capturer.gather_buffer = torch.empty(8, TOP_K, dtype=torch.int32)
    batch = SimpleNamespace(out_cache_loc=torch.arange(OWN_ROWS), global_num_tokens_cpu=ROWS_BY_RANK)

    with (
        patch.object(routed_experts, "get_moe_a2a_backend", lambda: backend),
        patch.object(routed_experts, "is_dp_attention_enabled", lambda: True),
        patch.object(routed_experts, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1)),
        patch.object(routed_experts, "attn_tp_all_gather_into_tensor", lambda out, rows: out.copy_(rows)),
        patch.object(dp_attention, "get_attention_dp_rank", lambda: 1),
    ):
        capturer.capture(0, torch.tensor([[10, 11], [12, 13]], dtype=torch.int32))
        return capturer._get_local_slice(batch, can_run_graph=False, cuda_graph_batch=None)[:, 0].tolist()


if __name__ == "__main__":
    for backend in (MoeA2ABackend.DEEPEP, MoeA2ABackend.FLASHINFER, MoeA2ABackend.MOONCAKE):
        print(f"{backend.value:10} rank 1 captured [[10, 11], [12, 13]] and returns {returned_routes(backend)}")
