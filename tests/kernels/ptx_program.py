"""PTX text as rows of numbers, which ``ptx_machine`` executes: operation, type, registers, jump.

Knows the instructions of the planner's kernels and refuses others by name. Constants are registers that are set before
a thread begins; an element of a vector that is loaded or stored is an instruction of its own.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

SHARED_BASE = 1024
"""Address of the first byte of a block's shared memory: one near 0 is a fault."""
SIGNED = 256
"""Added to the bits of a signed type."""


class Op(IntEnum):
    """Operations, in groups: on registers; on doubles; on memory, where column D tells shared from global; control;
    where threads meet. Names are PTX's, with ``_`` for a dot.
    """

    MOV, ADD, SUB, MUL, MUL_WIDE, MUL_HI, MAD, AND, OR, XOR, NOT, NEG, SHL, SHR, MIN, MAX, MAX_RELU = range(17)
    POPC, CLZ, DIV, CVT, SETP, SELP = range(17, 23)
    ADD_F64, MUL_F64, DIV_F64, F64_FROM, F64_TO = range(23, 28)
    LD, LD_FLAG, ST, ATOM_ADD, ATOM_OR, ATOM_CAS = range(28, 34)
    LD_PARAM, SPECIAL, BRA, RET = range(34, 38)
    BAR_SYNC, BAR_WARP, SHFL, VOTE, MATCH, REDUX = range(38, 44)


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
SHUFFLES = ("idx", "up", "down", "bfly")
REDUCTIONS = ("add", "min", "max", "and", "or", "xor")
SPECIALS = ("%tid.x", "%ctaid.x", "%ctaid.y", "%lanemask_lt", "%globaltimer", "%clock64")
OPERATION, KIND, TO, A, B, C, D, WHEN, EXTRA = range(9)
"""Columns. ``WHEN``: 1 + the predicate's register, negative for ``@!``, 0 without. ``EXTRA``: offset, jump, variant."""


class UnknownInstructionError(Exception):
    """An instruction that no planner's kernel has had so far."""


@dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        code: int64 [n, 9].
        registers: int64, what a thread's registers hold when it begins: zeros, then constants.
        lines: the text of every row.
    """

    code: NDArray[np.int64]
    registers: NDArray[np.int64]
    lines: tuple[str, ...]

    @classmethod
    def parse(cls, ptx: str) -> Program:
        """The one kernel of a text.

        Raises:
            UnknownInstructionError: naming the instruction.
        """
        return _Parser(re.sub(r"//[^\n]*", "", ptx)).program()


class _Parser:
    def __init__(self, ptx: str) -> None:
        self.head, self.body = ptx.split("{", 1)
        self.parameters = re.findall(r"\.param\s+\.[a-z]\d+\s+(\w+)", self.head)
        self.registers = {"": 0}  # where results go that nobody wants
        for kind, count in re.findall(r"\.reg\s+\.\w+\s+(%\w+?)<(\d+)>;", self.body):
            self.registers |= {f"{kind}{number}": len(self.registers) + number for number in range(int(count))}
        self.values = [0] * len(self.registers)
        self.labels: dict[str, int] = {}
        self.jumps: list[tuple[int, str]] = []
        self.rows: list[list[int]] = []
        self.lines: list[str] = []

    def program(self) -> Program:
        body = re.sub(r"\.(reg|pragma)[^;]*;", "", self.body)
        for label, statement in re.findall(r"([$\w]+):|([^;{}:]+(?:\{[^}]*\}[^;{}]*)*);", body):
            if label:
                self.labels[label] = len(self.rows)
            else:
                self.statement(" ".join(statement.split()))
        for row, label in self.jumps:
            self.rows[row][EXTRA] = self.labels[label]
        return Program(np.array(self.rows), np.array(self.values), tuple(self.lines))

    def statement(self, text: str) -> None:
        """Take an instruction down."""
        found = re.fullmatch(r"(?:@(!?)(%p\d+) )?([\w.:]+) ?(.*)", text)
        assert found is not None, text
        negated, predicate, name, rest = found.groups()
        self.when = 0 if predicate is None else (1 + self.registers[predicate]) * (-1 if negated else 1)
        self.text, words = text, name.split(".")
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]\s]+", rest)]
        if words[0] == "bra":
            self.jumps.append((len(self.rows), operands[0]))
            self.add("bra")
        elif words[0] in ("ld", "st"):
            self.access(words, operands)
        elif words[0] in ("red", "atom"):
            self.atomic(words, operands)
        elif words[0] == "mov" and operands[1] in SPECIALS:
            self.add("special", words[-1], self.registers[operands[0]], extra=SPECIALS.index(operands[1]))
        elif words[0] == "mov" and operands[0][0] == "{":
            self.halves(operands)
        elif words[0] in ("bar", "ret"):
            self.add(".".join(words[:2]), "b32", 0, *map(self.operand, operands))
        else:
            operation, kind, extra = self.variant(words)
            self.add(operation, kind, self.registers[operands[0]], *map(self.operand, operands[1:]), extra=extra)

    def variant(self, words: list[str]) -> tuple[str, str, int]:
        """Operation, type and variant of an instruction that reads registers."""
        first, kind = words[0], words[-1]
        if first == "setp" and len(words) == 3:
            return first, kind, COMPARISONS.index(words[1])
        if first == "cvt":
            to, source = words[-2:]
            operation = "f64.from" if source == "f64" else "f64.to" if to == "f64" else first
            return operation, to, kind_of(source)
        if first == "shfl":
            return first, kind, SHUFFLES.index(words[2])
        if first == "redux":
            return first, kind, REDUCTIONS.index(words[2])
        if kind == "f64":
            return f"{first}.f64", kind, 0
        return (f"{first}.{words[1]}" if {"wide", "hi", "relu"} & {words[1]} else first), kind, 0

    def access(self, words: list[str], operands: list[str]) -> None:
        """A load or store, element by element."""
        kind, (place, value) = words[-1], (operands[::-1] if words[0] == "ld" else operands)
        if "param" in words:
            self.add("ld.param", kind, self.registers[value], extra=self.parameters.index(place.strip("[]")))
            return
        address, offset = self.address(place)
        shared = int("shared" in words)
        for i, element in enumerate(value.strip("{}").split(",")):
            at = offset + i * (kind_of(kind) % SIGNED) // 8
            if words[0] == "st":
                self.add("st", kind, 0, address, self.operand(element.strip()), d=shared, extra=at)
            else:
                operation = "ld.flag" if {"acquire", "relaxed"} & set(words) else "ld"
                self.add(operation, kind, self.registers[element.strip()], address, d=shared, extra=at)

    def halves(self, operands: list[str]) -> None:
        """A register of 64 bits into two of 32; ``_`` is nobody's."""
        low, high = (part.strip().replace("_", "") for part in operands[0].strip("{}").split(","))
        source = self.operand(operands[1])
        self.add("cvt", "b32", self.registers[low], source, extra=64)
        self.add("shr", "s64", self.registers[high], source, self.operand("32"))

    def atomic(self, words: list[str], operands: list[str]) -> None:
        """An atomic operation; without a result it is a reduction."""
        to = "" if words[0] == "red" else operands.pop(0)
        address, offset = self.address(operands[0])
        name = f"atom.{next((word for word in words if word in ('add', 'or', 'cas')), '')}"
        values = map(self.operand, operands[1:])
        self.add(name, words[-1], self.registers[to], address, *values, d=int("shared" in words), extra=offset)

    def address(self, place: str) -> tuple[int, int]:
        base, _, offset = place.strip("[]").partition("+")
        return self.operand(base), int(offset or 0)

    def operand(self, text: str) -> int:
        """The register of an operand; a constant gets one."""
        if text in self.registers:
            return self.registers[text]
        if text.startswith("__dynamic_shmem"):
            value = SHARED_BASE
        elif text[0] == "{":
            raise UnknownInstructionError(self.text)
        elif text.startswith("0d"):
            (value,) = struct.unpack("<q", struct.pack("<Q", int(text[2:], 16)))
        else:
            value = (int(text, 0) + (1 << 63)) % (1 << 64) - (1 << 63)
        self.registers[text] = len(self.values)
        self.values.append(value)
        return self.registers[text]

    def add(self, name: str, kind: str = "b32", to: int = 0, *inputs: int, d: int = 0, extra: int = 0) -> None:
        operation = Op.__members__.get(name.upper().replace(".", "_"))
        if operation is None:
            raise UnknownInstructionError(self.text)
        a, b, c, last = (*inputs, *(0, 0, 0, 0)[len(inputs) :])
        self.rows.append([operation, kind_of(kind), to, a, b, c, d or last, self.when, extra])
        self.lines.append(self.text)


def kind_of(name: str) -> int:
    """Bits of a type, ``SIGNED`` more for a signed one; predicates have one bit."""
    found = re.fullmatch(r"([bsuf])(\d+)", name)
    return 1 if found is None else int(found[2]) + SIGNED * (found[1] == "s")


__all__ = ["SHARED_BASE", "SIGNED", "Op", "Program", "UnknownInstructionError"]
