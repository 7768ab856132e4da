"""What the routes of running requests cost vLLM's processes a step: sent with every token, or held until the end.

An engine core packs the outputs of a step into one message, and the front end unpacks it. Method: a step of decode, in
which each of the running requests gives one token; routes of 24 layers, top-8, as the scheduler attaches them. Packed
and unpacked by vLLM's own encoder and decoder, in one thread; medians of 200, after 20 that warm up. ``hold`` is what
``megaflux_vllm.held_routes`` does with the outputs in between.

Run: ``python -m benchmarks.bench_route_messages`` (seconds, no GPU); writes results/route_messages.json.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from megaflux_vllm.held_routes import HeldRoutes

from benchmarks.harness import RESULTS, Plain, ResultRow, RunContext, cpu_name, print_table, write_results

BENCH = "route_messages"
LAYERS, TOP_K, EXPERTS = 24, 8, 128
RUNNING = (64, 256, 1024)
WARM_UP, TIMED = 20, 200


def median_us(call: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    """Median microseconds of a call, ``prepare`` before each left out."""
    samples = []
    for _ in range(WARM_UP + TIMED):
        prepare()
        begin = perf_counter()
        call()
        samples.append(perf_counter() - begin)
    return 1e6 * float(np.median(samples[WARM_UP:]))


def measure(running: int) -> list[ResultRow]:
    """Packing, unpacking and holding for so many running requests."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    routes = np.random.default_rng(0).integers(0, EXPERTS, (running, LAYERS, TOP_K), dtype=np.uint8)
    names = [f"request-{i}" for i in range(running)]
    step = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=name, new_token_ids=[1]) for name in names])
    encoder, decoder, held = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), HeldRoutes()
    alive = {name: SimpleNamespace(sampling_params=SimpleNamespace(stop=[])) for name in names}

    def attach() -> None:
        for i, output in enumerate(step.outputs):
            output.routed_experts = routes[i : i + 1]

    def hold() -> None:
        held.forget_all_but(alive)
        held.pass_on(step.outputs, alive)

    rows = []
    for variant, prepare in (("held", hold), ("with every token", attach)):
        prepare()
        message = [bytes(part) for part in encoder.encode(step)]
        at: dict[str, Plain] = {"running": running, "layers": LAYERS, "top_k": TOP_K, "variant": variant}
        rows.append(ResultRow(BENCH, at, "pack_us", median_us(lambda: encoder.encode(step)), "us"))
        rows.append(ResultRow(BENCH, at, "unpack_us", median_us(lambda: decoder.decode(message)), "us"))  # noqa: B023
        if variant == "held":
            rows.append(ResultRow(BENCH, at, "hold_us", median_us(hold, attach), "us"))
    return rows


def main() -> None:
    """Measure, print and write."""
    rows = [row for running in RUNNING for row in measure(running)]
    write_results(RESULTS / f"{BENCH}.json", rows, RunContext.current(cpu_name(), "vllm", "msgspec", "numpy"))
    print_table(rows, BENCH)


if __name__ == "__main__":
    main()
