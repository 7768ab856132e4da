"""Memory map of one layer shape for the forward kernel: which buffers a rank has, how large, and where.

Decides sizes and offsets; host allocation, kernels and documentation read the same definition. Knows no addresses and
imports neither torch nor the kernel language.

*Symmetric* regions are read or written by other ranks and lie at the same offsets in a symmetric allocation of every
rank. *Local* buffers belong to their rank alone. ``ForwardMap`` holds what layers of one shape share, since they run
one after another; ``WeightMap`` holds the weights of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megaflux_kernels.worklist import HEADER_WORDS, Counters, LayerShape, Tiling, WorkBounds, work_bounds

ALIGNMENT = 1024
"""Bytes: regions begin on multiples of this."""


class Region(NamedTuple):
    """A buffer: ``dtype`` is a torch dtype's name."""

    dtype: str
    extents: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        size = {"bfloat16": 2, "int32": 4, "int64": 8}[self.dtype]
        for extent in self.extents:
            size *= extent
        return size


def offsets_of(regions: Mapping[str, Region]) -> tuple[dict[str, int], int]:
    """(byte offset of every region, bytes of all) when they lie one behind the other, each aligned."""
    table, at = {}, 0
    for name, region in regions.items():
        table[name] = at
        at += -(-region.num_bytes // ALIGNMENT) * ALIGNMENT
    return table, at


@dataclass(frozen=True)
class WeightMap:
    """Home weights of one layer on one rank; symmetric, since peers pull replicas of them.

    ``w1``  BF16 [slots, 2I, H]: the I gate rows, then the I up rows.
    ``w2``  BF16 [slots, H, I].

    Replica slots are read by their rank alone: any two tensors with these extents, for one layer or for several.
    """

    slots: int
    hidden: int
    intermediate: int

    @cached_property
    def regions(self) -> dict[str, Region]:
        """Regions by name, in the order of their offsets."""
        return {
            "w1": Region("bfloat16", (self.slots, 2 * self.intermediate, self.hidden)),
            "w2": Region("bfloat16", (self.slots, self.hidden, self.intermediate)),
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of every region."""
        return offsets_of(self.regions)[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of a rank's allocation."""
        return offsets_of(self.regions)[1]


@dataclass(frozen=True)
class ForwardMap:
    """Buffers of one rank that all layers of a shape share.

    Symmetric regions:

    ``flags``       int32 [2, P]: launch that each rank has started; launch that it is done with.
    ``row_source``  int32 [max_rows], see ``worklist.py``; written by the source ranks.
    ``places``      int32 [P, max_tokens, k], likewise.
    ``x``           BF16 [max_tokens, H], token rows of this rank.
    ``results``     BF16 [max_tokens, k, H], results of its assignments, written by the ranks that compute them.

    Local buffers:

    ``header``, ``tasks``, ``transfers``, ``counters``: see ``worklist.py``.
    ``pool``        BF16 [max_rows, H], rows to compute, in blocks of 128.
    ``act``         BF16 [max_rows, I], activations.
    """

    shape: LayerShape
    tiling: Tiling = field(default_factory=Tiling)

    @cached_property
    def bounds(self) -> WorkBounds:
        """Largest extents of the tables and the pool."""
        return work_bounds(self.shape, self.tiling)

    @cached_property
    def symmetric(self) -> dict[str, Region]:
        """Symmetric regions by name, in the order of their offsets."""
        shape = self.shape
        return {
            "flags": Region("int32", (2, shape.num_ranks)),
            "row_source": Region("int32", (self.bounds.max_rows,)),
            "places": Region("int32", (shape.num_ranks, shape.max_tokens, shape.top_k)),
            "x": Region("bfloat16", (shape.max_tokens, shape.hidden)),
            "results": Region("bfloat16", (shape.max_tokens, shape.top_k, shape.hidden)),
        }

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of every symmetric region."""
        return offsets_of(self.symmetric)[0]

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of a rank's symmetric allocation."""
        return offsets_of(self.symmetric)[1]

    @cached_property
    def local(self) -> dict[str, Region]:
        """Local buffers by name."""
        shape, bounds = self.shape, self.bounds
        return {
            "header": Region("int32", (HEADER_WORDS,)),
            "tasks": Region("int64", (bounds.max_tasks,)),
            "transfers": Region("int32", (max(1, bounds.max_transfers), 4)),
            "counters": Region("int32", (Counters(bounds.max_blocks, shape.num_replica_slots).size,)),
            "pool": Region("bfloat16", (bounds.max_rows, shape.hidden)),
            "act": Region("bfloat16", (bounds.max_rows, shape.intermediate)),
        }

    def memory_use(self) -> dict[str, int]:
        """Bytes of every buffer of a rank, symmetric ones first."""
        return {name: region.num_bytes for name, region in {**self.symmetric, **self.local}.items()}


__all__ = ["ALIGNMENT", "ForwardMap", "Region", "WeightMap", "offsets_of"]
