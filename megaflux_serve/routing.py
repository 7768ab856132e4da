"""What the router decided: top-k ids and weights, the load histogram, and how skewed it is.

Decides what a valid routing is and counts it. Knows no ranks but the source of a row, no plans and no weights.
Routing is never changed: every id and weight that comes in is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaflux_serve.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

CountArray = NDArray[np.int64]


def check_topk_ids(topk_ids: NDArray[Any], num_experts: int, source: str = "topk_ids") -> None:
    """Refuse routed ids that no router of ``num_experts`` experts can have produced.

    Args:
        topk_ids: integer [M, k] logical expert ids; M may be 0.
        num_experts: logical experts E.
        source: name used in the message.

    Raises:
        InputError: wrong rank or dtype, ids out of range, or an expert twice in a row.
    """
    if topk_ids.ndim != 2:
        raise InputError(source, f"has shape {topk_ids.shape}", "[tokens, top_k]")
    if topk_ids.dtype.kind not in "iu":
        raise InputError(source, f"has dtype {topk_ids.dtype}", "an integer dtype")
    if topk_ids.size == 0:
        return
    low, high = int(topk_ids.min()), int(topk_ids.max())
    if low < 0 or high >= num_experts:
        raise InputError(source, f"holds expert id {low if low < 0 else high}", f"ids 0 to {num_experts - 1}")
    ordered = np.sort(topk_ids, axis=1)
    repeated = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if repeated.size:
        raise InputError(
            source,
            f"token {int(repeated[0])} names an expert twice: {topk_ids[repeated[0]].tolist()}",
            "k distinct ids",
        )


@dataclass(frozen=True)
class RoutingBatch:
    """What the router decided for the rows of ONE source rank, with the rows themselves.

    Attributes:
        hidden: [M, H] in the dtype of the expert weights; M may be 0.
        topk_ids: integer [M, k], logical expert ids, distinct in a row; on the device of ``hidden``.
        topk_weights: float32 [M, k], the weight of each expert's result.
    """

    hidden: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    def ids_array(self) -> NDArray[np.int64]:
        """The routed ids on the host, int64 [M, k]."""
        array: NDArray[Any] = self.topk_ids.cpu().numpy()
        return array.astype(np.int64)

    def check(self, num_experts: int, hidden_size: int, dtype: Any) -> None:
        """Refuse a batch that the experts of one layer cannot serve; copies the ids to the host.

        Args:
            num_experts: logical experts E.
            hidden_size: H.
            dtype: torch dtype of the expert weights.

        Raises:
            InputError: naming the tensor, what it is and what is allowed.
        """
        check_topk_ids(self.topk_ids.cpu().numpy(), num_experts)
        self.check_shapes(hidden_size, dtype)

    def check_shapes(self, hidden_size: int, dtype: Any) -> None:
        """The part of ``check`` that reads no values, and so does not wait for a device.

        Raises:
            InputError: naming the tensor, what it is and what is allowed.
        """
        if self.topk_ids.ndim != 2:
            raise InputError("topk_ids", f"has shape {list(self.topk_ids.shape)}", "[tokens, top_k]")
        num_tokens, top_k = self.topk_ids.shape
        if tuple(self.hidden.shape) != (num_tokens, hidden_size) or self.hidden.dtype != dtype:
            raise InputError(
                "hidden", f"is {self.hidden.dtype} {list(self.hidden.shape)}", f"{dtype} [{num_tokens}, {hidden_size}]"
            )
        if tuple(self.topk_weights.shape) != (num_tokens, top_k) or str(self.topk_weights.dtype) != "torch.float32":
            raise InputError(
                "topk_weights",
                f"is {self.topk_weights.dtype} {list(self.topk_weights.shape)}",
                f"torch.float32 [{num_tokens}, {top_k}]",
            )


def route_padding(topk_ids: Tensor) -> Tensor:
    """Give rows of padding, which engines mark with -1, valid routes that cost next to nothing: the first row's.

    A captured batch of decode may be padding for the most part. Its rows then join token blocks that are computed
    anyway and mostly empty; spread over all experts, they would have every expert's weights read. Where the first row
    is padding as well, on a rank without requests, they go to the first k experts. Nothing waits for a device.

    Args:
        topk_ids: integer [M, k], -1 in whole rows; M may be 0.
    """
    import torch  # not loaded by those who only count

    first = topk_ids[:1]
    some_experts = torch.arange(topk_ids.shape[1], dtype=topk_ids.dtype, device=topk_ids.device)
    return torch.where(topk_ids < 0, torch.where(first < 0, some_experts, first), topk_ids)


def expert_counts(topk_ids: NDArray[Any], num_experts: int) -> CountArray:
    """int64 [E]: rows routed to each expert, from integer [M, k] ids in range."""
    return np.bincount(topk_ids.reshape(-1).astype(np.int64, copy=False), minlength=num_experts).astype(np.int64)


def check_counts(counts: ArrayLike, num_ranks: int, num_experts: int, source: str = "counts") -> CountArray:
    """The load histogram as int64 [P, E]: rows that source rank r routes to expert e.

    Args:
        counts: non-negative integers, shape [P, E].
        num_ranks: source ranks P.
        num_experts: logical experts E.
        source: name used in the message.

    Returns:
        The histogram, C-contiguous int64 [P, E].

    Raises:
        InputError: wrong shape, a value that is not a whole number, a negative one, or so large a one that sums of
            counts might not fit 64 bits.
    """
    array = np.asarray(counts)
    if array.shape != (num_ranks, num_experts):
        raise InputError(source, f"has shape {array.shape}", f"[{num_ranks}, {num_experts}] (source rank, expert)")
    if array.dtype.kind not in "iu":
        raise InputError(source, f"has dtype {array.dtype}", "an integer dtype")
    if array.size and array.min() < 0:
        rank, expert = np.argwhere(array < 0)[0]
        raise InputError(source, f"is {array[rank, expert]} at rank {rank}, expert {expert}", "counts of at least 0")
    most = np.iinfo(np.int64).max // max(array.size, 1)
    if array.size and array.max() > most:
        rank, expert = np.argwhere(array > most)[0]
        raise InputError(source, f"is {array[rank, expert]} at rank {rank}, expert {expert}", f"counts up to {most}")
    return np.ascontiguousarray(array, dtype=np.int64)


def kappa(counts: ArrayLike) -> float:
    """Routing skew, MegaFlux section 2.2: ``E * sum((c_e / sum c)^2)``; 1 for uniform routing, E for one expert.

    Args:
        counts: non-negative [E] rows per expert; all zero counts as uniform.
    """
    array = np.asarray(counts, dtype=np.float64)
    total = array.sum()
    if total == 0:
        return 1.0
    return float(array.size * np.square(array / total).sum())


def max_over_mean(loads: ArrayLike) -> float:
    """Load of the busiest rank over the mean, for non-negative [P] loads; 1 when all are zero."""
    array = np.asarray(loads, dtype=np.float64)
    total = array.sum()
    if total == 0:
        return 1.0
    return float(array.max() * array.size / total)
