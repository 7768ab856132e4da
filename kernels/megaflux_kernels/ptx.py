"""PTX instructions that the kernel language does not offer by name: bulk copies by raw address, packing, SwiGLU.

Global addresses are Int64, shared-memory addresses Int32 (of the shared window). Every function is inlined.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

arch = cute.arch


def bulk_load(shared, source, num_bytes, barrier) -> None:
    """Copy global to shared memory; completes ``num_bytes`` on the mbarrier. 16-byte aligned sizes and addresses."""
    arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, source, Int32(num_bytes), barrier],
    )


def bulk_store(destination, shared, num_bytes) -> None:
    """Copy shared to global memory, own or a peer's; belongs to the calling thread's next bulk group."""
    arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[destination, shared, Int32(num_bytes)],
    )


def nth_set_bit(mask, n):
    """Position of the n-th set bit of a 32-bit mask, n from 0; 0xFFFFFFFF if there are fewer."""
    return arch.inline_ptx(
        "fns.b32 {$w0}, {$r0}, 0, {$r1};", write_only_types=[Int32], read_only_args=[Int32(mask), Int32(n + 1)]
    )


def pack_bf16(low, high):
    """Two float32, rounded to nearest even, as one 32-bit word."""
    return arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[high, low]
    )


def swiglu(gate, up):
    """silu(gate) * up in float32, as (h + h * tanh(h)) * up with h = gate / 2: one special-function instruction."""
    half = gate * 0.5
    tanh = arch.inline_ptx("tanh.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[half])
    return (half + half * tanh) * up


def store_matrix(shared, words) -> None:
    """stmatrix of four 8 x 8 BF16 matrices; each lane gives the address of one 16-byte row."""
    arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[shared, *words],
    )


def load_words(address):
    """Four 32-bit words from a 16-byte aligned global address, streamed past L1."""
    return arch.inline_ptx(
        "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def store_words(address, words) -> None:
    """Four 32-bit words to a 16-byte aligned global address."""
    arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


def add_scaled_bf16(word, scale, low, high):
    """(low, high) + scale * the two BF16 of a word, fused multiply-adds in float32."""
    low = arch.inline_ptx(
        "{ .reg .b32 t; shl.b32 t, {$r0}, 16; fma.rn.f32 {$w0}, t, {$r1}, {$r2}; }",
        write_only_types=[Float32],
        read_only_args=[word, scale, low],
    )
    high = arch.inline_ptx(
        "{ .reg .b32 t; and.b32 t, {$r0}, 0xFFFF0000; fma.rn.f32 {$w0}, t, {$r1}, {$r2}; }",
        write_only_types=[Float32],
        read_only_args=[word, scale, high],
    )
    return low, high


__all__ = [
    "add_scaled_bf16",
    "bulk_load",
    "bulk_store",
    "load_words",
    "nth_set_bit",
    "pack_bf16",
    "store_matrix",
    "store_words",
    "swiglu",
]
