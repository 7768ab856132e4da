"""vLLM's unquantized method, which must not stand in silently for ours.

Decides what happens to models that bring a class of their own for routed experts, which ``layer`` does not reach; on a
CPU vLLM's method would serve them whatever backend was asked for.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from megaflux_serve.errors import UnsupportedError
from megaflux_vllm.backend_name import BACKEND

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

STOCK_METHOD = "UnquantizedFusedMoEMethod"


def install(module: ModuleType) -> None:
    """Register the class below with vLLM's registry of out-of-tree layers, which refuses a second one of this name."""
    UnquantizedFusedMoEMethod: Any = module.UnquantizedFusedMoEMethod

    class StockMethod(UnquantizedFusedMoEMethod):
        """vLLM's method, for layers that ask for another backend."""

        def __init__(self, moe: FusedMoEConfig) -> None:
            if moe.moe_backend == BACKEND:
                raise UnsupportedError(
                    f"--moe-backend {BACKEND}",
                    "this model brings a class of its own for routed experts",
                    "use another --moe-backend for it",
                )
            super().__init__(moe)

    UnquantizedFusedMoEMethod.register_oot(StockMethod, name=STOCK_METHOD)


def is_installed(module: ModuleType) -> bool:
    """Whether vLLM would instantiate the class above."""
    from vllm.model_executor.custom_op import op_registry_oot

    return getattr(op_registry_oot.get(STOCK_METHOD), "__module__", None) == __name__


__all__ = ["install", "is_installed"]
