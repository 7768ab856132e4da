"""One allocation of the same size for every rank, mapped by all ranks, which may share devices.

A process has one device and holds the *local ranks*: one, or several *virtual ranks* whose allocations are slices of
one. Decides how ranks are spread over processes: evenly and in order.
"""

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
    def allocate(
        cls, num_bytes: int, num_ranks: int, group: dist.ProcessGroup | None = None, device: str = "cuda"
    ) -> list[SymmetricMemory]:
        """Allocate for the local ranks; collective, and with several processes it ends with a barrier.

        Args:
            num_bytes: size for each rank; must be equal in every process.
            num_ranks: P, 1 to 127.
            group: the processes, one device each, with any backend; None if this one holds all ranks.
            device: torch device, the current one where there are several processes.

        Returns:
            One a local rank, in order: slices of one allocation, equally far apart.

        Raises:
            ShapeError: P is out of range or no multiple of the processes, sizes differ between processes, or a peer's
                device cannot be reached by direct loads and stores.
        """
        local = local_ranks(num_ranks, group)
        stride = -(-num_bytes // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
        if group is None or len(local) == num_ranks:
            whole = torch.zeros(num_ranks * stride, dtype=torch.uint8, device=device)
            bases = [whole.data_ptr()]
        else:
            whole, bases = _rendezvous(len(local) * stride, group)
        addresses = [base + index * stride for base in bases for index in range(len(local))]
        return [cls(rank, whole[index * stride :][:num_bytes], addresses) for index, rank in enumerate(local)]


def local_ranks(num_ranks: int, group: dist.ProcessGroup | None = None) -> range:
    """The ranks of P that this process of a group holds: P/N consecutive ones, or all without a group.

    Raises:
        ShapeError: P is out of range or no multiple of the N processes.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ShapeError("num_ranks", num_ranks, f"1 to {MAX_RANKS}")
    if group is None:
        return range(num_ranks)
    processes, index = dist.get_world_size(group), dist.get_rank(group)
    if num_ranks % processes:
        raise ShapeError("num_ranks", num_ranks, f"a multiple of the {processes} processes")
    share = num_ranks // processes
    return range(index * share, (index + 1) * share)


def _rendezvous(num_bytes: int, group: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """(uint8 [num_bytes] of this process, zeroed; base address of every process's allocation as this one maps it)."""
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    facts: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size(group)
    dist.all_gather_object(facts, (num_bytes, device.index), group=group)
    if any(size != num_bytes for size, _ in facts):
        raise ShapeError("num_bytes", [size for size, _ in facts], f"the same in every process, here {num_bytes}")
    visible = range(torch.cuda.device_count())
    for peer, (_, index) in enumerate(facts):
        unreachable = index in visible and not torch.cuda.can_device_access_peer(device.index, index)
        if index != device.index and unreachable:
            raise ShapeError("group", f"process {peer} on cuda:{index}", f"devices that cuda:{device.index} can reach")
    buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(buffer, group)
    buffer.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return buffer, [int(pointer) for pointer in handle.buffer_ptrs]


__all__ = ["SymmetricMemory", "local_ranks"]
