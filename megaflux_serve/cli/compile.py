"""``megaflux compile``: the kernels of a layer shape, compiled into the cache before a server needs them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from megaflux_serve.cli.requirements import require_kernels
from megaflux_serve.cli.shape_options import Experts, Hidden, Intermediate, Ranks, ReplicaSlots, TopK
from megaflux_serve.config import MegaFluxConfig

HOPPER = "sm_90a"
ARCHITECTURE_VARIABLE = "CUTE_DSL_ARCH"


def compile_kernels(
    hidden: Hidden,
    intermediate: Intermediate,
    experts: Experts = 128,
    top_k: TopK = 8,
    ranks: Ranks = 2,
    replica_slots: ReplicaSlots = 2,
    max_tokens: Annotated[int, typer.Option(help="Rows of a rank's largest batch.")] = 8192,
) -> None:
    """Compile the kernels of a layer shape, so that no server has to.

    Needs no GPU: an image can be built with the kernels in it. They go to ~/.cache/megaflux/kernels (or
    $MEGAFLUX_KERNEL_CACHE), where servers of the same release look. --max-tokens is what vLLM calls
    --max-num-batched-tokens, divided by the tensor-parallel ranks.

    [bold]Example[/bold]

      [cyan]megaflux compile --hidden 2048 --intermediate 768 --experts 128 --top-k 8 --ranks 2[/cyan]
    """
    slots = MegaFluxConfig.parse({"replica_slots": replica_slots}).slot_layout(experts, ranks).num_replica_slots
    require_kernels("compile")
    from megaflux_kernels.compile_cache import cache_directory, cache_use

    from megaflux_serve.executors.limits import layer_shape

    shape = layer_shape(ranks, experts, slots, hidden, intermediate, top_k, max_tokens)
    os.environ.setdefault(ARCHITECTURE_VARIABLE, HOPPER)
    from megaflux_serve.executors.kernels import LayerKernels  # the kernel language reads its target now

    LayerKernels.of(shape).compile()
    typer.echo(json.dumps({"folder": str(cache_directory())} | asdict(cache_use)))


__all__ = ["compile_kernels"]
