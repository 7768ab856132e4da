"""Copies of device totals to the host, while batches run and graphs are captured.

Decides how a background thread may use CUDA beside an engine. Knows nothing of what the totals mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceCopies:
    """Copies of totals that live on one device, in page-locked memory, made on a stream that nothing else uses.

    A stream of PyTorch's pool will not do: the pool hands streams out again, and one on which a graph is captured would
    capture the copies.
    """

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._stream: torch.cuda.ExternalStream | None = None

    def add(self, index: int, totals: Tensor) -> None:
        """Copy int64 [words] from now on, as layer ``index``."""
        if self._stream is None:
            from cuda.bindings import driver

            (handle,) = succeeded(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            self._stream = torch.cuda.ExternalStream(int(handle), totals.device)
        self._pairs[index] = totals, torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)

    def read(self) -> dict[int, NDArray[np.int64]]:
        """The totals by layer."""
        pairs = dict(self._pairs)  # layers may still be added
        if self._stream is None:
            return {}
        with torch.cuda.stream(self._stream):
            for totals, copy in pairs.values():
                copy.copy_(totals, non_blocking=True)
        self._stream.synchronize()
        return {index: copy.numpy().copy() for index, (_, copy) in pairs.items()}


def allow_during_capture() -> None:
    """Let this thread call CUDA while another one captures a graph, which would make its calls fail otherwise."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    succeeded(driver.cuThreadExchangeStreamCaptureMode(relaxed))


def succeeded(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a driver call.

    Raises:
        RuntimeError: with the driver's code.
    """
    code, *values = result
    if code.value != 0:
        raise RuntimeError(f"the CUDA driver answers {code.name}")
    return tuple(values)


__all__ = ["DeviceCopies", "allow_during_capture"]
