"""vLLM on two or more GPUs: agreement with stock vLLM, decode, prefill latency, a soak, a load over HTTP, in one run.

Engines start side by side (``--together`` at a time) and are measured in turns; ``docs/serving-benchmarks.md`` says
what is measured. Every case is written to its result file as soon as it is done, so a run that is cut short keeps the
rest; with ``--deadline-s`` it ends by itself.

    python -m benchmarks.bench_serving --out DIR --ranks 2                            on two GPUs
    python -m benchmarks.bench_serving --out DIR --cpu --backends stock fixed sticky  dry run on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.cases import GPT_OSS
from benchmarks.harness import ResultRow, RunContext, cpu_name, print_table, read_results, write_results
from benchmarks.serving import agreement, load, rollout, soak
from benchmarks.serving.backends import BACKENDS, HANDS_OVER, Sizes, engine_spec
from benchmarks.serving.decode import DecodeSamples
from benchmarks.serving.fleet import Fleet, Member, TimeLimits, running
from benchmarks.serving.models import MODELS, ServedModel
from benchmarks.serving.pictures import draw_prefill
from benchmarks.serving.prefill import PrefillCase, PrefillSamples
from benchmarks.serving.progress import say
from benchmarks.serving.routes import ROUTINGS, trace_prompts

ENGINE_PARTS = ("agreement", "decode", "prefill", "soak", "rollout")
PARTS = (*ENGINE_PARTS, "load")
"""The last one asks servers over HTTP, the others engines."""

DECODE_BACKENDS = ("stock", "fixed", HANDS_OVER, "sticky")
"""Decode batches are too small to be skewed much: the other variants do what these do."""

AGREEMENT_TOKENS, SOAK_CLIENTS = 32, 64


class DeadlineError(BaseException):
    """The run has had its time; no handler of ordinary errors may swallow it."""


class Run:
    """What a run measures, and its rows.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.sizes = Sizes(
            max_batch_tokens=max(options.chunks),
            max_requests=max(options.running),
            kv_cache_tokens=options.kv_cache_tokens,
            is_compiled=options.compile,
            is_cpu=options.cpu,
            num_ranks=options.ranks,
        )
        device = cpu_name() if options.cpu else f"{options.ranks} x {_gpu_name()}"
        self.context = RunContext.current(device, "torch", "vllm", "numpy")
        self.rows: dict[str, dict[str, list[ResultRow]]] = {}

    def measure(self, model: ServedModel, folder: Path) -> None:
        """All parts for one model, engines in groups; parts that compare with stock are measured in its group.

        Args:
            model: to serve.
            folder: for its configuration and its tables of routes.
        """
        options = self.options
        checkpoint = model.write(folder)
        prefill = PrefillSamples(model, options.prompt_tokens, options.ranks)
        tables = threading.Thread(target=prefill.prepare, args=(options.routings, folder))
        if "prefill" in options.parts:
            tables.start()  # while engines start
        if "load" in options.parts:
            self._load(model, folder)
        engines = options.backends if set(options.parts) & set(ENGINE_PARTS) else []
        for backends in _groups(engines, options.together):
            specs = [engine_spec(name, model, checkpoint, options.out / "logs", self.sizes) for name in backends]
            store, captured = folder / "replay", []
            if "rollout" in options.parts and "stock" in backends:
                captured = rollout.engines(specs[backends.index("stock")], store)
            begin = time.monotonic()
            limits = TimeLimits(options.start_s, options.others_s, options.call_s)
            with running([*specs, *captured], limits, lambda member: self._warm_up(member, model)) as fleet:
                self._report(fleet)
                capturing = fleet.take([spec.name for spec in captured])
                for part in options.parts:
                    if part == "prefill":
                        tables.join()
                        self._prefill(fleet, prefill)
                    elif "stock" in fleet.members:
                        self._beside_stock(part, fleet, model)
                if captured and "stock" in fleet.members:
                    self._rollout(Fleet(fleet.take(["stock"]).members | capturing.members), model, store)
            say(f"{model.name}, {' '.join(backends)}: {time.monotonic() - begin:.0f} s in all")

    def show(self) -> None:
        """Print all rows and draw the picture."""
        for bench in self.rows:
            print_table(self._all_rows(bench), bench)
        results = self.options.out / "prefill_latency.json"
        if "prefill_latency" in self.rows:
            draw_prefill(results.with_suffix(".png"), read_results(results))

    def _warm_up(self, member: Member, model: ServedModel) -> None:
        """Have an engine compile what it compiles when a kind of batch first occurs."""
        options = self.options
        for chunk in options.chunks if "prefill" in options.parts else ():
            member.call("batch_seconds", trace_prompts(model, 8, options.prompt_tokens), 1, chunk)
        for requests in options.running if "decode" in options.parts else ():
            prompts = trace_prompts(model, requests, options.decode_prompt_tokens)
            member.call("batch_seconds", prompts, 3, self.sizes.max_batch_tokens)
        say(f"{member.name}: warm")

    def _prefill(self, fleet: Fleet, prefill: PrefillSamples) -> None:
        options = self.options
        cases = prefill_cases(options.batches, options.chunks, options.routings, options.controls)
        prefill.measure(
            fleet, cases, options.repeats, lambda: self._keep(prefill.model, "prefill_latency", prefill.rows())
        )

    def _beside_stock(self, part: str, fleet: Fleet, model: ServedModel) -> None:
        options = self.options
        if part == "decode":
            decode = DecodeSamples(model, options.decode_prompt_tokens, options.output_tokens)
            decode.measure(
                *(fleet, DECODE_BACKENDS, options.running, options.repeats, self.sizes.max_batch_tokens),
                after=lambda: self._keep(model, "decode", decode.rows()),
            )
        if part == "agreement":
            lengths = (options.decode_prompt_tokens // 8, options.decode_prompt_tokens)
            answers = agreement.measure(
                fleet, model, options.prompts, lengths, AGREEMENT_TOKENS, self.sizes.max_requests
            )
            self._keep(model, "agreement", agreement.rows(model, answers))
        if part == "soak":
            lengths = (16, options.prompt_tokens)
            asked = soak.SoakLoad(
                options.soak_seconds, SOAK_CLIENTS, lengths, options.output_tokens, min(options.chunks)
            )
            self._keep(model, "soak", soak.measure(fleet, model, options.soak_backend, asked))

    def _rollout(self, fleet: Fleet, model: ServedModel, store: Path) -> None:
        options = self.options
        output = (options.output_tokens // 2, 2 * options.output_tokens)
        num_requests = fleet.members["stock"].spec.ranks * self.sizes.max_requests
        samples = rollout.RolloutSamples(model, num_requests, options.decode_prompt_tokens, output)
        samples.measure(fleet, options.rollout_seconds, self.sizes.max_batch_tokens, store)
        self._keep(model, "capture_rollout", samples.rows())

    def _load(self, model: ServedModel, folder: Path) -> None:
        options = self.options
        asked = load.Load(options.load_prompts, options.load_concurrency, options.load_tokens, options.output_tokens)
        names = [name for name in options.backends if name in options.load_backends]
        self._keep(model, "serving_load", load.measure(names, model, folder, options.out / "logs", self.sizes, asked))

    def _report(self, fleet: Fleet) -> None:
        for backend, memory in fleet.each("call_workers", "benchmark_memory").items():
            shown = " ".join(f"{kind} {bytes_ / 2**30:.1f}" for kind, bytes_ in memory[0].items())
            say(f"{backend}: GiB on rank 0: {shown}")
        for backend, member in fleet.members.items():
            text = member.spec.log.read_text(errors="replace")
            for line in re.findall(r"megaflux: executor.*|gate: .*", text)[:2]:
                say(f"{backend}: {line}")

    def _keep(self, model: ServedModel, bench: str, rows: Iterable[ResultRow]) -> None:
        """Put the rows of a model in place of those that it had, and write the file."""
        mode = {"compiled": self.sizes.is_compiled, "ranks": self.sizes.num_ranks}
        kept = [dataclasses.replace(row, case={**row.case, **mode}) for row in rows]
        if kept:
            self.rows.setdefault(bench, {})[model.name] = kept
            write_results(self.options.out / f"{bench}.json", self._all_rows(bench), self.context)
            say(f"{bench}: {len(kept)} rows of {model.name} are written")

    def _all_rows(self, bench: str) -> list[ResultRow]:
        return list(itertools.chain.from_iterable(self.rows[bench].values()))


def prefill_cases(
    batches: Sequence[int], chunks: Sequence[int], routings: Sequence[str], controls: Sequence[str]
) -> list[PrefillCase]:
    """Every combination, budget by budget; of a routing that is a control, the middle batch at the first budget."""
    control = (sorted(batches)[len(batches) // 2], chunks[0])
    return [
        PrefillCase(batch, chunk, routing)
        for chunk, routing, batch in itertools.product(chunks, routings, batches)
        if routing not in controls or (batch, chunk) == control
    ]


def _groups(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def _gpu_name() -> str:
    """The first GPU, asked of the driver: this process must not hold a context on it."""
    import pynvml

    pynvml.nvmlInit()
    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    pynvml.nvmlShutdown()
    return str(name)


def main() -> None:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended then, too
    if options.deadline_s is not None:
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, options.deadline_s)
    if not GPT_OSS.is_file() and set(options.routings) - {"balanced"}:
        say(f"real routings are left out: no {GPT_OSS} (set MEGAFLUX_TRACES)")
        options.routings = ["balanced"]
    run = Run(options)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for name in options.models or ["qwen3-30b-a3b", "deepseek-v3-like"]:
                model = MODELS[name]
                model = dataclasses.replace(model, layers=options.layers) if options.layers else model
                run.measure(model, Path(scratch))
    except DeadlineError:
        say("the time is up; what was measured is kept")
    run.show()


def _end(number: int, frame: FrameType | None) -> None:
    raise DeadlineError


def parse_options() -> argparse.Namespace:
    """The command line; ``--cpu`` puts small sizes in place of those that a CPU could not serve."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for results and logs")
    add("--models", nargs="+", choices=MODELS)
    add("--ranks", type=int, default=2, help="GPUs, one a rank")
    add("--layers", type=int, help="instead of the model's number of layers")
    add("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    add("--together", type=int, default=len(BACKENDS), help="engines at the same time")
    add("--compile", action="store_true", help="vLLM's default mode, with torch.compile")
    add("--start-s", type=float, default=240, help="the longest wait for the first engine")
    add("--others-s", type=float, default=120, help="and then for the others")
    add("--call-s", type=float, default=60, help="the longest wait for an answer of an engine")
    add("--deadline-s", type=float, help="end by then, with what was measured")
    add("--parts", nargs="+", default=["prefill"], choices=PARTS, help="in this order")
    add("--batches", nargs="+", type=int, default=[8, 16, 32])
    add("--chunks", nargs="+", type=int, default=[16384, 32768])
    add("--routings", nargs="+", default=list(ROUTINGS), choices=ROUTINGS)
    add("--controls", nargs="*", default=["balanced"], choices=ROUTINGS, help="measured in one case")
    add("--prompt-tokens", type=int, default=8192)
    add("--kv-cache-tokens", type=int, default=131072, help="of a rank's cache")
    add("--repeats", type=int, default=3)
    add("--running", nargs="+", type=int, default=[1, 8, 32, 128], help="running requests of decode")
    add("--decode-prompt-tokens", type=int, default=128)
    add("--output-tokens", type=int, default=129)
    add("--prompts", type=int, default=256, help="prompts of the agreement")
    add("--soak-seconds", type=float, default=60)
    add("--soak-backend", default="sticky", choices=BACKENDS)
    add("--rollout-seconds", type=float, default=30, help="of rollouts, after a round that warms up")
    add("--load-backends", nargs="+", default=["stock", "sticky"], choices=BACKENDS)
    add("--load-prompts", type=int, default=256, help="requests of the load over HTTP")
    add("--load-concurrency", type=int, default=64)
    add("--load-tokens", type=int, default=2048, help="of a prompt")
    add("--cpu", action="store_true", help="dry run: the tiny model, small sizes")
    options = parser.parse_args()
    if options.cpu:
        options.models, options.prompt_tokens, options.chunks = ["tiny"], 60, [64, 128]
        options.running, options.decode_prompt_tokens, options.output_tokens = [1, 4, 8], 16, 65
        options.prompts, options.soak_seconds = 16, min(options.soak_seconds, 10)
        options.load_prompts, options.load_concurrency, options.load_tokens = 16, 4, 48
    return options


if __name__ == "__main__":
    main()
