"""The kernels of one layer shape and how they are launched; they compile without a GPU.

Decides what is compiled for a layer, once for the executor and for compiling ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaflux_kernels.combine import compile_combine
from megaflux_kernels.forward import ForwardConfig, compile_forward, shared_config
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.own_tables import ForwardTables
from megaflux_kernels.planner import compile_planner
from megaflux_kernels.planner_map import PlannerShape
from megaflux_kernels.totals_map import TotalsMap
from megaflux_kernels.transfer import compile_transfer
from megaflux_kernels.worklist import BLOCK_ROWS, LayerShape

from megaflux_serve.executors.limits import kernel_limits
from megaflux_serve.planning.totals import totals_map

H200_SMS = 132


@dataclass(frozen=True)
class LayerKernels:
    """Compile-time choices of the launches of one layer shape.

    Attributes:
        shape: the layer.
        config: of the forward kernel.
        planner: of the planner's launch.
        totals: what the planner adds up.
    """

    shape: LayerShape
    config: ForwardConfig
    planner: PlannerShape
    totals: TotalsMap

    @classmethod
    def of(cls, shape: LayerShape, num_local: int = 1, num_sms: int = H200_SMS) -> LayerKernels:
        """The choices for ``num_local`` ranks that share a GPU of ``num_sms`` multiprocessors.

        Raises:
            UnsupportedError: a shape that the kernels cannot serve.
        """
        with kernel_limits():
            search = SearchShape(shape.num_experts, shape.num_ranks, shape.num_replica_slots, BLOCK_ROWS)
            planner = PlannerShape(search, shape.top_k, shape.max_tokens, max(1, num_sms // num_local - 1))
            config = shared_config(num_local, num_sms)
        return cls(shape, config, planner, totals_map(shape.num_ranks, shape.num_experts))

    def compile(self) -> None:
        """Compile what the cache lacks: planner, forward kernel, transfer, combine."""
        tiling = self.config.tiling
        compile_planner(self.planner, ForwardTables(self.shape, tiling), False, self.totals)
        compile_forward(self.shape, self.config)
        compile_transfer(self.shape, tiling)
        compile_combine(self.shape.hidden, self.shape.top_k)


__all__ = ["H200_SMS", "LayerKernels"]
