"""The buffers of one rank and layer shape as tensors, and the launches over them: transfer, forward, combine.

Allocates everything of ``forward_map.py`` once, for the largest batch; addresses never change, so that launches can be
captured into a CUDA graph. Who fills the tables is the caller's business: the route kernel, or, for debugging,
``load_tables`` with tables made on the host.
"""

from __future__ import annotations

import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from torch import Tensor

from megaflux_kernels.combine import compile_combine
from megaflux_kernels.forward import ForwardConfig, compile_forward
from megaflux_kernels.forward_map import ForwardMap, Region
from megaflux_kernels.launch import TRACE_WORDS
from megaflux_kernels.layout import ShapeError
from megaflux_kernels.peers import Peer
from megaflux_kernels.symmetric import SymmetricMemory
from megaflux_kernels.sync.record import RECORD_WORDS, FailedWait, failed_wait
from megaflux_kernels.transfer import compile_transfer
from megaflux_kernels.worklist import ForwardWork, LayerShape, WorkHeader


class ForwardBuffers:
    """Buffers and launches of one rank.

    Args:
        shape: the layer; ``shape.max_tokens`` bounds every batch.
        config: launch choices.
        memory: at least ``ForwardMap(shape, config.tiling).symmetric_bytes`` bytes, zeroed.
        timeout_s: bound of every wait in a launch, seconds.

    Raises:
        ShapeError: the memory is too small, or of another number of ranks.
    """

    def __init__(
        self, shape: LayerShape, config: ForwardConfig, memory: SymmetricMemory, timeout_s: float = 10.0
    ) -> None:
        self.shape, self.config, self.rank = shape, config, memory.rank
        self.map = ForwardMap(shape, config.tiling)
        self.budget_ns = int(timeout_s * 1e9)
        if len(memory.addresses) != shape.num_ranks:
            raise ShapeError("memory.addresses", len(memory.addresses), f"{shape.num_ranks} ranks")
        if memory.buffer.numel() < self.map.symmetric_bytes:
            raise ShapeError("memory.buffer", memory.buffer.numel(), f"at least {self.map.symmetric_bytes} bytes")
        device = memory.buffer.device
        offsets = self.map.offsets
        views = {name: _view(memory.buffer, offsets[name], region) for name, region in self.map.symmetric.items()}
        self.flags, self.row_source, self.places = views["flags"], views["row_source"], views["places"]
        self.x, self.results, self.w1, self.w2 = views["x"], views["results"], views["w1"], views["w2"]
        self.header, self.tasks, self.transfers, self.counters, self.pool, self.act = (
            torch.zeros(region.extents, dtype=getattr(torch, region.dtype), device=device)
            for region in self.map.local.values()
        )
        self.error = torch.zeros(RECORD_WORDS, dtype=torch.int32, device=device)
        self.trace = torch.zeros(config.num_ctas, TRACE_WORDS, dtype=torch.int64, device=device)
        names = [column.name.lower() for column in Peer]
        table = [[base + offsets[name] for name in names] for base in memory.addresses]
        self.peers = torch.tensor(table, dtype=torch.int64, device=device)
        self._forward = compile_forward(shape, config)
        self._transfer = compile_transfer(shape, config.tiling)
        self._combine = compile_combine(shape.hidden, shape.top_k)

    def load_tables(self, work: ForwardWork) -> None:
        """Copy tables made on the host, for debugging; also numbers the launch and clears the counters."""
        for name in ("tasks", "row_source", "places", "transfers"):
            values = torch.from_numpy(getattr(work, name))
            getattr(self, name)[: len(values)].copy_(values)
        self.header.copy_(torch.from_numpy(work.header))
        self.counters.zero_()

    def next_launch(self) -> None:
        """Number the next launch over the tables that are loaded, and clear the counters."""
        self.header[WorkHeader.LAUNCH].add_(1)
        self.counters.zero_()

    def transfer(self) -> None:
        """Launch the transfer of replica weights alone; ``forward(pull_weights=False)`` then finds them."""
        self._transfer(
            *_addresses(self.w1, self.w2, self.header, self.transfers, self.counters, self.peers, self.error),
            Int64(self.budget_ns),
            _stream(),
        )

    def forward(self, pull_weights: bool = True) -> None:
        """Launch dispatch, products and return; when it ends, ``results`` holds the results of this rank's tokens."""
        self._forward(
            *_addresses(self.pool, self.act, self.w1, self.w2, self.header, self.tasks, self.row_source, self.places),
            *_addresses(self.transfers, self.counters, self.peers, self.flags, self.error, self.trace),
            Int32(self.rank),
            Int32(pull_weights),
            Int64(self.budget_ns),
            _stream(),
        )

    def combine(self, topk_weights: Tensor, out: Tensor) -> None:
        """Launch out[t] = sum over j of topk_weights[t, j] * results[t, j].

        Args:
            topk_weights: float32 [M, k], contiguous.
            out: BF16 [M, H], contiguous; written.

        Raises:
            ShapeError: a shape, dtype or layout that the kernel does not take.
        """
        num_tokens = topk_weights.shape[0]
        _check("topk_weights", topk_weights, torch.float32, (num_tokens, self.shape.top_k))
        _check("out", out, torch.bfloat16, (num_tokens, self.shape.hidden))
        if num_tokens > self.shape.max_tokens:
            raise ShapeError("topk_weights", num_tokens, f"at most {self.shape.max_tokens} tokens")
        if num_tokens:
            self._combine(*_addresses(self.results, topk_weights, out), Int32(num_tokens), _stream())

    def failure(self) -> FailedWait | None:
        """The first wait of this rank that has failed, or None; synchronises with the device."""
        return failed_wait(self.error.tolist())


def _view(buffer: Tensor, offset: int, region: Region) -> Tensor:
    flat = buffer[offset : offset + region.num_bytes].view(getattr(torch, region.dtype))
    return flat.view(region.extents)


def _addresses(*tensors: Tensor) -> tuple[Int64, ...]:
    return tuple(Int64(tensor.data_ptr()) for tensor in tensors)


def _stream() -> CUstream:
    return CUstream(torch.cuda.current_stream().cuda_stream)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, extents: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != extents or not tensor.is_contiguous():
        came = f"{tensor.dtype} {list(tensor.shape)}"
        raise ShapeError(name, came, f"contiguous {dtype} {list(extents)}")


__all__ = ["ForwardBuffers"]
