"""Forward kernel, transfer and combine compile for Hopper without a GPU, within its registers and shared memory."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from tests.kernels.cubin import compared_flags, compile_kernels

SHARED_MEMORY_BYTES = 227 * 1024

CASES = {  # layer shape, options of the configuration
    "qwen3-30b-a3b, two ranks": ("(2, 128, 4, 2048, 768, 8, 8192)", ""),
    "deepseek-v3-e64, eight ranks, traced": ("(8, 64, 2, 7168, 2048, 8, 8192)", "trace=True"),
    "E 64, eight ranks on one GPU": ("(8, 64, 2, 7168, 2048, 8, 8192)", "num_ctas=16, weight_ctas=2"),
    "E 128, eight ranks on two GPUs": ("(8, 128, 4, 7168, 2048, 8, 16384)", "num_ctas=32, weight_ctas=4"),
    "E 256, eight ranks on four GPUs": ("(8, 256, 8, 7168, 2048, 8, 32768)", "num_ctas=64, weight_ctas=8"),
    "E 256, eight ranks": ("(8, 256, 8, 7168, 2048, 8, 65536)", ""),
    "clipped tiles, top-10, 72 ranks": ("(72, 504, 7, 2880, 320, 10, 1000)", ""),
}
PROGRAM = """
import json
from functools import partial
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cuda import default_stream
from megaflux_kernels.combine import Combine
from megaflux_kernels.forward import Forward, ForwardConfig
from megaflux_kernels.transfer import Transfer
from megaflux_kernels.worklist import LayerShape, Tiling

shape = LayerShape(*{shape})
forward, transfer = Forward(shape, ForwardConfig({options})), Transfer(shape, Tiling(), 132)
cute.compile(forward, *[Int64(0)] * 16, Int32(0), Int32(0), Int64(0), default_stream())
cute.compile(transfer, *[Int64(0)] * 7, Int64(0), default_stream())
cute.compile(Combine(shape.hidden, shape.top_k), *[Int64(0)] * 4, Int32(1), default_stream())
print(json.dumps([forward.storage.size_in_bytes(), transfer.storage.size_in_bytes()]))
"""


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_without_spills_and_fit_an_sm(name, tmp_path):
    shape, options = CASES[name]
    kernels = compile_kernels(PROGRAM.format(shape=shape, options=options), tmp_path)
    assert len(kernels) == 3
    combine, forward, transfer = kernels
    assert all(kernel.stack_bytes == 0 for kernel in kernels)
    assert forward.registers == 168  # 384 threads share 65536 registers before setmaxnreg deals them out
    assert max(combine.registers, transfer.registers) <= 128
    forward_bytes, transfer_bytes = json.loads(forward.output.splitlines()[-1])
    assert max(forward_bytes, transfer_bytes) <= SHARED_MEMORY_BYTES
    assert forward.ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 8  # first K step, and the loop's
    service, matrix = (int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", forward.ptx))
    assert 128 * service + 256 * matrix <= 384 * forward.registers, "a warpgroup would wait for registers for ever"
    assert "cp.async.bulk.tensor.4d" in forward.ptx  # gate and up rows of the same columns by one load
    assert "multicast::cluster" in forward.ptx
    assert "cp.async.bulk.global.shared::cta" in forward.ptx
    assert "st.release.sys" in forward.ptx
    num_flags, compared = compared_flags(forward.ptx, "sys")
    assert num_flags >= 3  # start to pull, start to store, done
    assert compared == []
