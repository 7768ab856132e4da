"""What routes cost vLLM's scheduler and its messages in a step of decode: as vLLM does it, and with capture.

* ``messages``: an engine core packs the outputs of a step into one message, and the front end unpacks it. Each of the
  running requests gives one token, with routes of 24 layers, top-8, as the scheduler attaches them. vLLM's own encoder
  and decoder, in one thread. With capture the rows are held before (``hold_us``), and the message has none.
* ``blocks``: the scheduler lists the cache blocks of every running request, 16 tokens each, by vLLM's own method; with
  capture, of those that have given no token yet, here none.

Medians of 200, after 20 that warm up; what the two hooks of ``megaflux_vllm.engine_routes`` do is run as it is.

Run: ``python -m benchmarks.bench_engine_routes`` (seconds, no GPU); writes results/engine_routes.json.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from megaflux_vllm.capture import ROUTES_NOT_ASKED_FOR
from megaflux_vllm.engine_routes import WRAPPERS, HeldRoutes

from benchmarks.harness import RESULTS, Plain, ResultRow, RunContext, cpu_name, print_table, write_results

BENCH = "engine_routes"
LAYERS, TOP_K, EXPERTS, BLOCK_TOKENS = 24, 8, 128, 16
RUNNING, TOKENS = (64, 256, 1024), (256, 2048, 8192, 32768)
LISTED = 256
"""Running requests whose blocks are listed."""
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


def messages(running: int) -> list[ResultRow]:
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

    def row(variant: str, metric: str, value: float) -> ResultRow:
        at: dict[str, Plain] = {"running": running, "layers": LAYERS, "top_k": TOP_K, "variant": variant}
        return ResultRow(BENCH, at, metric, value, "us")

    rows = [row("capture", "hold_us", median_us(hold, attach))]
    for variant, prepare in (("capture", hold), ("vllm", attach)):
        prepare()
        message = [bytes(part) for part in encoder.encode(step)]
        rows.append(row(variant, "pack_us", median_us(partial(encoder.encode, step))))
        rows.append(row(variant, "unpack_us", median_us(partial(decoder.decode, message))))
    return rows


class Scheduler:
    """The part of vLLM's that lists blocks; as in 0.26 to 0.30.

    Args:
        tokens: of every running request, all in decode.
        **config: attributes of its configuration.
    """

    def __init__(self, tokens: int, **config: bool) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        names = [f"request-{i}" for i in range(LISTED)]
        blocks = {name: KVCacheBlocks(([KVCacheBlock(i) for i in range(tokens // BLOCK_TOKENS)],)) for name in names}
        self.vllm_config = SimpleNamespace(**config)
        self.enable_return_routed_experts = True
        self.routed_experts_mgr = SimpleNamespace(attn_gid=0)
        self.requests = {name: SimpleNamespace(num_output_tokens=1) for name in names}
        self.kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: blocks[name].get_block_ids())
        self.scheduled = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))
        self._re_block_ids: dict[str, list[int]] = {}

    def update_after_schedule(self, scheduler_output: Any) -> None:
        """Lists the blocks, and does nothing else of what vLLM's does."""
        if self.enable_return_routed_experts:
            ids = self.kv_cache_manager.get_block_ids
            self._re_block_ids.update({name: ids(name)[0] for name in scheduler_output.num_scheduled_tokens})


def blocks(tokens: int) -> list[ResultRow]:
    """Listing the blocks of requests of so many tokens."""
    plain, hooked = Scheduler(tokens), Scheduler(tokens, **{ROUTES_NOT_ASKED_FOR: True})
    update = WRAPPERS["_update_after_schedule"](Scheduler.update_after_schedule)
    at: dict[str, Plain] = {"running": LISTED, "tokens": tokens}
    times = {
        "vllm": median_us(partial(plain.update_after_schedule, plain.scheduled)),
        "capture": median_us(partial(update, hooked, hooked.scheduled)),
    }
    return [ResultRow(BENCH, {**at, "variant": name}, "list_us", us, "us") for name, us in times.items()]


def main() -> None:
    """Measure, print and write."""
    rows = [row for running in RUNNING for row in messages(running)]
    rows += [row for tokens in TOKENS for row in blocks(tokens)]
    write_results(RESULTS / f"{BENCH}.json", rows, RunContext.current(cpu_name(), "vllm", "msgspec", "numpy"))
    print_table(rows, BENCH)


if __name__ == "__main__":
    main()
