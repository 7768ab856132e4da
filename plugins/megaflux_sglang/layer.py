"""Where SGLang builds routed experts: a class of ours for servers with the backend, SGLang's own for all others.

Decides which class a model instantiates and that SGLang moves no rows for it. Knows nothing of how a layer is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megaflux_serve.errors import UnsupportedError
from megaflux_sglang import backend, versions


@functools.cache
def megaflux_moe() -> type:
    """The class, made on first use: its base imports what needs a device."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    class MegaFluxMoE(FusedMoE):
        """SGLang's layer, which owns and loads the expert weights, with our method to compute it.

        Raises:
            UnsupportedError: hooks that are not in place, or a layer that the backend does not serve.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            versions.check_hooks_took()
            super().__init__(*args, **kwargs)
            from megaflux_sglang.checks import check_layer
            from megaflux_sglang.method import MegaFluxMoEMethod

            check_layer(self)
            self.quant_method = MegaFluxMoEMethod(self)

    return MegaFluxMoE


def moe_class(original: Callable[..., type], *args: Any, **kwargs: Any) -> type:
    """Around ``get_moe_impl_class``, which models ask for the class of their experts."""
    return megaflux_moe() if backend.is_active() else original(*args, **kwargs)


def dispatcher(original: Callable[..., Any], moe_runner_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``create_moe_dispatcher``: for our layers, one that hands rows and logical expert ids on as they are."""
    if not backend.is_active():
        return original(moe_runner_config, *args, **kwargs)
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher

    versions.check_hooks_took()  # a model that builds its experts from another class would not reach the check above
    standard = StandardDispatcher(moe_runner_config)
    standard.skip_local_expert_mapping = True
    return standard


def stock_runner(original: Callable[..., Any], self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``create_moe_runner`` of SGLang's unquantized method, which must not stand in silently for ours.

    Raises:
        UnsupportedError: a model that builds its experts from a class of its own choice.
    """
    if backend.is_active() and not isinstance(layer, megaflux_moe()):
        raise UnsupportedError(
            backend.FLAGS, f"this model builds its experts as {type(layer).__name__}", "use other backends for it"
        )
    return original(self, layer, *args, **kwargs)


HOOKS: tuple[versions.Hook, ...] = (
    ("sglang.srt.layers.moe.ep_moe.layer.get_moe_impl_class", moe_class, "around"),
    ("sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher", dispatcher, "around"),
    ("sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.create_moe_runner", stock_runner, "around"),
)

__all__ = ["HOOKS", "megaflux_moe"]
