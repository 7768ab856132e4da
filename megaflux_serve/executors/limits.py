"""What the megakernel can serve, as its kernels say it; needs neither a GPU nor the kernel language.

Decides how the kernels' limits become the library's errors, so that a plugin can refuse a model before weights load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megaflux_kernels.layout import SearchShape, ShapeError
from megaflux_kernels.planner_map import PlannerShape
from megaflux_kernels.worklist import BLOCK_ROWS, LayerShape

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, UnsupportedError


@contextmanager
def kernel_limits() -> Iterator[None]:
    """Say in the library's words that the kernels refuse a shape or an option.

    Raises:
        UnsupportedError: instead of ``ShapeError``.
    """
    try:
        yield
    except ShapeError as error:
        raise UnsupportedError("executor = 'megakernel'", str(error), "use staged") from None


def check_options(options: MegaFluxConfig, dtype: object, without_graphs: str | None) -> None:
    """Refuse options and a dtype that the megakernel cannot serve, whatever the machine.

    Args:
        options: of the server.
        dtype: torch's, of the model.
        without_graphs: the engine's flag that keeps it from capturing graphs; None where it captures none.

    Raises:
        ConfigError: naming the flag or option.
    """
    name = str(dtype).removeprefix("torch.")
    if name != "bfloat16":
        raise ConfigError("--dtype", name, "bfloat16 with executor 'megakernel'")
    if options.block_rows != BLOCK_ROWS:
        raise ConfigError("block_rows", options.block_rows, f"{BLOCK_ROWS} with executor 'megakernel'")
    if options.plan_log is not None and without_graphs is not None:
        allowed = f"null, or {without_graphs}: a captured graph cannot be logged"
        raise ConfigError("plan_log", str(options.plan_log), allowed)


def layer_shape(
    num_ranks: int,
    num_experts: int,
    num_replica_slots: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    max_tokens: int,
) -> LayerShape:
    """A layer that planner and forward kernel can serve; arguments as ``LayerShape``.

    Raises:
        UnsupportedError: naming the field, its value and what is allowed.
    """
    with kernel_limits():
        search = SearchShape(num_experts, num_ranks, num_replica_slots, BLOCK_ROWS)
        PlannerShape(search, top_k, max_tokens, num_chunks=1)
        return LayerShape(num_ranks, num_experts, num_replica_slots, hidden, intermediate, top_k, max_tokens)


__all__ = ["check_options", "kernel_limits", "layer_shape"]
