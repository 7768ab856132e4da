"""Where vLLM builds routed experts: our method for layers that ask for the backend, vLLM's for all others.

Decides which class vLLM instantiates, through its registry of out-of-tree layers. Knows nothing of how a layer is
computed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from megaflux_serve.errors import UnsupportedError
from megaflux_vllm.backend_name import BACKEND

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

ROUTED_EXPERTS, STOCK_METHOD = "RoutedExperts", "UnquantizedFusedMoEMethod"


def replace_routed_experts() -> None:
    """Register the two classes below, unless something is registered under their names already."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if ROUTED_EXPERTS in op_registry_oot or STOCK_METHOD in op_registry_oot:
        return

    class MegaFluxRoutedExperts(RoutedExperts):
        """vLLM's layer, which owns and loads the expert weights, with our method to compute it where asked for."""

        def _get_quant_method(
            self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
        ) -> FusedMoEMethodBase:
            if moe_config.moe_backend != BACKEND:
                return super()._get_quant_method(prefix, quant_config, moe_config)
            from megaflux_vllm.checks import check_layer
            from megaflux_vllm.method import MegaFluxMoEMethod

            quantized_as = None if quant_config is None else quant_config.get_name()
            check_layer(prefix, moe_config, quantized_as, self.apply_router_weight_on_input)
            return MegaFluxMoEMethod(prefix, moe_config)

        # vLLM binds arguments by the signature when it reloads weights, so ours has to be its own.
        @functools.wraps(RoutedExperts.weight_loader)
        def weight_loader(self, *args: Any, **kwargs: Any) -> Any:
            if self.moe_config.moe_backend == BACKEND:
                self.quant_method.weights_updated()
            return super().weight_loader(*args, **kwargs)

    class StockMethod(UnquantizedFusedMoEMethod):
        """vLLM's method, which must not stand in silently for ours.

        Some models bring a class of their own for routed experts, which the registry does not reach; on a CPU the stock
        method would serve them whatever backend was asked for.
        """

        def __init__(self, moe: FusedMoEConfig) -> None:
            if moe.moe_backend == BACKEND:
                raise UnsupportedError(
                    f"--moe-backend {BACKEND}",
                    "this model brings a class of its own for routed experts",
                    "use another --moe-backend for it",
                )
            super().__init__(moe)

    RoutedExperts.register_oot(MegaFluxRoutedExperts, name=ROUTED_EXPERTS)
    UnquantizedFusedMoEMethod.register_oot(StockMethod, name=STOCK_METHOD)


def is_replaced() -> bool:
    """Whether vLLM would instantiate the classes above."""
    from vllm.model_executor.custom_op import op_registry_oot

    return all(
        getattr(op_registry_oot.get(name), "__module__", None) == __name__ for name in (ROUTED_EXPERTS, STOCK_METHOD)
    )


__all__ = ["is_replaced", "replace_routed_experts"]
