"""A first look: do real vLLM servers with the backend start on two GPUs and give the tokens of stock vLLM?

    python3 -m tests.plugins.vllm_smoke --out FOLDER [--only NAME ...]

Servers of a group start together, on both GPUs: first eager ones of stock vLLM and of the backend; then one with
compiled model and captured graphs, which has the machine alone and measures its memory; then a tensor-parallel one and
one that hands small batches to vLLM's kernels. Prints a line a server; logs go to the folder. The status is the number
of servers that failed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.plugins.engine_runs import PROMPTS, TINY_MOE, Server, serve
from tests.plugins.random_moe import write_checkpoint

COMMON = ("--dtype", "bfloat16", "--max-model-len", "2048", "--api-server-count", "1", "--no-enable-prefix-caching")
DATA = ("--enable-expert-parallel", "--data-parallel-size", "2")
TENSOR = ("--enable-expert-parallel", "--tensor-parallel-size", "2")
SHARED_GPU = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(2 << 30))
ALONE = ("--gpu-memory-utilization", "0.6")
FEW_GRAPHS = ("--max-cudagraph-capture-size", "32")
MEGAKERNEL = {"executor": "megakernel", "timeout_s": 40}
OPEN = MEGAKERNEL | {"gate": None}  # small batches move replicas too
LONG = " ".join(PROMPTS[:3]) * 12  # more than a block of rows for most experts
ENOUGH_EQUAL = 0.8
"""Share of first tokens that have to agree: where two tokens are nearly as likely, BF16 may choose either."""


@dataclass(frozen=True)
class Run:
    """A server: name, whether it serves the tiny model, flags, options of ours (None: stock vLLM)."""

    name: str
    tiny: bool
    flags: Sequence[str]
    options: dict[str, object] | None

    @property
    def arguments(self) -> list[str]:
        """Flags for ``vllm serve``."""
        if self.options is None:
            return list(self.flags)
        return [*self.flags, "--moe-backend", "megaflux", "--additional-config", json.dumps({"megaflux": self.options})]


GROUPS = (
    (
        Run("stock", False, (*DATA, *SHARED_GPU, "--enforce-eager"), None),
        Run("eager", False, (*DATA, *SHARED_GPU, "--enforce-eager"), OPEN),
        Run("tiny-stock", True, (*DATA, *SHARED_GPU, "--enforce-eager"), None),
        Run("tiny", True, (*DATA, *SHARED_GPU, "--enforce-eager"), OPEN | {"replica_slots": 3}),
    ),
    (Run("graphs", False, (*DATA, *ALONE, *FEW_GRAPHS), MEGAKERNEL),),
    (
        Run("tensor", False, (*TENSOR, *SHARED_GPU, *FEW_GRAPHS), MEGAKERNEL),
        Run("small", False, (*DATA, *SHARED_GPU, *FEW_GRAPHS), MEGAKERNEL | {"min_tokens": 33}),
    ),
)


@dataclass(frozen=True)
class Answer:
    """What a server did: seconds to its first health answer, tokens a prompt, error text or None."""

    start_s: float
    tokens: list[list[int]]
    error: str | None


def machine() -> str:
    """Whether the executor ``auto`` would be the megakernel here, as far as the machine decides."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "no NVIDIA GPU"
    names = [current_platform.get_device_name(index) for index in range(current_platform.device_count())]
    return f"{names}, connected by NVLink: {current_platform.is_fully_connected(list(range(len(names))))}"


def ask(server: Server) -> list[list[int]]:
    """Greedy tokens: each prompt alone, while the other rank idles; all at once; a long one."""
    alone = [server.complete(prompt) for prompt in PROMPTS]
    return alone + server.complete_together(PROMPTS) + server.complete_together([LONG] * 3)


def try_run(run: Run, model: Path, out: Path, start_s: float) -> Answer:
    """Start, ask and stop a server; an error is part of the answer."""
    log, begin, started = out / f"{run.name}.log", time.monotonic(), 0.0
    try:
        with serve(run.arguments, log, model, COMMON, start_s) as server:
            started = time.monotonic() - begin
            return Answer(started, ask(server), None)
    except Exception as error:  # a first look goes on with the next server
        return Answer(started, [], f"{type(error).__name__}: {str(error).splitlines()[0]}\n{excerpt(log)}")


def excerpt(log: Path, lines_shown: int = 45) -> str:
    """The part of a log that explains a failure: from the first traceback on, else its end."""
    text = [re.sub(r"\x1b\[[0-9;]*m", "", line)[:240] for line in log.read_text(errors="replace").splitlines()]
    first = next((index for index, line in enumerate(text) if "Traceback" in line), max(0, len(text) - lines_shown))
    return "\n".join([*text[first : first + lines_shown], "[...]", *text[-8:]])


def share(equal: Sequence[bool]) -> float:
    """Part that is true; 0 of nothing."""
    return sum(equal) / len(equal) if equal else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of servers", default=[])
    parser.add_argument("--start-s", type=float, default=80.0, help="the longest start of a server")
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    answers: dict[str, Answer] = {}
    print(f"== this machine: {machine()}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        random = write_checkpoint(Path(scratch) / "model", arguments.layers)
        for group in GROUPS:
            runs = [run for run in group if not arguments.only or run.name in arguments.only]
            with ThreadPoolExecutor(max(1, len(runs))) as pool:
                paths = [TINY_MOE if run.tiny else random for run in runs]
                done = pool.map(
                    lambda pair: try_run(*pair, arguments.out, arguments.start_s), zip(runs, paths, strict=True)
                )
                answers |= dict(zip([run.name for run in runs], done, strict=True))
            for run in runs:
                report(run, answers)
    facts = {name: {"start_s": answer.start_s, "tokens": answer.tokens} for name, answer in answers.items()}
    (arguments.out / "smoke.json").write_text(json.dumps(facts))
    return sum(answer.error is not None for answer in answers.values())


def report(run: Run, answers: dict[str, Answer]) -> None:
    """Print what became of a server, beside the stock server of its model if there was one."""
    answer, stock = answers[run.name], answers.get("tiny-stock" if run.tiny else "stock")
    if answer.error is not None:
        print(f"== {run.name}: FAILED\n{answer.error}", flush=True)
        return
    line = f"== {run.name}: started in {answer.start_s:.0f} s, {len(answer.tokens)} answers"
    if stock is not None and stock.tokens and run.options is not None:
        pairs = list(zip(answer.tokens, stock.tokens, strict=True))
        first, whole = share([a[0] == b[0] for a, b in pairs]), share([a == b for a, b in pairs])
        verdict = "as stock" if first >= ENOUGH_EQUAL else "NOT AS STOCK"
        line += f"; first tokens equal {first:.0%}, whole answers {whole:.0%}: {verdict}"
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
