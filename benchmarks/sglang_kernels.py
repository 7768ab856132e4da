"""Compile what SGLang 0.5.17 compiles when it first serves a Qwen3-MoE model, a process a kernel, into its own cache.

    python3 benchmarks/sglang_kernels.py

A server compiles one after the other and takes two minutes more for it, once a machine. Needs nvcc and a GPU, which
says what to compile for. Another release may have other kernels: those that are not found are named and left to it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
from typing import Any

OPERATIONS = "sglang.kernels.ops"
WIDTH, HEAD, ROW_BYTES = 2048, 128, (1024, 512)
"""H, the width of an attention head, and bytes of a token's keys with data- and tensor-parallel attention."""

KERNELS: list[tuple[str, str, tuple[Any, ...]]] = [
    *(("kvcache.kvcache", "_jit_kvcache_module", (size, size)) for size in ROW_BYTES),
    ("layernorm.norm", "_jit_qknorm_module", (HEAD, "bfloat16")),
    ("layernorm.norm", "_jit_rmsnorm_module", (WIDTH, "bfloat16")),
    *(("layernorm.norm", "_jit_fused_add_rmsnorm_module", ("bfloat16", casts)) for casts in (False, True)),
    ("attention.rope", "_jit_rotary_embedding_module", ()),
    ("attention.rope", "_jit_fused_rope_module", (True, HEAD, "bfloat16", "bfloat16")),
    *(("attention.clamp_position", "_jit_clamp_position_module", (ids,)) for ids in ("int64", "int32")),
    ("attention.fused_qknorm_rope", "_jit_fused_qknorm_rope_module", (HEAD, True, False)),
    ("activation.activation", "activation_module", ("bfloat16",)),
    ("moe.moe_align", "_jit_moe_align_module", ("int32",)),
    ("moe.moe_align_single_token", "_jit_align_single_token_module", ()),
]
"""Module below ``OPERATIONS``, function that compiles, arguments; strings name dtypes."""


def compile_kernel(kernel: tuple[str, str, tuple[Any, ...]]) -> str:
    """One kernel; a line that says how it went."""
    import torch

    module, name, arguments = kernel
    begin = time.monotonic()
    try:
        function = getattr(importlib.import_module(f"{OPERATIONS}.{module}"), name)
        function(*(getattr(torch, a) if isinstance(a, str) else a for a in arguments))
    except Exception as error:  # whatever a compiler says
        return f"left to the server: {module}.{name}{arguments}: {type(error).__name__}: {str(error)[:200]}"
    return f"{module}.{name}{arguments}: {time.monotonic() - begin:.0f} s"


def main() -> None:
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(len(KERNELS)) as pool:
        lines = list(pool.imap_unordered(compile_kernel, KERNELS))
    print("\n".join(sorted(lines)))
    missing = sum(line.startswith("left") for line in lines)
    print(f"{len(lines) - missing} of {len(lines)} kernels in {time.monotonic() - begin:.0f} s")
    sys.exit(missing == len(lines))


if __name__ == "__main__":
    main()
