"""Where vLLM builds routed experts: our method for layers that ask for the backend, vLLM's for all others.

Decides which class vLLM instantiates, through its registry of out-of-tree layers. Knows nothing of how a layer is
computed.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megaflux_vllm.backend_name import BACKEND

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

ROUTED_EXPERTS = "RoutedExperts"


def install(module: ModuleType) -> None:
    """Register the class below; vLLM refuses a second one of this name."""
    RoutedExperts: Any = module.RoutedExperts

    class MegaFluxRoutedExperts(RoutedExperts):
        """vLLM's layer, which owns and loads the expert weights, with our method to compute it where asked for."""

        def _get_quant_method(
            self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
        ) -> FusedMoEMethodBase:
            if moe_config.moe_backend != BACKEND:
                return super()._get_quant_method(prefix, quant_config, moe_config)
            from megaflux_vllm.checks import check_layer
            from megaflux_vllm.cpu_router import provide_missing_operators
            from megaflux_vllm.method import MegaFluxMoEMethod

            provide_missing_operators()
            quantized_as = None if quant_config is None else quant_config.get_name()
            check_layer(prefix, moe_config, quantized_as, self.apply_router_weight_on_input)
            return MegaFluxMoEMethod(prefix, moe_config)

        # vLLM binds arguments by the signature when it reloads weights, so ours has to be its own.
        @functools.wraps(RoutedExperts.weight_loader)
        def weight_loader(self, *args: Any, **kwargs: Any) -> Any:
            if self.moe_config.moe_backend == BACKEND:
                self.quant_method.weights_updated()
            return super().weight_loader(*args, **kwargs)

    RoutedExperts.register_oot(MegaFluxRoutedExperts, name=ROUTED_EXPERTS)


def is_installed(module: ModuleType) -> bool:
    """Whether vLLM would instantiate the class above."""
    from vllm.model_executor.custom_op import op_registry_oot

    return getattr(op_registry_oot.get(ROUTED_EXPERTS), "__module__", None) == __name__


__all__ = ["install", "is_installed"]
