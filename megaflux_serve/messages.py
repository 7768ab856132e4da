"""Messages between the ranks of a process group: tensors from point to point, as bytes, with a bounded wait.

Decides how several messages travel at once. Knows no backend: gloo lacks dtypes and collectives that this does without.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megaflux_serve.errors import PeerTimeoutError

Message = tuple[int, Tensor]
"""A peer and the contiguous tensor that goes to it or comes from it."""


def exchange(
    group: dist.ProcessGroup, phase: str, outgoing: Sequence[Message], incoming: Sequence[Message], timeout_s: float
) -> None:
    """Send and receive at once and wait for both; an empty message is not sent, since its receiver knows its size.

    Args:
        group: of the ranks; peers are ranks in it.
        phase: what is waited for, for the error.
        outgoing: what is sent. Messages between two ranks arrive in the order of the lists.
        incoming: where what comes is written.
        timeout_s: the longest wait, seconds.

    Raises:
        PeerTimeoutError: a peer did not answer in time; the group cannot be used afterwards.
    """
    operations = [
        dist.P2POp(operation, tensor.view(-1).view(torch.uint8), group=group, group_peer=rank)
        for operation, messages in ((dist.irecv, incoming), (dist.isend, outgoing))
        for rank, tensor in messages
        if tensor.numel()
    ]
    if not operations:
        return
    deadline = time.monotonic() + timeout_s
    works = dist.batch_isend_irecv(operations)
    # A backend that answers once for the whole batch (NCCL) cannot say which peer is missing.
    peers = [operation.group_peer for operation in operations] if len(works) == len(operations) else [-1]
    for peer, work in zip(peers, works, strict=True):
        try:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            if time.monotonic() < deadline:
                raise
            raise PeerTimeoutError(peer, phase, -1, timeout_s) from error


__all__ = ["Message", "exchange"]
