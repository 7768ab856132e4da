"""A machine that executes compiled kernels on a CPU, so that they can be held to their meaning without a GPU.

Every thread runs by itself, up to the next place where it meets others: a barrier of its block, an instruction of its
warp, a flag that it reads. Whose turn comes first is drawn from a seed, so that seeds show different interleavings. A
run stops at an access outside of the memory, at one that is not aligned, and where nobody can go on. The machine knows
order, not the memory model: what a thread writes is seen at once. Time passes when flags are read, a microsecond each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from tests.kernels.ptx_program import (
    EXTRA,
    KIND,
    OPERATION,
    SHARED_BASE,
    SIGNED,
    TO,
    WHEN,
    A,
    B,
    C,
    D,
    Op,
    Program,
)

WARP, SPIN_NS = 32, 1000
READY, AT_BARRIER, AT_WARP, DONE = range(4)
OUTSIDE, UNALIGNED, STUCK = 1, 2, 3
FAULTS = {OUTSIDE: "an address outside of the memory", UNALIGNED: "an unaligned address", STUCK: "nobody can go on"}


class MachineError(Exception):
    """A fault of the program that is executed, with the instruction at which it happened."""


class Machine:
    """Memory that kernels reach, and their execution.

    ::

        machine = Machine(1 << 20, threads=256)
        counts = machine.tensor((2, 8), torch.int32)
        machine.run(Program.parse(ptx), (1, 1), [(counts.data_ptr(),)])

    Args:
        num_bytes: of the memory.
        threads: of a block.
        shared_bytes: of a block.
    """

    def __init__(self, num_bytes: int, threads: int, shared_bytes: int = 227 * 1024) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.threads, self.shared_bytes, self.used = threads, shared_bytes, 0

    def tensor(self, extents: Sequence[int], dtype: torch.dtype, fill: int = 0) -> Tensor:
        """A tensor in the memory, on a multiple of 1024 bytes.

        Raises:
            MachineError: the memory is full.
        """
        begin, num_bytes = self.used, int(np.prod(extents)) * dtype.itemsize
        self.used += -(-num_bytes // 1024) * 1024
        if self.used > len(self.memory):
            raise MachineError(f"{self.used} bytes do not fit {len(self.memory)}")
        return self.memory[begin : begin + num_bytes].view(dtype).view(*extents).fill_(fill)

    def run(self, program: Program, grid: tuple[int, int], arguments: Sequence[Sequence[int]], seed: int = 0) -> None:
        """Execute launches of a kernel side by side, to the end of all.

        Args:
            program: the kernel.
            grid: blocks in x and y, of each launch.
            arguments: of each launch, one for each parameter.
            seed: of the order of turns.

        Raises:
            MachineError: a fault.
        """
        places = [(launch, x, y) for launch in range(len(arguments)) for y in range(grid[1]) for x in range(grid[0])]
        num_threads, num_bytes = len(places) * self.threads, len(self.memory)
        memory = np.concatenate([self.memory.numpy(), np.zeros(len(places) * self.shared_bytes, dtype=np.uint8)])
        bounds = (self.memory.data_ptr(), num_bytes, self.shared_bytes)
        order = np.random.default_rng(seed).permutation(num_threads // WARP)
        registers = np.tile(program.registers, (num_threads, 1))
        parameters = np.array(arguments, dtype=np.int64)
        fault, thread, row = _run(
            program.code, registers, parameters, np.array(places), self.threads, memory, bounds, order
        )
        self.memory.numpy()[:] = memory[:num_bytes]
        if fault:
            raise MachineError(f"{FAULTS[fault]}: thread {thread}, {program.lines[row]!r}")


@njit
def _run(
    code: Any, registers: Any, parameters: Any, places: Any, threads: int, memory: Any, bounds: Any, order: Any
) -> tuple[int, int, int]:
    """Give warps turns until all threads are done; the fault, the thread and the row at which it happened."""
    pc, state = np.zeros(len(registers), np.int64), np.zeros(len(registers), np.int64)
    clock, doubles, turn = np.zeros(1, np.int64), np.zeros(2, np.float64), 0
    while (state != DONE).any():
        moved = False
        for index in range(len(order)):
            warp = order[(index + turn) % len(order)]
            first = warp * WARP
            block = first // threads
            for t in range(first, first + WARP):
                if state[t] == READY:
                    place = (t - block * threads, block)
                    fault = _thread(
                        t, place, code, registers[t], parameters, places, pc, state, memory, bounds, clock, doubles
                    )
                    moved = True
                    if fault:
                        return fault, t, pc[t]
            while _warp(first, code, registers, pc, state):
                moved = True
        for block in range(len(places)):
            own = state[block * threads : (block + 1) * threads]
            if (own == AT_BARRIER).any() and ((own == AT_BARRIER) | (own == DONE)).all():
                moved = True
                for t in range(threads):
                    if own[t] == AT_BARRIER:
                        own[t] = READY
                        pc[block * threads + t] += 1
        if not moved:
            stuck = np.argmax(state != DONE)
            return STUCK, stuck, pc[stuck]
        turn = (turn * 5 + 1) % len(order)
    return 0, 0, 0


@njit
def _thread(
    t: int, place: Any, code: Any, own: Any, parameters: Any, places: Any, pc: Any, state: Any, memory: Any,
    bounds: Any, clock: Any, doubles: Any,
) -> int:  # fmt: skip
    """Run a thread until it meets others, has read a flag, or ends; a fault, or 0."""
    tid, block = place
    while True:
        row = code[pc[t]]
        operation, when = row[OPERATION], row[WHEN]
        if when and (own[abs(when) - 1] != 0) != (when > 0):
            pc[t] += 1
        elif operation == Op.BRA:
            pc[t] = row[EXTRA]
        elif operation == Op.RET:
            state[t] = DONE
            return 0
        elif operation >= Op.BAR_SYNC:
            state[t] = AT_BARRIER if operation == Op.BAR_SYNC else AT_WARP
            return 0
        else:
            if operation < Op.ADD_F64:
                value = _integer(operation, row[KIND], row[EXTRA], own[row[A]], own[row[B]], own[row[C]])
                own[row[TO]] = _narrow(value, _result_kind(operation, row[KIND]))
            elif operation < Op.LD:
                own[row[TO]] = _double(operation, own[row[A]], own[row[B]], doubles)
            elif operation == Op.LD_PARAM:
                own[row[TO]] = parameters[places[block, 0], row[EXTRA]]
            elif operation == Op.SPECIAL:
                below = (np.int64(1) << (tid % WARP)) - 1
                own[row[TO]] = (tid, places[block, 1], places[block, 2], below, clock[0], clock[0])[row[EXTRA]]
            else:
                fault = _access(row, own, block, memory, bounds)
                if fault:
                    return fault
            pc[t] += 1
            if operation == Op.LD_FLAG:
                clock[0] += SPIN_NS
                return 0


@njit
def _access(row: Any, own: Any, block: int, memory: Any, bounds: Any) -> int:
    """A load, store or atomic operation; a fault, or 0. Blocks' shared memory lies behind the machine's own."""
    base, num_bytes, shared_bytes = bounds
    kind, operation = row[KIND], row[OPERATION]
    size = kind % SIGNED // 8
    if row[D]:
        at, end, first = (
            (own[row[A]] & 0xFFFFFFFF) + row[EXTRA] - SHARED_BASE,
            shared_bytes,
            num_bytes + block * shared_bytes,
        )
    else:
        at, end, first = own[row[A]] + row[EXTRA] - base, num_bytes, 0
    if at < 0 or at + size > end:
        return OUTSIDE
    if at % size:
        return UNALIGNED
    old, new = np.int64(0), own[row[B]]
    for i in range(size):
        old |= np.int64(memory[first + at + i]) << (8 * i)
    old = _narrow(old, kind)
    if operation != Op.ST:
        own[row[TO]] = old
    if operation in (Op.LD, Op.LD_FLAG):
        return 0
    if operation == Op.ATOM_ADD:
        new = old + new
    elif operation == Op.ATOM_OR:
        new = old | new
    elif operation == Op.ATOM_CAS:
        new = own[row[C]] if old == _narrow(new, kind) else old
    for i in range(size):
        memory[first + at + i] = np.uint8((new >> (8 * i)) & 255)
    return 0


@njit
def _warp(first: int, code: Any, registers: Any, pc: Any, state: Any) -> bool:
    """Carry out an instruction of a warp for which all lanes have come that it names; whether there was one."""
    for leader in range(first, first + WARP):
        if state[leader] != AT_WARP:
            continue
        row = code[pc[leader]]
        named = row[A] if row[OPERATION] == Op.BAR_WARP else (row[D] if row[OPERATION] == Op.SHFL else row[B])
        mask = registers[leader, named]
        lanes = [lane for lane in range(WARP) if (mask >> lane) & 1 and state[first + lane] != DONE]
        if len([lane for lane in lanes if state[first + lane] != AT_WARP or pc[first + lane] != pc[leader]]):
            continue
        given = registers[first : first + WARP, row[A]].copy()
        for lane in lanes:
            other = registers[first + lane, row[B]]
            result = _of_warp(row, lane, other, given, lanes)
            if row[OPERATION] != Op.BAR_WARP:
                registers[first + lane, row[TO]] = _narrow(result, 32)
            pc[first + lane] += 1
            state[first + lane] = READY
        return True
    return False


@njit
def _of_warp(row: Any, lane: int, other: int, given: Any, lanes: Any) -> int:
    """What a lane gets of the values ``given`` by the lanes of its warp; ``other`` is its second operand."""
    operation, extra = row[OPERATION], row[EXTRA]
    if operation == Op.SHFL:
        source = (other, lane - other, lane + other, lane ^ other)[extra]
        return given[source] if 0 <= source < WARP else given[lane]
    total = _unsigned(given[lanes[0]], row[KIND]) if operation == Op.REDUX else np.int64(0)
    for index, source in enumerate(lanes):
        value = given[source]
        if operation == Op.VOTE:
            total |= np.int64(value != 0) << source
        elif operation == Op.MATCH:
            total |= np.int64(value == given[lane]) << source
        elif index:
            value = _unsigned(value, row[KIND])
            total = (total + value, min(total, value), max(total, value), total & value, total | value, total ^ value)[
                extra
            ]
    return total


@njit
def _integer(operation: int, kind: int, extra: int, a: int, b: int, c: int) -> int:
    """What an instruction makes of integers, before it is narrowed to its result's type."""
    width = kind % SIGNED
    if operation == Op.MOV:
        return a
    if operation == Op.ADD:
        return a + b
    if operation == Op.SUB:
        return a - b
    if operation == Op.MUL:
        return a * b
    if operation == Op.MAD:
        return a * b + c
    if operation == Op.AND:
        return a & b
    if operation == Op.OR:
        return a | b
    if operation == Op.XOR:
        return a ^ b
    if operation == Op.NOT:
        return ~a
    if operation == Op.NEG:
        return -a
    if operation == Op.SELP:
        return a if c else b
    if operation == Op.SHL:
        return a << (b & 63) if b & 0xFFFFFFFF < width else 0
    if operation == Op.SHR:
        return _shifted(a, b & 0xFFFFFFFF, kind)
    if operation in (Op.POPC, Op.CLZ):
        return _bits(operation, a, width)
    x, y = _unsigned(a, kind), _unsigned(b, kind)
    if operation == Op.MUL_WIDE:
        return x * y
    if operation == Op.MUL_HI:
        return _high(x, y, kind) if width == 64 else _shifted(x * y, width, 64 + kind - width)
    if operation == Op.MIN:
        return min(x, y)
    if operation == Op.MAX:
        return max(x, y)
    if operation == Op.MAX_RELU:
        return max(x, y, 0)
    if operation == Op.DIV:
        if y == 0:  # a value that PTX leaves open; compilers divide before they know whether the result is wanted
            return -1
        return abs(x) // abs(y) if (x < 0) == (y < 0) else -(abs(x) // abs(y))
    if operation == Op.CVT:
        return _unsigned(_narrow(a, extra), extra)
    if kind == 64:  # to compare 64 bits without a sign, turn it
        x, y = x ^ (np.int64(-1) << 63), y ^ (np.int64(-1) << 63)
    return (x == y, x != y, x < y, x <= y, x > y, x >= y)[extra]


@njit
def _shifted(a: int, shift: int, kind: int) -> int:
    """A shift to the right, of the sign or of zeros."""
    if kind > SIGNED:
        return a >> min(shift, 63)
    return np.int64(np.uint64(_unsigned(a, kind)) >> np.uint64(shift)) if shift < kind else 0


@njit
def _bits(operation: int, a: int, width: int) -> int:
    """Bits that are set, or zeros before the first of them."""
    count, zeros = 0, width
    for i in range(width):
        if (a >> i) & 1:
            count, zeros = count + 1, width - 1 - i
    return count if operation == Op.POPC else zeros


@njit
def _high(x: int, y: int, kind: int) -> int:
    """The upper 64 bits of a product of 64-bit numbers."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b = np.uint64(x), np.uint64(y)
    first = (a & low) * (b & low)
    second = (a >> half) * (b & low) + (first >> half)
    third = (a & low) * (b >> half) + (second & low)
    top = np.int64((a >> half) * (b >> half) + (second >> half) + (third >> half))
    return top - (y if x < 0 else 0) - (x if y < 0 else 0) if kind > SIGNED else top


@njit(error_model="numpy")
def _double(operation: int, a: int, b: int, doubles: Any) -> int:
    """What an instruction makes of doubles, which registers hold as their bits."""
    words = doubles.view(np.int64)
    words[0], words[1] = a, b
    if operation == Op.F64_FROM:
        return np.int64(doubles[0])
    if operation == Op.F64_TO:
        doubles[0] = np.float64(a)
    elif operation == Op.ADD_F64:
        doubles[0] += doubles[1]
    elif operation == Op.MUL_F64:
        doubles[0] *= doubles[1]
    else:
        doubles[0] /= doubles[1]
    return words[0]


@njit
def _narrow(value: int, kind: int) -> int:
    """A value as a register holds it: the bits of its type, read as a signed number."""
    bits = kind % SIGNED
    if bits == 64:
        return value
    if bits == 1:
        return value & 1
    half = np.int64(1) << (bits - 1)
    return ((value & (2 * half - 1)) ^ half) - half


@njit
def _unsigned(value: int, kind: int) -> int:
    """A register's value as its type means it; without a sign up to 32 bits, as it is with one or with 64."""
    return value if kind > SIGNED or kind == 64 else value & ((np.int64(1) << kind) - 1)


@njit
def _result_kind(operation: int, kind: int) -> int:
    """Type of an instruction's result."""
    if operation == Op.SETP:
        return 1
    if operation in (Op.POPC, Op.CLZ):
        return 32
    return 2 * (kind % SIGNED) if operation == Op.MUL_WIDE else kind


__all__ = ["Machine", "MachineError"]
