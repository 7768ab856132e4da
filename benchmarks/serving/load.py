"""A load of concurrent requests over HTTP: ``vllm serve`` of each backend under ``vllm bench serve``.

Decides the servers and the load. Servers start side by side, and how long they take until they have answered a first
request is measured too; then they are loaded one after the other, while the others wait. Routers choose for themselves,
and who computes small batches is left to the backend, as users leave it. Text needs a tokenizer, which the models of
these benchmarks do not have: they take the tiny model's and its vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Plain, ResultRow
from benchmarks.serving.backends import EngineSpec, Sizes, engine_spec
from benchmarks.serving.models import ServedModel

BENCH = "serving_load"
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
VOCABULARY = 1024
START_TIMEOUT_S, LOAD_TIMEOUT_S, STOP_TIMEOUT_S = 240.0, 120.0, 10.0
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]

METRICS = {
    "median_ttft_ms": "ms",
    "p99_ttft_ms": "ms",
    "median_tpot_ms": "ms",
    "request_throughput": "1/s",
    "total_token_throughput": "1/s",
}
"""What is kept of the result of ``vllm bench serve``, with units."""


@dataclass(frozen=True)
class Load:
    """What ``vllm bench serve`` asks, as soon as a place is free.

    Attributes:
        prompts: requests in all.
        concurrency: at a time.
        input_tokens, output_tokens: of a request; inputs vary by a quarter.
    """

    prompts: int
    concurrency: int
    input_tokens: int
    output_tokens: int


def measure(
    backends: Sequence[str], model: ServedModel, folder: Path, logs: Path, sizes: Sizes, load: Load
) -> Iterator[ResultRow]:
    """Rows of every server that starts; why one does not is printed.

    Args:
        backends: of ``backends.BACKENDS``.
        model: to serve.
        folder: for the configuration.
        logs: for what servers and clients print.
        sizes: limits of the servers.
        load: the same for all.
    """
    text_model = dataclasses.replace(model, vocabulary=VOCABULARY)
    checkpoint = text_model.write(folder / "text")
    with ExitStack() as stack:
        specs = [
            engine_spec(name, text_model, checkpoint, logs / "http", sizes, says_min_tokens=False) for name in backends
        ]
        servers = [(spec, stack.enter_context(server(spec))) for spec in specs]
        waiting = stack.enter_context(ThreadPoolExecutor(len(servers)))
        starts = [waiting.submit(seconds_to_first_answer, url, checkpoint) for _, url in servers]
        for (spec, url), start in zip(servers, starts, strict=True):
            if (seconds := start.result()) is None:
                print(f"LEFT OUT: the {spec.name} server did not start, see {spec.log}", file=sys.stderr, flush=True)
                continue
            case: dict[str, Plain] = {"model": model.name, "layers": model.layers, "backend": spec.name}
            yield ResultRow(BENCH, case, "first_answer_s", seconds, "s")
            result = ask(url, checkpoint, load, spec)
            for metric, unit in METRICS.items():
                yield ResultRow(BENCH, case | dataclasses.asdict(load), metric, float(result[metric]), unit)


def flags(arguments: dict[str, Any]) -> Iterator[str]:
    """Arguments of ``AsyncEngineArgs`` as ``vllm serve`` takes them."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}"
            yield json.dumps(value) if isinstance(value, dict) else str(value)


@contextmanager
def server(spec: EngineSpec) -> Iterator[str]:
    """The URL of a ``vllm serve`` that is starting; it is stopped at the end with all its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = {k: v for k, v in spec.arguments.items() if k not in ("model", "skip_tokenizer_init")}
    arguments |= {"tokenizer": TOKENIZER, "host": "127.0.0.1", "port": port, "api_server_count": 1}
    command = [*VLLM, "serve", spec.arguments["model"], *flags(arguments)]
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with spec.log.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | spec.environment, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}"
    except BaseException:  # a time limit, too: leave nothing on the GPUs
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(STOP_TIMEOUT_S)


def seconds_to_first_answer(url: str, checkpoint: Path) -> float | None:
    """Seconds from now until a server that is starting has answered a short request; None if it does not start."""
    begin = time.monotonic()
    body = {"model": str(checkpoint), "prompt": [1, 2, 3, 4, 5, 6, 7, 8], "max_tokens": 2, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    while time.monotonic() - begin < START_TIMEOUT_S:
        with suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
            return time.monotonic() - begin
        time.sleep(0.1)
    return None


def ask(url: str, checkpoint: Path, load: Load, spec: EngineSpec) -> dict[str, Any]:
    """What ``vllm bench serve`` measured.

    Raises:
        subprocess.SubprocessError: it failed or took too long; its log stands beside the server's.
    """
    result = spec.log.with_suffix(".json")
    arguments = {
        "backend": "vllm",
        "base_url": url,
        "model": checkpoint,
        "tokenizer": TOKENIZER,
        "dataset_name": "random",
        "random_input_len": load.input_tokens,
        "random_output_len": load.output_tokens,
        "random_range_ratio": 0.25,
        "num_prompts": load.prompts,
        "max_concurrency": load.concurrency,
        "num_warmups": load.concurrency,
        "temperature": 0,
        "percentile_metrics": "ttft,tpot",
        "metric_percentiles": "99",
        "result_dir": result.parent,
        "result_filename": result.name,
    }
    command = [*VLLM, "bench", "serve", *flags(arguments), "--ignore-eos", "--save-result"]
    with spec.log.with_suffix(".client.log").open("wb") as log:
        subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | spec.environment,
            timeout=LOAD_TIMEOUT_S,
            check=True,
        )
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured
