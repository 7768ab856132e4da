"""One allocation of the same size on every rank, mapped by all of them: real ranks, or virtual ones on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaflux_kernels.layout import MAX_RANKS, ShapeError

SLICE_ALIGNMENT = 1024
"""Bytes: slices of virtual ranks begin on multiples of this."""


@dataclass(frozen=True)
class SymmetricMemory:
    """A rank's allocation.

    Attributes:
        rank: this rank.
        buffer: uint8 [num_bytes], this rank's allocation, zeroed.
        addresses: base address of every rank's allocation as this rank maps it.
    """

    rank: int
    buffer: Tensor
    addresses: list[int]

    @property
    def num_ranks(self) -> int:
        """Ranks that map the allocation."""
        return len(self.addresses)

    @classmethod
    def rendezvous(cls, num_bytes: int, group: dist.ProcessGroup) -> SymmetricMemory:
        """Allocate on every rank of ``group``, one device a rank; collective, ends with a barrier.

        Args:
            num_bytes: size on every rank; must be equal.
            group: NCCL process group.

        Raises:
            ShapeError: sizes differ between ranks, or a peer's device cannot be reached by direct loads and stores.
        """
        import torch.distributed._symmetric_memory as symmetric

        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        device = torch.device("cuda", torch.cuda.current_device())
        facts: list[tuple[int, int]] = [(0, 0)] * num_ranks
        dist.all_gather_object(facts, (num_bytes, device.index), group=group)
        if any(size != num_bytes for size, _ in facts):
            raise ShapeError("num_bytes", [size for size, _ in facts], f"the same on every rank, here {num_bytes}")
        visible = range(torch.cuda.device_count())
        for peer, (_, index) in enumerate(facts):
            unreachable = index in visible and not torch.cuda.can_device_access_peer(device.index, index)
            if index != device.index and unreachable:
                raise ShapeError("group", f"rank {peer} on cuda:{index}", f"devices that cuda:{device.index} can reach")
        buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(buffer, group)
        buffer.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)
        return cls(rank, buffer, [int(pointer) for pointer in handle.buffer_ptrs])

    @classmethod
    def virtual(cls, num_bytes: int, num_ranks: int, device: str = "cuda") -> list[SymmetricMemory]:
        """Virtual ranks: ``num_ranks`` slices of one allocation on one device, equally far apart.

        Args:
            num_bytes: size of each rank's slice.
            num_ranks: P, 1 to 127.
            device: torch device.
        """
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ShapeError("num_ranks", num_ranks, f"1 to {MAX_RANKS}")
        stride = -(-num_bytes // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
        whole = torch.zeros(num_ranks * stride, dtype=torch.uint8, device=device)
        addresses = [whole.data_ptr() + rank * stride for rank in range(num_ranks)]
        return [cls(rank, whole[rank * stride :][:num_bytes], addresses) for rank in range(num_ranks)]


__all__ = ["SymmetricMemory"]
