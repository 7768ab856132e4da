"""The combine: out[t] = sum over j of topk_weights[t, j] * results[t, j], in top-k order, float32, rounded once.

Runs after the forward kernel in the same stream and waits for nobody: that kernel ends when all results have arrived.
One thread a token and eight columns; the k loads are in flight together. The last block notes when it ends.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from megaflux_kernels import ptx
from megaflux_kernels.compile_cache import cached
from megaflux_kernels.sync.device import doubles

arch = cute.arch
COLUMNS = 8
MAX_THREADS = 256


class Combine:
    """Launch function and device code for one (H, k)."""

    def __init__(self, hidden: int, top_k: int) -> None:
        self.hidden, self.top_k = hidden, top_k
        vectors = hidden // COLUMNS
        self.chunks = -(-vectors // MAX_THREADS)
        self.threads = -(-vectors // (32 * self.chunks)) * 32

    @cute.jit
    def __call__(self, results: Int64, topk_weights: Int64, out: Int64, finished: Int64, num_tokens: Int32, stream):
        """Addresses of BF16 [M, k, H], float32 [M, k] and BF16 [M, H]; M at least 1.

        ``finished`` is 0, or the address of an int64 that is set to the global timer, in nanoseconds.
        """
        self.kernel(results, topk_weights, out, finished).launch(
            grid=[num_tokens, self.chunks, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, results: Int64, topk_weights: Int64, out: Int64, finished: Int64):
        thread, _, _ = arch.thread_idx()
        token, chunk, _ = arch.block_idx()
        column = (chunk * self.threads + thread) * COLUMNS
        if column < self.hidden:
            pointer = cute.make_ptr(Float32, topk_weights, cute.AddressSpace.gmem, assumed_align=4)
            weights, rows = [], []
            for j in range_constexpr(self.top_k):
                weights.append(arch.load(pointer + (token * self.top_k + j), Float32))
                rows.append(ptx.load_words(results + ((Int64(token) * self.top_k + j) * self.hidden + column) * 2))
            sums = [Float32(0.0)] * COLUMNS
            for j in range_constexpr(self.top_k):
                for i in range_constexpr(COLUMNS // 2):
                    sums[2 * i], sums[2 * i + 1] = ptx.add_scaled_bf16(
                        rows[j][i], weights[j], sums[2 * i], sums[2 * i + 1]
                    )
            packed = [ptx.pack_bf16(sums[2 * i], sums[2 * i + 1]) for i in range(COLUMNS // 2)]
            ptx.store_words(out + (Int64(token) * self.hidden + column) * 2, packed)
        if finished != 0:
            num_tokens, _, _ = arch.grid_dim()
            # Blocks start in order, so that no other ends much later than this one.
            if (token == num_tokens - 1) & (chunk == self.chunks - 1) & (thread == 0):
                arch.store(doubles(finished).iterator, arch.globaltimer())


def compile_combine(hidden: int, top_k: int):
    """The compiled kernel; call it with (results, topk_weights, out, finished, num_tokens, stream)."""
    arguments = (*[Int64(0)] * 4, Int32(1), cutlass.cuda.default_stream())
    return cached(lambda: cute.compile(Combine(hidden, top_k), *arguments), "combine", hidden, top_k)


__all__ = ["Combine", "compile_combine"]
