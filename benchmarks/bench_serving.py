"""vLLM on two GPUs: prefill latency, decode, agreement with stock vLLM, a soak and a load over HTTP, in one run.

Engines start side by side (``--together`` at a time) and are measured in turns; ``docs/serving-benchmarks.md`` says
what is measured. Every part writes its result file as soon as it is done, so a run that is cut short keeps the rest.

    python -m benchmarks.bench_serving --out DIR                                    on two GPUs
    python -m benchmarks.bench_serving --out DIR --cpu --backends stock fixed sticky  dry run on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.cases import GPT_OSS
from benchmarks.harness import ResultRow, RunContext, cpu_name, print_table, read_results, write_results
from benchmarks.serving import agreement, load, rollout, soak
from benchmarks.serving.backends import BACKENDS, HANDS_OVER, NUM_RANKS, Sizes, engine_spec
from benchmarks.serving.decode import DecodeSamples
from benchmarks.serving.fleet import Fleet, running
from benchmarks.serving.models import MODELS, ServedModel
from benchmarks.serving.pictures import draw_prefill
from benchmarks.serving.prefill import PrefillCase, PrefillSamples
from benchmarks.serving.routes import ROUTINGS

PARTS = ("prefill", "decode", "agreement", "soak", "rollout", "load")
ENGINE_PARTS = PARTS[:-1]
"""Those that ask engines without HTTP."""

DECODE_BACKENDS = ("stock", "fixed", HANDS_OVER, "sticky")
"""Decode batches are too small to be skewed much: the other variants do what these do."""


class Run:
    """What a run measures, and its rows.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.sizes = Sizes(max_batch_tokens=max(options.chunks), max_requests=max(options.running), is_cpu=options.cpu)
        device = cpu_name() if options.cpu else _gpu_name()
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
        length = options.prompt_tokens
        cases = prefill_cases(options.batches, options.chunks, options.routings, options.controls)
        prefill = PrefillSamples(model, length)
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
            start = time.monotonic()
            with running([*specs, *captured]) as fleet:
                self._report(fleet)
                capturing = fleet.take([spec.name for spec in captured])
                if "prefill" in options.parts:
                    tables.join()
                    prefill.measure(fleet, cases, options.repeats)
                if "stock" in fleet.members:
                    self._beside_stock(fleet, model)
                    if captured:
                        self._rollout(Fleet(fleet.take(["stock"]).members | capturing.members), model, store)
            print(f"{model.name}, {' '.join(backends)}: {time.monotonic() - start:.0f} s in all", flush=True)
            self._keep(model, "prefill_latency", prefill.rows())

    def show(self) -> None:
        """Print all rows and draw the picture."""
        for bench in self.rows:
            print_table(self._all_rows(bench), bench)
        results = self.options.out / "prefill_latency.json"
        if results.exists():
            draw_prefill(results.with_suffix(".png"), read_results(results))

    def _beside_stock(self, fleet: Fleet, model: ServedModel) -> None:
        options = self.options
        if "decode" in options.parts:
            decode = DecodeSamples(model, options.decode_prompt_tokens, options.output_tokens)
            decode.measure(fleet, DECODE_BACKENDS, options.running, options.repeats, self.sizes.max_batch_tokens)
            self._keep(model, "decode", decode.rows())
        if "agreement" in options.parts:
            lengths = (options.decode_prompt_tokens // 8, options.decode_prompt_tokens)
            answers = agreement.measure(fleet, model, options.prompts, lengths, 32, self.sizes.max_requests)
            self._keep(model, "agreement", agreement.rows(model, answers))
        if "soak" in options.parts:
            lengths = (16, options.prompt_tokens)
            asked = soak.SoakLoad(options.soak_seconds, 64, lengths, options.output_tokens, min(options.chunks))
            self._keep(model, "soak", soak.measure(fleet, model, options.soak_backend, asked))

    def _rollout(self, fleet: Fleet, model: ServedModel, store: Path) -> None:
        options = self.options
        output = (options.output_tokens // 2, 2 * options.output_tokens)
        samples = rollout.RolloutSamples(
            model, NUM_RANKS * self.sizes.max_requests, options.decode_prompt_tokens, output
        )
        samples.measure(fleet, options.rollout_seconds)
        samples.check_store(store)
        self._keep(model, "capture_rollout", samples.rows())

    def _load(self, model: ServedModel, folder: Path) -> None:
        options = self.options
        asked = load.Load(options.load_prompts, options.load_concurrency, options.load_tokens, options.output_tokens)
        names = [name for name in options.backends if name in options.load_backends]
        self._keep(model, "serving_load", load.measure(names, model, folder, options.out / "logs", self.sizes, asked))

    def _report(self, fleet: Fleet) -> None:
        for backend, memory in fleet.each("call_workers", "benchmark_memory").items():
            shown = " ".join(f"{kind} {bytes_ / 2**30:.1f}" for kind, bytes_ in memory[0].items())
            print(f"  {backend}: GiB on rank 0: {shown}", flush=True)

    def _keep(self, model: ServedModel, bench: str, rows: Iterable[ResultRow]) -> None:
        """Put the rows of a model in place of those that it had, and write the file."""
        kept = list(rows)
        if kept:
            self.rows.setdefault(bench, {})[model.name] = kept
            write_results(self.options.out / f"{bench}.json", self._all_rows(bench), self.context)

    def _all_rows(self, bench: str) -> list[ResultRow]:
        return list(itertools.chain.from_iterable(self.rows[bench].values()))


def prefill_cases(
    batches: Sequence[int], chunks: Sequence[int], routings: Sequence[str], controls: Sequence[str]
) -> list[PrefillCase]:
    """Every combination; of a routing that is a control, only the middle batch at the largest budget."""
    cases = [PrefillCase(*case) for case in itertools.product(batches, chunks, routings)]
    control = (sorted(batches)[len(batches) // 2], max(chunks))
    return [case for case in cases if case.routing not in controls or (case.batch, case.chunk) == control]


def _groups(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def _gpu_name() -> str:
    """The GPUs, asked of the driver: this process must not hold a context on them."""
    import pynvml

    pynvml.nvmlInit()
    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    pynvml.nvmlShutdown()
    return f"{NUM_RANKS} x {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--layers", type=int, help="instead of the model's number of layers")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--together", type=int, default=len(BACKENDS), help="engines at the same time")
    parser.add_argument("--parts", nargs="+", default=["prefill"], choices=PARTS)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--chunks", nargs="+", type=int, default=[16384, 32768])
    parser.add_argument("--routings", nargs="+", default=list(ROUTINGS), choices=ROUTINGS)
    parser.add_argument("--controls", nargs="*", default=["balanced"], choices=ROUTINGS, help="measured in one case")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--running", nargs="+", type=int, default=[1, 8, 32, 128], help="running requests of decode")
    parser.add_argument("--decode-prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=129)
    parser.add_argument("--prompts", type=int, default=256, help="prompts of the agreement")
    parser.add_argument("--soak-seconds", type=float, default=60)
    parser.add_argument("--soak-backend", default="sticky", choices=BACKENDS)
    parser.add_argument("--rollout-seconds", type=float, default=30, help="of rollouts, after a round that warms up")
    parser.add_argument("--load-backends", nargs="+", default=["stock", "sticky"], choices=BACKENDS)
    parser.add_argument("--load-prompts", type=int, default=256, help="requests of the load over HTTP")
    parser.add_argument("--load-concurrency", type=int, default=64)
    parser.add_argument("--load-tokens", type=int, default=2048, help="of a prompt")
    parser.add_argument("--cpu", action="store_true", help="dry run: the tiny model, small sizes")
    options = parser.parse_args()
    if options.cpu:
        options.models, options.prompt_tokens, options.chunks = ["tiny"], 60, [64, 128]
        options.running, options.decode_prompt_tokens, options.output_tokens = [1, 4, 8], 16, 65
        options.prompts, options.soak_seconds = 16, min(options.soak_seconds, 10)
        options.load_prompts, options.load_concurrency, options.load_tokens = 16, 4, 48
    if not GPT_OSS.is_file() and set(options.routings) - {"balanced"}:
        print(f"real routings are left out: no {GPT_OSS} (set MEGAFLUX_TRACES)", flush=True)
        options.routings = ["balanced"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended then, too
    run = Run(options)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models or ["qwen3-30b-a3b", "deepseek-v3-like"]:
            model = MODELS[name]
            model = dataclasses.replace(model, layers=options.layers) if options.layers else model
            run.measure(model, Path(scratch))
    run.show()


if __name__ == "__main__":
    main()
