"""A first look: do vLLM's engines with the backend run on two GPUs and give the tokens of stock vLLM?

    python3 -m tests.plugins.vllm_smoke --out FOLDER [--only NAME ...]

Importing vLLM takes most of a minute on a cold machine, so nothing is imported twice: one process imports it, and every
engine is two processes forked from that one, a rank each, with the engine inside (no HTTP; the tests start servers).
Engines of a group run at the same time. Prints a line an engine; logs go to the folder. The status is the number of
engines that failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.plugins.engine_runs import ENVIRONMENT, NO_FUSED_ALLREDUCE, PROMPTS, TINY_MOE
from tests.plugins.processes import free_port
from tests.plugins.random_moe import write_checkpoint, write_neighbours

RANKS = 2
LONG = " ".join(PROMPTS[:3]) * 8  # more than a block of rows for most experts
NUM_TOKENS = 24
ENOUGH_EQUAL = 0.8
"""Share of first tokens that have to agree: where two tokens are nearly as likely, BF16 may choose either."""

COMMON = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    "enable_expert_parallel": True,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 2 << 30,
}
GRAPHS = {"max_cudagraph_capture_size": 32, "gpu_memory_utilization": 0.6}
MEGAKERNEL = {"executor": "megakernel", "timeout_s": 40}
OWN = MEGAKERNEL | {"min_tokens": 0}  # no batch is handed over to vLLM's kernels
OPEN = OWN | {"gate": None}  # small batches move replicas too


@dataclass(frozen=True)
class Run:
    """An engine on two ranks.

    Attributes:
        name: of the engine.
        options: ours; None is stock vLLM.
        engine: arguments of ``vllm.LLM`` beside ``COMMON``.
        is_tiny: serves tiny-moe instead of the random model.
        reloads: loads other weights afterwards and answers again.
        is_tensor_parallel: the ranks share their requests; otherwise each has its own.
    """

    name: str
    options: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=lambda: {"enforce_eager": True})
    is_tiny: bool = False
    reloads: bool = False
    is_tensor_parallel: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        ours = {"moe_backend": "megaflux", "additional_config": {"megaflux": self.options}}
        return COMMON | self.engine | ({} if self.options is None else ours)


GROUPS = (
    (Run("stock", reloads=True), Run("eager", OPEN, reloads=True)),
    (Run("graphs", {"timeout_s": 40}, GRAPHS | {"kv_cache_memory_bytes": None}, reloads=True),),
    (Run("tiny-stock", is_tiny=True), Run("tiny", OPEN | {"replica_slots": 3}, is_tiny=True)),
    (Run("own", OWN, GRAPHS), Run("tensor", OPEN, GRAPHS, is_tensor_parallel=True)),
)


def import_everything() -> None:
    """What every engine needs, before ranks are forked; starts no CUDA context."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
    from vllm.model_executor.warmup import kernel_warmup
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    ModelRegistry.register_model("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM)  # else a subprocess imports all again
    kernel_warmup._warmup_ll_bf16_router_gemm = lambda: None  # twenty seconds, for routers of other models


@dataclass(frozen=True)
class Models:
    """Folders of checkpoints: the random model, the same with other weights, and tiny-moe."""

    random: Path
    other: Path
    tiny: Path = TINY_MOE

    @classmethod
    def write(cls, folder: Path, num_layers: int) -> None:
        """Make the first two in ``folder``."""
        write_neighbours(write_checkpoint(folder / "random", num_layers), folder / "other")


def serve_rank(run: Run, rank: int, port: int, models: Models, out: Path) -> None:
    """One rank of an engine, in a process of its own: writes ``<name>-<rank>.json`` and ``.log``."""
    log = os.open(out / f"{run.name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | rank_environment(run, rank, port)
    try:
        from vllm import LLM

        begin = time.monotonic()
        backend = "external_launcher" if run.is_tensor_parallel else "uni"
        split = {"tensor_parallel_size": RANKS, "compilation_config": NO_FUSED_ALLREDUCE}
        more = split if run.is_tensor_parallel else {}
        model = models.tiny if run.is_tiny else models.random
        llm = LLM(str(model), distributed_executor_backend=backend, **run.arguments, **more)
        answer: dict[str, Any] = {"start_s": time.monotonic() - begin}
        begin = time.monotonic()
        answer |= {"tokens": generate(llm, run, rank), "run_s": time.monotonic() - begin}
        write_answer(answer, out / f"{run.name}-{rank}.json")
        if run.reloads:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(models.other)})
            answer["reloaded"] = generate(llm, run, rank)
            write_answer(answer, out / f"{run.name}-{rank}.json")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)  # the answer is written; ending an engine in order takes long


def rank_environment(run: Run, rank: int, port: int) -> dict[str, str]:
    """How vLLM learns which rank a process is that it did not start."""
    if run.is_tensor_parallel:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    else:
        names = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": RANKS, "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
        names = {f"VLLM_DP_{name}": value for name, value in names.items()}
    return {name: str(value) for name, value in names.items()}


def generate(llm: Any, run: Run, rank: int) -> list[list[int]]:
    """Greedy tokens after this rank's prompts; tensor-parallel ranks all answer those of every rank.

    Batches of different sizes, so that ranks with requests of their own end at different times and idle.
    """
    from vllm import SamplingParams

    sampling, own = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), list[list[int]]()
    for asked in range(RANKS) if run.is_tensor_parallel else (rank,):
        for batch in (PROMPTS[asked::RANKS], [LONG] * (1 + 2 * asked), PROMPTS[:1]):
            answers = llm.generate(batch, sampling, use_tqdm=False)
            own += [list(answer.outputs[0].token_ids) for answer in answers] if asked == rank else []
    return own


def write_answer(answer: dict[str, Any], path: Path) -> None:
    """The file whole or not at all, since the process may be ended at any time."""
    path.with_suffix(".part").write_text(json.dumps(answer))
    path.with_suffix(".part").rename(path)


@dataclass
class Answer:
    """What an engine did: seconds to start, to answer, tokens a prompt of all ranks; or why it did not.

    ``reloaded`` are tokens after other weights were loaded, where that was asked for and went well.
    """

    start_s: float = 0.0
    run_s: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    reloaded: list[list[int]] = field(default_factory=list)
    error: str | None = None

    @classmethod
    def of(cls, name: str, out: Path) -> Answer:
        """From the files of the ranks."""
        files = [out / f"{name}-{rank}.json" for rank in range(RANKS)]
        if not all(file.exists() for file in files):
            logs = [out / f"{name}-{rank}.log" for rank in range(RANKS)]
            return cls(error="\n".join(f"-- {log.name}\n{excerpt(log)}" for log in logs if log.exists()))
        parts = [json.loads(file.read_text()) for file in files]
        start_s, run_s = (max(part[name] for part in parts) for name in ("start_s", "run_s"))
        tokens, reloaded = ([row for part in parts for row in part.get(name, [])] for name in ("tokens", "reloaded"))
        return cls(start_s, run_s, tokens, reloaded)


def run_group(group: Sequence[Run], models: Models, out: Path, limit_s: float) -> dict[str, Answer]:
    """The engines of a group, at the same time and for at most ``limit_s`` seconds."""
    fork, ranks = multiprocessing.get_context("fork"), list[BaseProcess]()
    for run in group:
        port = free_port()
        for rank in range(RANKS):
            ranks.append(fork.Process(target=serve_rank, args=(run, rank, port, models, out)))
            ranks[-1].start()
    end = time.monotonic() + limit_s
    for process in ranks:
        process.join(max(0.1, end - time.monotonic()))
        process.kill()
    return {run.name: Answer.of(run.name, out) for run in group}


def excerpt(log: Path, lines_shown: int = 45) -> str:
    """The end of a log, where an engine that failed has left its traceback."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", line)[:240] for line in lines[-lines_shown:])


def share(equal: Sequence[bool]) -> float:
    """Part that is true; 0 of nothing."""
    return sum(equal) / len(equal) if equal else 0.0


def verdict(tokens: Sequence[list[int]], stock: Sequence[list[int]]) -> str:
    """How many answers are those of stock vLLM."""
    pairs = list(zip(tokens, stock, strict=True))
    first, whole = share([a[0] == b[0] for a, b in pairs]), share([a == b for a, b in pairs])
    words = "as stock" if first >= ENOUGH_EQUAL else "NOT AS STOCK"
    return f"{words}: first tokens equal {first:.0%}, whole answers {whole:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of engines", default=[])
    parser.add_argument("--limit-s", type=float, default=90.0, help="of a group")
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    fork, answers = multiprocessing.get_context("fork"), dict[str, Answer]()
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(Path(scratch) / "random", Path(scratch) / "other")
        writer = fork.Process(target=Models.write, args=(Path(scratch), arguments.layers))
        writer.start()
        begin = time.monotonic()
        import_everything()
        writer.join()
        print(f"imported in {time.monotonic() - begin:.0f} s", flush=True)
        for group in GROUPS:
            runs = [run for run in group if not arguments.only or run.name in arguments.only]
            answers |= run_group(runs, models, arguments.out, arguments.limit_s)
            for run in runs:
                report(run, answers)
    return sum(answer.error is not None for answer in answers.values())


def report(run: Run, answers: dict[str, Answer]) -> None:
    """Print what became of an engine, beside the stock engine of its model if there was one."""
    answer, stock = answers[run.name], answers.get("tiny-stock" if run.is_tiny else "stock")
    if answer.error is not None:
        print(f"== {run.name}: FAILED\n{answer.error}", flush=True)
        return
    line = f"== {run.name}: started in {answer.start_s:.0f} s, {len(answer.tokens)} answers in {answer.run_s:.1f} s"
    if stock is not None and stock.tokens and run.options is not None:
        line += f"; {verdict(answer.tokens, stock.tokens)}"
        if run.reloads:
            is_there = len(answer.reloaded) == len(stock.reloaded) > 0
            line += f"; reloaded {verdict(answer.reloaded, stock.reloaded) if is_there else 'FAILED, see the log'}"
    elif answer.reloaded:
        line += (
            f"; {share([a == b for a, b in zip(answer.tokens, answer.reloaded, strict=True)]):.0%} as before a reload"
        )
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
