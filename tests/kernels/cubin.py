"""Compile kernels for another GPU than this machine's, in a process of its own, and read what ptxas made of them."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REGISTERS, FRAME_SIZE = 0x2F, 0x11
"""Attributes of the section .nv.info: (symbol, value) pairs of 32-bit words."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel as the driver would load it.

    Attributes:
        ptx: its text.
        registers: of a thread at entry.
        stack_bytes: of a thread; spilled registers live there.
        output: what the compiling process printed.
    """

    ptx: str
    registers: int
    stack_bytes: int
    output: str


def compile_kernels(program: str, folder: Path, arch: str = "sm_90a") -> list[CompiledKernel]:
    """The kernels that a Python program compiles, in order of their names.

    Args:
        program: Python text that calls ``cute.compile``.
        folder: empty folder for the compiler's files.
        arch: target, such as ``sm_90a``.
    """
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")]),
    }
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = []
    for path in sorted(folder.glob("*.cubin")):
        attributes = kernel_attributes(path.read_bytes())
        ptx = path.with_suffix(".ptx").read_text()
        kernels.append(CompiledKernel(ptx, attributes[REGISTERS], attributes.get(FRAME_SIZE, 0), done.stdout))
    return kernels


def compared_flags(ptx: str, scope: str) -> tuple[int, list[str]]:
    """Flags that a kernel reads with acquire order at a scope, and those of them that it compares as they are.

    A flag holds a launch number, which wraps: right is the sign of a difference.
    """
    flags = set(re.findall(rf"ld\.acquire\.{scope}\.global\.b32\s+(%r\d+),", ptx))
    return len(flags), sorted(flag for flag in flags if re.search(rf"setp[^;]*{flag}\b", ptx))


def kernel_attributes(cubin: bytes) -> dict[int, int]:
    """Largest value of each (symbol, value) attribute in the section .nv.info of a 64-bit ELF file."""
    assert cubin[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names = sections[names_index][4]
    found: dict[int, int] = {}
    for name, _, _, _, offset, size in sections:
        end = cubin.index(b"\0", names + name)
        if cubin[names + name : end] != b".nv.info":
            continue
        at = offset
        while at < offset + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            if form == 4 and length == 8:
                found[attribute] = max(found.get(attribute, 0), struct.unpack_from("<II", cubin, at + 4)[1])
            at += 4 + (length if form == 4 else 0)
    return found
