"""Prefill latency in SGLang on two GPUs: its own backends and ours, started side by side and measured in turns.

Workloads, routes and rows are those of ``prefill_latency``; ``docs/sglang.md`` says what differs. Backends:

* ``stock``: SGLang with data-parallel attention and expert parallelism (Triton's kernels), as the variants of ours.
* ``stock-tp``: with tensor-parallel attention and expert parallelism.
* ``fixed``, ``pipelined``, ``sticky``: ours without replica slots; with copies for every batch; with copies that stay.

    python -m benchmarks.bench_sglang_prefill --out DIR           on two GPUs
    python -m benchmarks.bench_sglang_prefill --out DIR --cpu     dry run on a CPU, tiny sizes
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.cases import GPT_OSS
from benchmarks.entry_points import write_dist_info, write_metadata
from benchmarks.harness import ResultRow, RunContext, cpu_name, print_table, write_results
from benchmarks.serving.backends import megaflux_options
from benchmarks.serving.fleet import Fleet
from benchmarks.serving.models import MODELS, ServedModel
from benchmarks.serving.prefill import PrefillCase, PrefillSamples
from benchmarks.serving.routes import ROUTINGS, trace_prompts
from benchmarks.serving.sglang_fleet import ServerSpec, running

BENCH = "sglang_prefill"
BACKENDS = ("stock", "stock-tp", "fixed", "sticky", "pipelined")
MEGAFLUX = ("--moe-a2a-backend", "megaflux", "--moe-runner-backend", "megaflux")
DATA_PARALLEL = (
    "--dp-size",
    "2",
    "--enable-dp-attention",
    "--enable-dp-lm-head",
    "--load-balance-method",
    "round_robin",
)
ON_GPU = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.8"),
    *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),  # both may use NVLink multicast
    *("--cuda-graph-max-bs-decode", "16", "--disable-prefill-cuda-graph"),  # a captured prefill keeps its own routes
)
ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--mem-fraction-static", "0.6"),
)
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
PORTS_A_SERVER = 500


def server_spec(backend: str, index: int, model: ServedModel, options: argparse.Namespace, port: int) -> ServerSpec:
    """The server of a backend.

    Args:
        backend: one of ``BACKENDS``.
        index: of the server, for its ports.
        model: to serve.
        options: of the command line.
        port: of the first server.
    """
    work: Path = options.out / "work"
    flags = ["--model-path", str(work / model.name), "--load-format", "dummy", "--skip-tokenizer-init"]
    flags += ["--tp-size", "2", "--disable-radix-cache", "--skip-server-warmup"]
    flags += ["--chunked-prefill-size", str(options.chunk), "--max-prefill-tokens", str(options.chunk)]
    flags += ["--max-total-tokens", str(options.cache_tokens), "--max-running-requests", "64"]
    flags += ON_CPU if options.cpu else ON_GPU
    if backend != "stock-tp":
        flags += DATA_PARALLEL
    is_stock, ours = backend.startswith("stock"), None
    if not (is_stock and options.cpu):  # stock SGLang cannot spread experts over CPU processes
        flags += ["--ep-size", "2"]
    if is_stock:
        flags += () if options.cpu else ("--moe-runner-backend", "triton")
    else:
        flags += MEGAFLUX
        ours = megaflux_options(backend, model, 2) | (
            {"block_rows": 16} if options.cpu else {"executor": "megakernel", "timeout_s": 20}
        )
    folder = work / f"{model.name}-{backend}"
    return ServerSpec(backend, tuple(flags), ours, port + index * PORTS_A_SERVER, folder, 1 if ours is None else 2)


def measure(model: ServedModel, options: argparse.Namespace, environment: dict[str, str]) -> Iterator[ResultRow]:
    """Start all backends, compare their tokens, and time them."""
    work: Path = options.out / "work"
    model.write(work)
    port = free_port()
    specs = [server_spec(backend, i, model, options, port) for i, backend in enumerate(options.backends)]
    cases = [PrefillCase(batch, options.chunk, routing) for routing in options.routings for batch in options.batches]
    samples = PrefillSamples(model, options.prompt_tokens, stray_rows=8)
    with running(specs, environment, options.start_s, lambda: samples.prepare(options.routings, work)) as fleet:
        yield from agreement(fleet, model)
        samples.measure(fleet, cases, options.repeats)
    yield from (dataclasses.replace(row, bench=BENCH) for row in samples.rows())


def agreement(fleet: Fleet, model: ServedModel) -> Iterator[ResultRow]:
    """The share of short prompts whose first greedy token, by the model's own router, is that of stock SGLang."""
    first = fleet.each("complete", trace_prompts(model, 16, 32), 1)
    for backend in first.keys() - {"stock"} if "stock" in first else ():
        equal = float(np.mean([a == b for a, b in zip(first[backend], first["stock"], strict=True)]))
        print(f"  {backend}: {100 * equal:.0f} % of {len(first[backend])} first tokens equal stock's", flush=True)
        yield ResultRow(BENCH, {"model": model.name, "backend": backend}, "first_tokens_equal", equal, "1")


def free_port() -> int:
    """A port with enough room above it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return 20000 + int(probe.getsockname()[1]) % 10000


def plugin_metadata(folder: Path) -> Path:
    """Have SGLang find this project's plugin and the benchmark's own, in processes with ``folder`` on PYTHONPATH."""
    write_metadata(folder)
    entry = {"megaflux_benchmark": "benchmarks.serving.sglang_routes:register"}
    write_dist_info(folder, "megaflux-benchmark", "0", {"sglang.srt.plugins": entry})
    return folder


def gpu_name() -> str:
    """The GPUs, asked of the driver: this process must not hold a context on them."""
    import pynvml

    pynvml.nvmlInit()
    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    pynvml.nvmlShutdown()
    return f"2 x {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results, logs and work files")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-30b-a3b"])
    parser.add_argument("--layers", type=int, help="instead of the model's number of layers")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS[:4]), choices=BACKENDS)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--chunk", type=int, default=32768, help="tokens a step, over both ranks")
    parser.add_argument("--cache-tokens", type=int, default=140000)
    parser.add_argument("--routings", nargs="+", default=list(ROUTINGS), choices=ROUTINGS)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--start-s", type=float, default=200, help="time for all servers to start")
    parser.add_argument("--cpu", action="store_true", help="dry run: the tiny model, small sizes")
    options = parser.parse_args()
    places = (os.environ.get("PYTHONPATH"), str(plugin_metadata(options.out / "work" / "metadata").absolute()))
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    if options.cpu:
        options.models, options.prompt_tokens, options.chunk, options.cache_tokens = ["tiny"], 60, 128, 4096
        environment |= {"SGLANG_PLATFORM": "plain_cpu", "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    if not GPT_OSS.is_file() and set(options.routings) - {"balanced"}:
        print(f"real routings are left out: no {GPT_OSS} (set MEGAFLUX_TRACES)", flush=True)
        options.routings = ["balanced"]
    context = RunContext.current(cpu_name() if options.cpu else gpu_name(), "torch", "sglang", "numpy")
    rows: list[ResultRow] = []
    for name in options.models:
        model = MODELS[name]
        model = dataclasses.replace(model, layers=options.layers) if options.layers else model
        rows += measure(model, options, environment)
        write_results(options.out / f"{BENCH}.json", rows, context)
    print_table(rows, BENCH)
    print(json.dumps({"rows": len(rows)}))


if __name__ == "__main__":
    main()
