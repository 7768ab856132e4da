"""What the megakernel can serve, as its kernels say it; needs neither a GPU nor the kernel language.

Decides how the kernels' limits become the library's errors, so that a plugin can refuse a model before weights load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megaflux_kernels.layout import SearchShape, ShapeError
from megaflux_kernels.planner_map import PlannerShape
from megaflux_kernels.worklist import BLOCK_ROWS, LayerShape

from megaflux_serve.errors import UnsupportedError


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


__all__ = ["kernel_limits", "layer_shape"]
