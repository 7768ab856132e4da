"""What rollout capture costs: throughput of vLLM with and without it, on two GPUs.

Method: three engines of one model with random weights share the GPUs, and are asked in turns, so that clocks and
neighbours are the same for all: ``off``; ``vllm flag``, which returns routed experts and keeps nothing; ``capture``,
the plugin's option, which turns the flag on, appends every request to a store and hands the response on behind it. A
round is the same requests for each engine: prompts of 128 tokens, outputs of 64 to 320, drawn evenly, asked by as many
clients as the engine runs at a time, each one after the other, without HTTP. The first round warms up. The order of
engines turns from round to round.

``rollout_tokens_per_s`` is output tokens over the seconds of a round, its median; ``rollout_overhead_pct`` the time
that an engine took more than another in the same round, its median. ``rollout_noise_pct`` is how far the seconds of
``off`` lie apart: (largest - smallest) / median. Afterwards the store is sealed, which checks every record.

Run: ``python -m benchmarks.bench_capture_rollout --out FOLDER`` (about 90 s on two GPUs, half of it for starting);
with ``--tiny --backend sticky`` a tiny model on a CPU, which shows that it runs and no more. Writes
FOLDER/capture_rollout.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import ResultRow, RunContext, cpu_name, print_table, write_results
from benchmarks.serving.backends import EngineSpec, Sizes, engine_spec
from benchmarks.serving.fleet import Fleet, running
from benchmarks.serving.models import MODELS
from megaflux_serve.capture import ReplayStore, seal

BENCH = "capture"
ENGINES = ("off", "vllm flag", "capture")
PAIRS = (("vllm flag", "off"), ("capture", "off"), ("capture", "vllm flag"))
PROMPT_TOKENS, OUTPUT_TOKENS = 128, (64, 320)
MIN_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Workload:
    """The requests of a round.

    Attributes:
        prompts: token ids.
        lengths: output tokens of each.
        num_clients: requests at a time.
    """

    prompts: list[list[int]]
    lengths: list[int]
    num_clients: int

    @classmethod
    def of(cls, num_requests: int, num_clients: int, vocabulary: int, prompt: int, output: tuple[int, int]) -> Workload:
        """Drawn from a fixed seed."""
        draw = np.random.default_rng(0)
        prompts = draw.integers(0, vocabulary, (num_requests, prompt)).tolist()
        return cls(prompts, draw.integers(output[0], output[1] + 1, num_requests).tolist(), num_clients)

    @property
    def num_outputs(self) -> int:
        """Output tokens of a round."""
        return sum(self.lengths)


def engines(spec: EngineSpec, store: Path) -> list[EngineSpec]:
    """One engine as ``spec`` says, and two that return routes.

    Args:
        spec: an engine without capture.
        store: where the third captures to.
    """
    common = {key: value for key, value in spec.arguments.items() if key != "scheduler_cls"}
    options = common.get("additional_config", {}).get("megaflux", {})
    captured = {"additional_config": {"megaflux": options | {"capture": str(store)}}}
    added: dict[str, dict[str, Any]] = {
        "off": {},
        "vllm flag": {"enable_return_routed_experts": True},
        "capture": captured,
    }
    return [
        dataclasses.replace(
            spec, name=name, arguments=common | added[name], log=spec.log.with_name(f"{name.replace(' ', '-')}.log")
        )
        for name in ENGINES
    ]


def measure(fleet: Fleet, work: Workload, seconds: float) -> dict[str, list[float]]:
    """Seconds of each engine in each round, for about ``seconds``; the warm-up is left out."""
    taken: dict[str, list[float]] = {name: [] for name in fleet.members}
    end, number = None, 0
    while end is None or number <= MIN_ROUNDS or time.monotonic() < end:
        names = list(taken)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            spent = fleet.members[name].call("rollouts", work.prompts, work.lengths, work.num_clients)
            print(f"round {number}, {name}: {spent:.3f} s, {work.num_outputs / spent:,.0f} tokens/s", flush=True)
            if number:
                taken[name].append(spent)
        end = end or time.monotonic() + seconds
        number += 1
    return taken


def rows_of(taken: Mapping[str, Sequence[float]], case: Mapping[str, Any], num_outputs: int) -> list[ResultRow]:
    """Result rows; an engine that did not start is left out of them."""
    rows = []
    for name, seconds in taken.items():
        row_case = {**case, "variant": name, "rounds": len(seconds)}
        rows.append(ResultRow(BENCH, row_case, "rollout_tokens_per_s", num_outputs / median(seconds), "1/s"))
    for name, other in PAIRS:
        if name in taken and other in taken:
            more = [100 * (mine / theirs - 1) for mine, theirs in zip(taken[name], taken[other], strict=True)]
            row_case = {**case, "variant": f"{name} over {other}", "rounds": len(more)}
            rows.append(ResultRow(BENCH, row_case, "rollout_overhead_pct", median(more), "%"))
    if off := taken.get("off"):
        noise = 100 * (max(off) - min(off)) / median(off)
        rows.append(ResultRow(BENCH, {**case, "variant": "off", "rounds": len(off)}, "rollout_noise_pct", noise, "%"))
    return rows


def check_store(folder: Path, num_records: int) -> None:
    """Seal what was captured; sealing reads and checks every record.

    Raises:
        ValueError: requests are missing.
    """
    window = seal(ReplayStore(folder), "all")
    if len(window) != num_records:
        raise ValueError(f"{len(window)} of {num_records} requests were recorded")
    print(f"sealed {len(window)} records of {int(window.lengths.sum()):,} tokens", flush=True)


def device_name(is_cpu: bool) -> str:
    """What rows say of the machine."""
    if is_cpu:
        return cpu_name()
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def main() -> None:
    """Start, measure, check, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="stock", help="a backend of benchmarks.serving")
    parser.add_argument("--layers", type=int, default=24, help="of Qwen3-30B-A3B's 48")
    parser.add_argument("--requests", type=int, default=512, help="of a round")
    parser.add_argument("--clients", type=int, default=256, help="requests at a time")
    parser.add_argument("--seconds", type=float, default=35.0, help="to measure, after the warm-up")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on a CPU, where only this project's backends return routes"
    )
    options = parser.parse_args()
    if options.tiny:
        model, sizes = MODELS["tiny"], Sizes(256, 8, is_cpu=True)
        work = Workload.of(16, 8, model.vocabulary, 16, (8, 32))
    else:
        model = dataclasses.replace(MODELS["qwen3-30b-a3b"], layers=options.layers)
        sizes = Sizes(8192, options.clients // 2, kv_cache_bytes=6 << 30)
        work = Workload.of(options.requests, options.clients, model.vocabulary, PROMPT_TOKENS, OUTPUT_TOKENS)
    with tempfile.TemporaryDirectory() as scratch:
        folder, store = Path(scratch), Path(scratch) / "store"
        spec = engine_spec(options.backend, model, model.write(folder), options.out / "logs", sizes)
        with running(engines(spec, store)) as fleet:
            taken = measure(fleet, work, options.seconds)
        if "capture" in taken:
            check_store(store, len(work.prompts) * (len(taken["capture"]) + 1))
    case = {
        "model": model.name,
        "layers": model.layers,
        "backend": options.backend,
        "ranks": spec.ranks,
        "requests": len(work.prompts),
        "clients": work.num_clients,
    }
    rows = rows_of(taken, case, work.num_outputs)
    context = RunContext.current(device_name(options.tiny), "torch", "vllm", "numpy", "pyarrow")
    write_results(options.out / "capture_rollout.json", rows, context)
    print_table(rows)


if __name__ == "__main__":
    main()
