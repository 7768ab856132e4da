"""Capture on the CPU: bytes a token, write and read rates, time to seal a window, and why the store is what it is.

Method: one optimizer window of 512 trajectories with 8,192 tokens each. Routes are real, from gpt-oss-20b (24 layers,
32 experts, top-4): trajectory i takes 8,191 consecutive rows of the trace, read around its end, from row ``50021 i``.
So a trajectory here is longer than one of the trace, and rows come again in others, but never within the 512 KB that
the compressor looks back. One writer, one thread, files on the machine's disk. Rates are of narrow ids (uint8, 786 kB
a trajectory) over time; the page cache is warm when reading. Time is the wall's, without what the kernel made the
thread wait for a processor that other work had, so that a busy machine measures nearly as a quiet one.

Variants: ``store`` appends records as they finish: checks, counts A, compresses, writes; then seals, with and without
reading every body once more. The others hold the finished window in memory and write it in one file when it is sealed,
so that ``seal_ms`` is the whole write: Parquet and Arrow IPC with a list of ids a trajectory (zstd, level 1),
safetensors and ``.npz`` (deflate). Every output is read back and compared before it is timed as read.

``bytes_per_token`` stands beside the raw int32 array that engines return. ``append_ms`` is the median time of one
trajectory: what capture costs the thread that writes. ``front_end_ms`` is what a trajectory takes from a thread that
computes in Python all the time, as an engine's front end does: if it records by itself, and if it hands the trajectory
to a thread, with which it shares Python's lock. Rollout overhead on GPUs is a part of ``bench_serving.py``.

Run: ``python -m benchmarks.bench_capture [FOLDER]`` (a minute and 2 GB in FOLDER or the temporary folder); writes
results/capture.{json,png}.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from benchmarks.harness import RESULTS, Plain, ResultRow, RunContext, cpu_name, figure, print_table, write_results
from benchmarks.routepack_corpus import gptoss_routes
from megaflux_serve.capture import ModelShape, ReplayRecord, ReplayStore, open_window, seal
from megaflux_serve.capture.background import CallThread
from megaflux_serve.capture.recorder import FinishedRequest, Recorder

BENCH = "capture"
NUM_TRAJECTORIES, TOKENS, PROMPT_TOKENS, STRIDE = 512, 8192, 512, 50_021
MODEL = ModelShape(num_experts=32, top_k=4, num_layers=24)
RAW_BYTES_PER_TOKEN = 4 * MODEL.num_layers * MODEL.top_k
SEALS = 5
FINISHED, COMPUTED, SPANS = 32, 150_000, 21
"""Trajectories of a span, additions before each (longer than recording it takes), and spans."""
CASE: dict[str, Plain] = {
    "trajectories": NUM_TRAJECTORIES,
    "tokens": TOKENS,
    "routing": "gpt-oss-20b",
    "layers": 24,
    "top_k": 4,
}
Routes = NDArray[np.uint8]


def clock() -> float:
    """Seconds of this thread, without those in which it waited for a processor."""
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - 1e-9 * waited_ns


def trajectories(trace: Routes) -> Iterator[Routes]:
    """The routes uint8 [8191, 24, 4] of each trajectory."""
    for i in range(NUM_TRAJECTORIES):
        rows = (STRIDE * i + np.arange(TOKENS - 1)) % len(trace)
        yield np.ascontiguousarray(trace[rows])


def measure_store(trace: Routes, folder: Path) -> list[ResultRow]:
    """Append, seal and read a window in the store."""
    store = ReplayStore.create(folder, MODEL)
    appended: list[float] = []
    with store.writer() as writer:
        for i, routes in enumerate(trajectories(trace)):
            begin = clock()
            record = ReplayRecord.of(
                f"{i:04}", routes, MODEL, prompt_tokens=PROMPT_TOKENS, output_tokens=TOKENS - PROMPT_TOKENS
            )
            writer.append(record)
            appended.append(clock() - begin)
        begin = clock()
        writer.sync()
        sync_s = clock() - begin
    ids = [f"{i:04}" for i in range(NUM_TRAJECTORIES)]

    def seal_all(name: str, verify: bool) -> None:
        seal(ReplayStore(folder), name, ids=ids, verify=verify)

    seconds = {
        verify: [_seconds(partial(seal_all, f"{verify}-{n}", verify)) for n in range(SEALS)] for verify in (True, False)
    }
    window = open_window(store, "True-0")
    for record, routes in zip(window, trajectories(trace), strict=True):
        assert np.array_equal(record.routes, routes)
    read_s = _seconds(lambda: [record.num_tokens for record in window])
    num_bytes = sum(path.stat().st_size for path in (folder / "shards").iterdir())
    # The first trajectory loads compiled code, once a process; it is left out of the rate as of the median.
    write_s = (sum(appended[1:]) + sync_s) * NUM_TRAJECTORIES / (NUM_TRAJECTORIES - 1)
    return [
        *_rows("store", num_bytes, write_s, read_s, 1e3 * float(np.median(seconds[True]))),
        _row("store", "append_ms", 1e3 * float(np.median(appended[1:])), "ms"),
        _row("store, bodies not read", "seal_ms", 1e3 * float(np.median(seconds[False])), "ms"),
    ]


def measure_front_end(trace: Routes, folder: Path) -> list[ResultRow]:
    """What recording takes from a thread that computes in Python, for each trajectory."""
    logger = logging.getLogger(BENCH)
    recorder, thread = Recorder(folder, 32, MODEL.num_layers, BENCH, "", logger), CallThread(BENCH, logger)
    requests = [
        FinishedRequest(f"{i}", PROMPT_TOKENS, TOKENS - PROMPT_TOKENS, routes)
        for i, routes in enumerate(islice(trajectories(trace), 1 + FINISHED))
    ]
    recorder.record(requests.pop())  # loads compiled code

    def compute(finish: Callable[[FinishedRequest], None]) -> float:
        begin = clock()
        for request in requests:
            total = 0
            for i in range(COMPUTED):
                total += i
            finish(request)
        seconds = clock() - begin
        thread.wait()
        return seconds

    ways: dict[str, Callable[[FinishedRequest], None]] = {
        "store, by the front end": recorder.record,
        "store, by a thread": lambda request: thread.submit(recorder.record, request),
    }
    more: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(SPANS):
        for name, finish in ways.items():
            alone = compute(lambda request: None)
            more[name].append(compute(finish) - alone)
    return [_row(name, "front_end_ms", 1e3 * float(np.median(spans)) / FINISHED, "ms") for name, spans in more.items()]


def measure_file(
    name: str, routes: Routes, write: Callable[[Path], None], read: Callable[[Path], Routes], path: Path
) -> list[ResultRow]:
    """Write the whole window to one file, flush it, and read it back."""

    def write_and_sync() -> None:
        write(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    write_s = _seconds(write_and_sync)
    assert np.array_equal(read(path), routes)
    read_s = _seconds(lambda: read(path))
    num_bytes = path.stat().st_size
    path.unlink()
    return _rows(name, num_bytes, write_s, read_s, 1e3 * write_s)


def measure_files(trace: Routes, folder: Path) -> list[ResultRow]:
    """The one-file containers that were considered."""
    routes = np.stack(list(trajectories(trace)))
    per_record = routes[0].size
    offsets = np.arange(0, routes.size + 1, per_record)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(routes.reshape(-1)))
    table = pa.table({"routes": lists})

    def flat(column: Any) -> Routes:
        values: Routes = np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks])
        return values.reshape(routes.shape)

    def write_ipc(path: Path) -> None:
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1), use_threads=False)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=16)

    def read_ipc(path: Path) -> Routes:
        with pa.OSFile(str(path)) as file:
            return flat(pa.ipc.open_file(file).read_all().column(0))

    def write_parquet(path: Path) -> None:
        options = {"compression": "zstd", "compression_level": 1, "use_dictionary": False}
        pq.write_table(table, path, row_group_size=16, **options)

    def read_parquet(path: Path) -> Routes:
        return flat(pq.read_table(path, use_threads=False).column(0))

    containers: dict[str, tuple[Callable[[Path], None], Callable[[Path], Routes]]] = {
        "arrow ipc": (write_ipc, read_ipc),
        "parquet": (write_parquet, read_parquet),
        "safetensors": (
            lambda path: save_file({"routes": routes}, path),
            lambda path: load_file(path)["routes"],
        ),
        "npz": (
            lambda path: np.savez_compressed(path, routes=routes),
            lambda path: np.load(path)["routes"],
        ),
    }
    rows: list[ResultRow] = []
    for name, (write, read) in containers.items():
        rows += measure_file(name, routes, write, read, folder / f"window.{name.replace(' ', '-')}.npz")
    return rows


def _rows(variant: str, num_bytes: int, write_s: float, read_s: float, seal_ms: float) -> list[ResultRow]:
    raw = NUM_TRAJECTORIES * (TOKENS - 1) * MODEL.num_layers * MODEL.top_k / 1e9
    baseline = {"name": "raw int32", "value": float(RAW_BYTES_PER_TOKEN)}
    return [
        _row(variant, "bytes_per_token", num_bytes / NUM_TRAJECTORIES / TOKENS, "B", baseline),
        _row(variant, "write_gbps", raw / write_s, "GB/s"),
        _row(variant, "read_gbps", raw / read_s, "GB/s"),
        _row(variant, "seal_ms", seal_ms, "ms"),
    ]


def _row(variant: str, metric: str, value: float, unit: str, baseline: dict[str, Any] | None = None) -> ResultRow:
    return ResultRow(BENCH, CASE | {"variant": variant}, metric, value, unit, baseline)


def _seconds(call: Callable[[], Any]) -> float:
    begin = clock()
    call()
    return clock() - begin


def draw(rows: list[ResultRow], path: Path) -> None:
    """A panel a metric, a bar a container."""
    names = {"bytes_per_token": "bytes a token", "seal_ms": "ms to seal", "read_gbps": "GB/s read"}
    title = "512 trajectories of 8,192 tokens, routes of gpt-oss-20b"
    with figure(path, columns=len(names), panel_inches=(3.4, 2.8), title=title) as panels:
        for axes, (metric, label) in zip(panels, names.items(), strict=True):
            found = {row.case["variant"]: row.value for row in rows if row.metric == metric}
            bars = axes.barh([str(name).replace(", ", ",\n") for name in found], list(found.values()))
            axes.bar_label(bars, fmt="{:,.0f}" if metric == "seal_ms" else "{:.3g}", padding=2)
            axes.set_title(label)
            axes.invert_yaxis()
            axes.margins(x=0.2)
            if metric == "seal_ms":
                axes.set_xscale("log")


def main() -> None:
    """Measure, print, write and draw."""
    with np.load(gptoss_routes(), allow_pickle=False) as arrays:
        trace = arrays["experts"].astype(np.uint8)
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        rows = measure_store(trace, folder / "store") + measure_front_end(trace, folder / "front-end")
        rows += measure_files(trace, folder)
    finally:
        shutil.rmtree(folder)
    write_results(RESULTS / "capture.json", rows, RunContext.current(cpu_name(), "numpy", "pyarrow", "safetensors"))
    print_table(rows)
    draw(rows, RESULTS / "capture.png")


if __name__ == "__main__":
    main()
