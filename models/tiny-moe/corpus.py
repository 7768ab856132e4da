"""The text that tiny-moe learns from: three domains that every machine with Python has.

Decides what counts as code, prose and arithmetic, and which documents are held out. Knows no tokenizer and no model.

- ``code``: modules of the standard library without their docstrings.
- ``prose``: those docstrings and the language reference behind ``help()``.
- ``arithmetic``: sums and differences of small numbers, as lines and as short chats.

A document is held out by a hash of its name, so a module's code and its docstrings are held out together, and the
split is the same for every release of Python. A problem is held out whichever operand comes first.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, NamedTuple

Split = Literal["train", "held_out"]
DOMAINS = ("code", "prose", "arithmetic")

HELD_OUT_SHARE = 0.1
# Tables of code points, the reference as one literal, tests, and what is not of the standard library.
LEFT_OUT = {"encodings", "pydoc_data", "test", "tests", "idle_test", "site-packages"}
DOCSTRING_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHORTEST_DOCSTRING = 80  # characters; a one-line summary teaches no prose
PROBLEMS_PER_SHEET = 16
NUM_SHEETS: dict[Split, int] = {"train": 12_000, "held_out": 400}
CHAT_SHARE = 0.15
# Each problem has numbers below one of these, all equally likely: a model this small learns the small ones first.
NUMBER_LIMITS = (10, 20, 50)


class Problem(NamedTuple):
    """``left sign right = answer``; all three numbers are at least 0."""

    left: int
    sign: Literal["+", "-"]
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right if self.sign == "+" else self.left - self.right

    @property
    def question(self) -> str:
        return f"{self.left} {self.sign} {self.right} ="


def split_of(name: str) -> Split:
    """The split to which the document called ``name`` belongs, on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return "held_out" if int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64 else "train"


def documents(domain: str, split: Split) -> list[str]:
    """The documents of one domain and split, in a fixed order.

    Raises:
        KeyError: ``domain`` is not one of ``DOMAINS``.
    """
    return list({"code": _code, "prose": _prose, "arithmetic": _arithmetic}[domain](split))


def problems(split: Split, limit: int) -> list[Problem]:
    """Every sum and every difference that is not negative, of numbers below ``limit``, in one split."""
    every = [Problem(left, "+", right) for left in range(limit) for right in range(limit)]
    every += [Problem(left, "-", right) for left in range(limit) for right in range(left + 1)]
    return [p for p in every if split_of(f"{max(p.left, p.right)}{p.sign}{min(p.left, p.right)}") == split]


def _modules(split: Split) -> Iterator[tuple[str, list[tuple[str, ast.Expr]]]]:
    """Each module of the standard library in the split: its source, and its docstrings (clean text, syntax node)."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.isdisjoint(name.parts) and split_of(name.as_posix()) == split:
            source = path.read_text(encoding="utf-8")
            owners = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCSTRING_OWNERS)]
            yield source, [(text, node.body[0]) for node in owners if (text := ast.get_docstring(node))]


def _code(split: Split) -> Iterator[str]:
    for source, docstrings in _modules(split):
        lines = source.splitlines(keepends=True)
        for _, node in docstrings:
            if lines[node.lineno - 1].lstrip().startswith(("'", '"', "r'", 'r"')):  # not on the line of its ``def``
                lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        if text := "".join(lines).strip():
            yield text + "\n"


def _prose(split: Split) -> Iterator[str]:
    for _, docstrings in _modules(split):
        yield from (text + "\n" for text, _ in docstrings if len(text) >= SHORTEST_DOCSTRING)
    yield from (text.strip() + "\n" for name, text in sorted(topics.items()) if split_of(name) == split)


def _arithmetic(split: Split) -> Iterator[str]:
    rng = random.Random(f"arithmetic {split}")
    pools = [problems(split, limit) for limit in NUMBER_LIMITS]
    for _ in range(NUM_SHEETS[split]):
        sheet = [rng.choice(rng.choice(pools)) for _ in range(PROBLEMS_PER_SHEET)]
        yield "".join("".join(as_chat(p) if rng.random() < CHAT_SHARE else as_line(p)) for p in sheet)


def as_line(problem: Problem) -> tuple[str, str]:
    """Question and answer of a problem as one line of text."""
    return problem.question, f" {problem.answer}\n"


def as_chat(problem: Problem) -> tuple[str, str]:
    """Question and answer of a problem as one exchange in the form of the chat template."""
    question = f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n"
    return question, f"{problem.answer}<|im_end|>\n"
