"""vLLM's fused MoE method, computed by a ReplicatedMoE.

Decides how a layer's parameters and a call's tensors become the core's, and when resident replicas are stale. Knows
nothing of planning or communication.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from megaflux_serve.layer import ReplicatedMoE
from megaflux_serve.routing import RoutingBatch, route_padding
from megaflux_serve.workspace import ExpertWeights
from megaflux_vllm import small_batches
from megaflux_vllm.checks import named_as_written
from megaflux_vllm.ranks import RowShard, home_ranks, rank_context

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class SelfContainedKernel:
    """What vLLM's runner asks of a method's kernel, answered for one that dispatches, combines and reduces itself.

    With it, ``apply`` sees only this rank's rows and returns them finished; without it vLLM would gather rows before
    and reduce them after. vLLM asks the kernel itself, its ``prepare_finalize`` and its ``fused_experts``; this is all
    three.
    """

    is_monolithic = False
    can_overlap_shared_experts = False
    consumes_expert_mask = False

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.prepare_finalize = self.fused_experts = self

    def output_is_reduced(self) -> bool:
        return self.num_ranks > 1

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32


class MegaFluxMoEMethod(FusedMoEMethodBase):
    """Computes one layer of routed experts.

    Args:
        name: the layer's name in the model.
        moe: vLLM's description of the layer.

    Raises:
        ConfigError, UnsupportedError: options that this layer or machine cannot serve.
    """

    def __init__(self, name: str, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self.name, self.context, self.rows = name, rank_context(), RowShard.of(moe)
        self.replicated_moe: ReplicatedMoE | None = None  # until weights are loaded
        self.weight_versions: list[int] = []

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size: int, *args: Any) -> tuple[int, int]:
        return hidden_size, intermediate_size

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``w13_weight`` [E/P, 2I, H] (gate rows, then up) and ``w2_weight`` [E/P, H, I] for vLLM to load."""
        home = home_ranks(layer.expert_map, self.moe.num_experts)
        with named_as_written():
            self.layout = self.context.options.slot_layout(self.moe.num_experts, self.context.executor.num_ranks, home)
        own = self.context.home_weights(self.layout, hidden_size, intermediate_size_per_partition, params_dtype)
        for name, tensor in (("w13_weight", own.w13), ("w2_weight", own.w2)):
            weight = torch.nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, extra_weight_attrs)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Build the layer on its loaded weights; on later calls, forget replicas of the weights before.

        vLLM copies reloaded weights back into the parameters of the first call, so these stay the home slots.
        """
        if self.replicated_moe is not None:
            self.weights_updated()
            return
        self.moe_kernel = SelfContainedKernel(self.layout.num_ranks)
        home = ExpertWeights(layer.w13_weight.data, layer.w2_weight.data)
        # before vLLM measures memory and captures graphs
        self.replicated_moe = self.context.add_layer(self.name, self.layout, home, self.moe.experts_per_token)
        self.context.looks.append(partial(self.notice_writes, layer))
        self.context.updates.append(self.weights_updated)

    def weights_updated(self) -> None:
        """Have every rank forget its resident replicas before the next batch."""
        if self.replicated_moe is not None:
            self.replicated_moe.weights_updated()

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: torch.nn.Module | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """[M, H]: the routed experts' output for this rank's rows; vLLM computes shared experts outside.

        Args:
            layer: the layer, whose parameters are the home weights.
            x: [M, H].
            topk_weights: float [M, k].
            topk_ids: integer [M, k]; a row of -1 is padding, whose result nobody reads.
            shared_experts: not used.
            shared_experts_input: not used.
        """
        self.context.startup.tell()
        assert self.replicated_moe is not None
        self.replicated_moe.check_home(layer.w13_weight, layer.w2_weight)
        self.notice_writes(layer)
        ids = route_padding(topk_ids) if marks_padding() else topk_ids
        scales = topk_weights.float()
        if small_batches.rows_of_largest_rank(x.shape[0]) < self.context.options.handover_rows:
            return small_batches.compute(layer, x, scales, ids)
        batch = RoutingBatch(self.rows.take(x), self.rows.take(ids), self.rows.take(scales))
        return self.rows.gather(self.replicated_moe.forward_rank(batch), x.shape[0])

    def notice_writes(self, layer: RoutedExperts) -> None:
        """Forget replicas if the weights were written without a loader since the last look."""
        versions = [layer.w13_weight._version, layer.w2_weight._version]
        if versions != self.weight_versions:
            self.weight_versions = versions
            self.weights_updated()


def marks_padding() -> bool:
    """Whether rows may be marked as padding: only where vLLM's runner says which rows are."""
    return is_forward_context_available() and getattr(get_forward_context(), "is_padding", None) is not None


__all__ = ["MegaFluxMoEMethod", "SelfContainedKernel", "marks_padding"]
