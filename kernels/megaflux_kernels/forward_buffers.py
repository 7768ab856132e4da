"""The buffers of one rank as tensors, and the launches over them: transfer, forward, combine.

``ForwardBuffers`` is what layers of one shape share, ``WeightPool`` the home weights of one layer, ``ForwardLayer`` the
two together with replica slots. Allocates everything of ``forward_map.py`` once, for the largest batch; addresses never
change, so that launches can be captured into a CUDA graph. Who fills the tables is the caller's business: the route
kernel, or, for debugging, tables made on the host.
"""

from __future__ import annotations

import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from torch import Tensor

from megaflux_kernels.combine import compile_combine
from megaflux_kernels.forward import ForwardConfig, compile_forward
from megaflux_kernels.forward_map import ForwardMap, Region, WeightMap
from megaflux_kernels.launch import TRACE_WORDS
from megaflux_kernels.layout import ShapeError
from megaflux_kernels.peers import PEER_WORDS, Peer
from megaflux_kernels.symmetric import SymmetricMemory
from megaflux_kernels.sync.record import RECORD_WORDS, FailedWait, failed_wait
from megaflux_kernels.transfer import compile_transfer
from megaflux_kernels.worklist import LayerShape, WorkHeader


class WeightPool:
    """Home weights of one layer on one rank, see ``WeightMap``.

    Args:
        weight_map: extents.
        memory: at least ``weight_map.num_bytes`` bytes on every rank.

    Attributes:
        w1: BF16 [slots, 2I, H].
        w2: BF16 [slots, H, I].

    Raises:
        ShapeError: the memory is too small.
    """

    def __init__(self, weight_map: WeightMap, memory: SymmetricMemory) -> None:
        _check_memory(memory, weight_map.num_bytes)
        self.map, self.addresses = weight_map, memory.addresses
        self.w1, self.w2 = (
            _view(memory.buffer, weight_map.offsets[name], region) for name, region in weight_map.regions.items()
        )


class ForwardBuffers:
    """Buffers of one rank, for any number of layers of one shape, one after another.

    Args:
        shape: the layers; ``shape.max_tokens`` bounds every batch.
        config: launch choices.
        memory: at least ``ForwardMap(shape, config.tiling).symmetric_bytes`` bytes, zeroed.
        timeout_s: bound of every wait in a launch, seconds.

    Attributes:
        x, results, row_source, places, header, tasks, transfers, counters, ...: see ``ForwardMap``.
        error: int32 [8], the error record; may be replaced by that of the planner before the first launch.
        peers: int64 [P, 7], see ``peers.py``, without weights.

    Raises:
        ShapeError: the memory is too small, or of another number of ranks.
    """

    def __init__(
        self, shape: LayerShape, config: ForwardConfig, memory: SymmetricMemory, timeout_s: float = 10.0
    ) -> None:
        self.shape, self.config, self.rank = shape, config, memory.rank
        self.map = ForwardMap(shape, config.tiling)
        self.budget_ns = int(timeout_s * 1e9)
        if memory.num_ranks != shape.num_ranks:
            raise ShapeError("memory.addresses", memory.num_ranks, f"{shape.num_ranks} ranks")
        _check_memory(memory, self.map.symmetric_bytes)
        device, offsets = memory.buffer.device, self.map.offsets
        self.flags, self.row_source, self.places, self.x, self.results = (
            _view(memory.buffer, offsets[name], region) for name, region in self.map.symmetric.items()
        )
        self.header, self.tasks, self.transfers, self.counters, self.pool, self.act = (
            torch.zeros(region.extents, dtype=getattr(torch, region.dtype), device=device)
            for region in self.map.local.values()
        )
        self.error = torch.zeros(RECORD_WORDS, dtype=torch.int32, device=device)
        self.trace = torch.zeros(config.num_ctas, TRACE_WORDS, dtype=torch.int64, device=device)
        table = torch.zeros(shape.num_ranks, PEER_WORDS, dtype=torch.int64)
        for column in (Peer.X, Peer.RESULTS, Peer.FLAGS, Peer.ROW_SOURCE, Peer.PLACES):
            table[:, column] = torch.tensor(memory.addresses) + offsets[column.name.lower()]
        self.peers = table.to(device)
        self._combine = compile_combine(shape.hidden, shape.top_k)

    def next_launch(self) -> None:
        """Number the next launch over tables made on the host, and clear the counters."""
        self.header[WorkHeader.LAUNCH].add_(1)
        self.counters.zero_()

    def combine(self, topk_weights: Tensor, out: Tensor, finished: Tensor | None = None) -> None:
        """Launch out[t] = sum over j of topk_weights[t, j] * results[t, j].

        Args:
            topk_weights: float32 [M, k], contiguous.
            out: BF16 [M, H], contiguous; written.
            finished: int64 scalar that is set to the global timer at the end, nanoseconds, unless M is 0.

        Raises:
            ShapeError: a shape, dtype or layout that the kernel does not take.
        """
        num_tokens = topk_weights.shape[0]
        _check("topk_weights", topk_weights, torch.float32, (num_tokens, self.shape.top_k))
        _check("out", out, torch.bfloat16, (num_tokens, self.shape.hidden))
        if num_tokens > self.shape.max_tokens:
            raise ShapeError("topk_weights", num_tokens, f"at most {self.shape.max_tokens} tokens")
        if num_tokens:
            at = Int64(0 if finished is None else finished.data_ptr())
            self._combine(*_addresses(self.results, topk_weights, out), at, Int32(num_tokens), _stream())

    def failure(self) -> FailedWait | None:
        """The first wait of this rank that has failed, or None; synchronises with the device."""
        return failed_wait(self.error.tolist())


class ForwardLayer:
    """Launches over the weights of one layer.

    Loads its kernels when it is made: loading waits for the device, and so must not happen while a launch waits for a
    virtual rank on the same device.

    Args:
        buffers: of this rank.
        pool: home weights of this rank, with the shape's home slots, H and I.
        replicas: (w1 BF16 [s, 2I, H], w2 BF16 [s, H, I]) of this rank's replica slots; layers of one shape may share
            them, since a launch reads only replicas that it has brought or that the plan takes for resident.

    Raises:
        ShapeError: weights of another shape.
    """

    def __init__(self, buffers: ForwardBuffers, pool: WeightPool, replicas: tuple[Tensor, Tensor]) -> None:
        shape = buffers.shape
        expected = WeightMap(shape.home_slots, shape.hidden, shape.intermediate)
        if pool.map != expected:
            raise ShapeError("pool", pool.map, str(expected))
        extents = WeightMap(shape.num_replica_slots, shape.hidden, shape.intermediate).regions
        for tensor, (name, region) in zip(replicas, extents.items(), strict=True):
            _check(f"replicas.{name}", tensor, torch.bfloat16, region.extents)
        self.buffers, self.pool, self.replicas = buffers, pool, replicas
        self.peers = buffers.peers.clone()
        for column in (Peer.W1, Peer.W2):
            table = torch.tensor(pool.addresses) + pool.map.offsets[column.name.lower()]
            self.peers[:, column] = table.to(self.peers.device)
        self._forward = compile_forward(shape, buffers.config)
        self._transfer = compile_transfer(shape, buffers.config.tiling)
        if int(buffers.header[WorkHeader.LAUNCH]) == 0:
            self._launch_empty()

    def transfer(self) -> None:
        """Launch the transfer of replica weights alone; ``forward(pull_weights=False)`` then finds them."""
        buffers = self.buffers
        self._transfer(
            *_addresses(*self.replicas, buffers.header, buffers.transfers, buffers.counters, self.peers),
            *_addresses(buffers.error),
            Int64(buffers.budget_ns),
            _stream(),
        )

    def forward(self, pull_weights: bool = True) -> None:
        """Launch dispatch, products and return; when it ends, ``results`` holds the results of this rank's tokens."""
        buffers, pool = self.buffers, self.pool
        self._forward(
            *_addresses(buffers.pool, buffers.act, pool.w1, pool.w2, *self.replicas, buffers.header, buffers.tasks),
            *_addresses(buffers.row_source, buffers.places, buffers.transfers, buffers.counters, self.peers),
            *_addresses(buffers.flags, buffers.error, buffers.trace),
            Int32(buffers.rank),
            Int32(pull_weights),
            Int64(buffers.budget_ns),
            _stream(),
        )

    def _launch_empty(self) -> None:
        """Launch every kernel over tables that are still empty, as launch 0, for which no rank waits."""
        buffers = self.buffers
        self.transfer()
        self.forward()
        weights = torch.zeros(1, buffers.shape.top_k, dtype=torch.float32, device=buffers.x.device)
        buffers.combine(weights, torch.empty_like(buffers.x[:1]))
        torch.cuda.synchronize(buffers.x.device)


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


def _check_memory(memory: SymmetricMemory, num_bytes: int) -> None:
    if memory.buffer.numel() < num_bytes:
        raise ShapeError("memory.buffer", memory.buffer.numel(), f"at least {num_bytes} bytes")


__all__ = ["ForwardBuffers", "ForwardLayer", "WeightPool"]
