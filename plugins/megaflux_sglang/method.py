"""SGLang's fused MoE method, computed by a ReplicatedMoE.

Decides how a layer's parameters and a call's tensors become the core's. Knows nothing of planning or communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

from megaflux_serve.executors import DeviceExecutor
from megaflux_serve.layer import ReplicatedMoE
from megaflux_serve.routing import RoutingBatch, route_padding
from megaflux_serve.workspace import ExpertWeights
from megaflux_sglang.options import named_as_written
from megaflux_sglang.ranks import rank_context
from megaflux_sglang.versions import server_args

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

_served: WeakSet[ReplicatedMoE] = WeakSet()


class MegaFluxMoEMethod(UnquantizedFusedMoEMethod):
    """Computes one layer of routed experts, whose parameters are ``w13_weight`` [E/P, 2I, H] (gate rows, then up) and
    ``w2_weight`` [E/P, H, I].

    Args:
        layer: SGLang's layer, its parameters made and not yet loaded.

    Raises:
        ConfigError, UnsupportedError: options that this layer or machine cannot serve.
    """

    def __init__(self, layer: FusedMoE) -> None:
        super().__init__()
        self.name = layer.layer_name or f"layers.{layer.layer_id}.experts"
        self.context = rank_context(server_args(), layer.w13_weight.device)
        options, executor = self.context.options, self.context.executor
        with named_as_written():
            self.layout = options.slot_layout(layer.num_experts, executor.num_ranks)
        if isinstance(executor, DeviceExecutor):  # weights load straight into memory that other ranks can read
            (home,) = executor.home_weights(self.layout, layer.hidden_size, layer.intermediate_size_per_partition)
            layer.w13_weight.data, layer.w2_weight.data = home.w13, home.w2
        self.replicated_moe: ReplicatedMoE | None = None  # until weights are loaded

    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        """Build the layer on its loaded weights; on later calls, forget replicas of the weights before.

        SGLang's updates write into the parameters, so these stay the home slots.
        """
        if self.replicated_moe is not None:
            self.replicated_moe.weights_updated()
            return
        home = ExpertWeights(layer.w13_weight.data, layer.w2_weight.data)
        # before SGLang measures memory and captures graphs
        self.replicated_moe = self.context.add_layer(self.name, self.layout, home, layer.top_k)
        _served.add(self.replicated_moe)

    def apply(self, layer: FusedMoE, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        """The routed experts' output [M, H] for this rank's rows; SGLang's models add shared experts themselves.

        Args:
            layer: the layer, whose parameters are the home weights.
            dispatch_output: rows [M, H], and ids and weights [M, k] of logical experts; a row of -1 is padding, whose
                result nobody reads.
        """
        self.context.startup.tell()
        assert self.replicated_moe is not None
        self.replicated_moe.check_home(layer.w13_weight, layer.w2_weight)
        topk = dispatch_output.topk_output
        batch = RoutingBatch(dispatch_output.hidden_states, route_padding(topk.topk_ids), topk.topk_weights.float())
        return StandardCombineInput(hidden_states=self.replicated_moe.forward_rank(batch))


def weights_updated() -> None:
    """Home weights of this process changed: before the next batch, every layer of every rank forgets its replicas."""
    for moe in _served:
        moe.weights_updated()


__all__ = ["MegaFluxMoEMethod", "weights_updated"]
