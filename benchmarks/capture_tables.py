"""Tables of the results of rollout capture for docs/capture.md; see ``figures``."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness.documents import cell, provenance, rows, table, value

STORES = {
    "store": "the store",
    "store, bodies not read": "the same, sealed without reading bodies",
    "arrow ipc": "Arrow IPC, zstd",
    "parquet": "Parquet, zstd",
    "safetensors": "safetensors",
    "npz": "`.npz`, deflate",
}
STORE_COLUMNS = {
    "bytes a token": ("{:.1f}", "bytes_per_token"),
    "write GB/s": ("{:.2f}", "write_gbps"),
    "read GB/s": ("{:.2f}", "read_gbps"),
    "ms to seal": ("{:,.0f}", "seal_ms"),
}
ROLLOUTS = {
    "stock-routes over stock": "vLLM's own flag",
    "stock-capture over stock": "the option `capture`",
    "stock-capture over stock-routes": "the option beside the flag: our part",
}


def stores() -> str:
    """Size and rates of the store and of other forms, for one window."""
    lines = [
        [name, *(cell(form, "capture", metric, variant=variant) for form, metric in STORE_COLUMNS.values())]
        for variant, name in STORES.items()
    ]
    return table(["", *STORE_COLUMNS], lines) + provenance("capture")


def recording() -> str:
    """What a finished trajectory takes from the thread that records it, or from the one that hands it on."""
    lines = [
        ["appended: checked, counted, compressed", "append_ms", "store"],
        ["recorded by a front end that computes in Python all the time", "front_end_ms", "store, by the front end"],
        ["handed by it to a thread", "front_end_ms", "store, by a thread"],
    ]
    shown = [[name, f"{value('capture', metric, variant=variant):.2f}"] for name, metric, variant in lines]
    return table(["a trajectory of 8,192 tokens", "ms"], shown) + provenance("capture")


def rollouts() -> str:
    """What capture costs the throughput of rollouts, and between which values that lies."""
    bench = "capture_rollout"
    columns = {"time of a round": "", "95 % interval from": "_low", "to": "_high"}
    lines = [
        [name, *(cell("{:+.2f} %", bench, f"rollout_overhead{end}_pct", variant=pair) for end in columns.values())]
        for pair, name in ROLLOUTS.items()
        if rows(bench, "rollout_overhead_pct", variant=pair)
    ]
    return table(["", *columns], lines) + provenance(bench)


def messages() -> str:
    """What the routes of a step of decode cost vLLM's processes, sent with every token or held."""
    sent, held = ("pack_us", "unpack_us"), ("hold_us", "pack_us", "unpack_us")
    columns = [*((metric, "vllm") for metric in sent), *((metric, "capture") for metric in held)]
    lines = []
    for running in sorted({row["case"]["running"] for row in rows("engine_routes", "pack_us")}):
        values = [value("engine_routes", metric, variant=variant, running=running) for metric, variant in columns]
        lines.append([f"{running:,}", *(f"{us:,.0f}" for us in values)])
    header = ["µs a step; running requests", "packed", "unpacked", "with capture: held", "packed", "unpacked"]
    return table(header, lines) + provenance("engine_routes")


def blocks() -> str:
    """What listing cache blocks costs vLLM's scheduler in a step, by the length of the requests."""
    lengths = sorted({row["case"]["tokens"] for row in rows("engine_routes", "list_us")})
    lines = [
        [name, *(f"{value('engine_routes', 'list_us', variant=variant, tokens=tokens):,.0f}" for tokens in lengths)]
        for variant, name in (("vllm", "vLLM"), ("capture", "with capture"))
    ]
    header = ["µs a step, 256 running; tokens of each", *(f"{tokens:,}" for tokens in lengths)]
    return table(header, lines) + provenance("engine_routes")


TABLES: dict[str, Callable[[], str]] = {
    "stores": stores,
    "recording": recording,
    "rollouts": rollouts,
    "route_messages": messages,
    "cache_blocks": blocks,
}
