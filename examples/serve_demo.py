"""Serve a real model with ``--moe-backend megaflux`` on this machine, and show what replication did.

Two engine processes (data parallel, experts spread over both) answer prompts of several kinds over HTTP. A stock vLLM
server answers the same prompts; in float32 the tokens must be equal. The plan log then says, layer by layer, how skewed
the routing was and how far replicas evened out the load of the two ranks. The routes of all requests were captured
meanwhile and are sealed as a window for RL training. Everything goes to ``out/demo``, and to ``out/serve`` with
``--serve``.

    python examples/serve_demo.py            the demonstration
    python examples/serve_demo.py --serve    only the server, left running
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.vllm_server import MODEL, Answer, Server, ServerError
from megaflux_serve.capture import ReplayStore, seal
from megaflux_serve.capture.picture import window_picture
from megaflux_serve.cli.picture import draw_loads
from megaflux_serve.cli.render import layer_table
from megaflux_serve.cli.summary import BatchOutcome, accumulate
from megaflux_serve.durable import write_atomically

PROJECT = Path(__file__).resolve().parents[1]
CHECKPOINT = PROJECT / "models" / "tiny-moe"
OUT = PROJECT / "out" / "demo"
OUT_SERVE = PROJECT / "out" / "serve"
PLAN_LOG = OUT / "plan.jsonl"
PICTURE = OUT / "loads.png"
REPLAY = OUT / "replay"
REPLAY_PICTURE = OUT / "replay.png"

BLOCK_ROWS = 16  # the GPU kernels need 128; on a CPU small blocks suit small batches
REPLICA_SLOTS = 2
MAX_TOKENS = 16
OPENINGS = {
    "code": "    def __init__(self, name):\n        self.",
    "prose": "Return the number of bytes that",
    "arithmetic": "4 + 5 = 9\n20 + 30 = 50\n12 + 30 =",
    "mixed": "What is the type of 2 + 3?",
}
console = Console(highlight=False, soft_wrap=True)

Outcomes = dict[str, list[BatchOutcome]]
"""Batches by layer."""


@dataclass(frozen=True)
class Burst:
    """Prompts of one kind that are asked at the same time; the first one is short, and its answer is shown."""

    kind: str
    prompts: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve models/tiny-moe with MegaFlux and show what replication does.")
    parser.add_argument("--serve", action="store_true", help="only start the server and leave it running")
    parser.add_argument("--port", type=int, help="port of the server (default: 8000 with --serve, else a free one)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped then, too
    try:
        if args.serve:
            serve(args.port or 8000)
        else:
            demonstrate(args.port)
    except ServerError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def serve(port: int) -> None:
    """Leave the MegaFlux server running until Ctrl-C."""
    with megaflux_server(port, OUT_SERVE) as server:
        wait_for(server)
        request = json.dumps({"model": MODEL, "prompt": "12 + 30 =", "max_tokens": 4, "temperature": 0})
        url = f"http://127.0.0.1:{server.port}"
        console.print(f"serving on {url}; stop with Ctrl-C. Try it:\n")
        console.print(f"  curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{request}'\n")
        console.print(f"  .venv/bin/megaflux top 127.0.0.1:{server.port}\n")
        console.print(f"server log: {server.log}")
        console.print(f"plan log:   {OUT_SERVE / PLAN_LOG.name} (one JSON line a layer and batch)")
        console.print(f"replay:     {OUT_SERVE / REPLAY.name} (routes of finished requests)")
        raise server.failure(f"ended with status {server.process.wait()}")


def demonstrate(port: int | None) -> None:
    """Ask both servers the same prompts, compare their answers, show the plans and seal the captured routes."""
    start = time.monotonic()
    bursts = prompts()
    with megaflux_server(port) as server, Server("stock", CHECKPOINT, [], OUT / "stock.log") as reference:
        wait_for(server)
        log = PlanReader(PLAN_LOG)
        plans: list[Outcomes] = []
        ours = ask(server, bursts, lambda: plans.append(log.read()))
        wait_for(reference)
        stock = ask(reference, bursts)
    show_answers(bursts, ours)
    is_equal = compare(bursts, ours, stock)
    show_plans(bursts, plans)
    show_replay()
    console.print(f"logs:     {OUT}\ntook      {time.monotonic() - start:.0f} s")
    if not is_equal:
        sys.exit(1)


# ---- the two servers -------------------------------------------------------------------------------------------------


def megaflux_server(port: int | None, folder: Path = OUT) -> Server:
    """The server of the demonstration: data parallel over two processes, experts spread over both.

    Args:
        port: None takes a free one.
        folder: of its log, its plan log and its replay store, which are begun anew.
    """
    replay = folder / REPLAY.name
    options = {
        "replica_slots": REPLICA_SLOTS,
        "block_rows": BLOCK_ROWS,
        "plan_log": str(folder),
        "capture": str(replay),
    }
    arguments = ["--moe-backend", "megaflux", "--enable-expert-parallel", "--data-parallel-size", "2"]
    arguments += ["--additional-config", json.dumps({"megaflux": options})]
    server = Server("MegaFlux", CHECKPOINT, arguments, folder / "megaflux.log", port)
    (folder / PLAN_LOG.name).unlink(missing_ok=True)  # plans and records are appended
    shutil.rmtree(replay, ignore_errors=True)
    return server


def wait_for(server: Server) -> None:
    """Wait until the server answers, and show what it does until then."""
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=1)

        def show(milestone: str) -> None:
            bar.update(task, description=f"{server.name} server: {milestone}")

        server.wait_until_ready(show)
        show("ready")
        bar.advance(task)


def ask(server: Server, bursts: Sequence[Burst], after: Callable[[], None] = lambda: None) -> list[list[Answer]]:
    """The answers of a server, burst by burst; ``after`` is called when a burst is done."""
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    answers = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(f"{server.name} server: prompts", total=sum(len(burst.prompts) for burst in bursts))
        for burst in bursts:
            answers.append(server.complete(burst.prompts, MAX_TOKENS, lambda: bar.advance(task), burst.kind))
            after()
    return answers


# ---- prompts and answers ---------------------------------------------------------------------------------------------


def prompts() -> list[Burst]:
    """Three kinds of text that the model was not trained on, each by itself, then all of them at once."""
    sys.path.insert(0, str(CHECKPOINT))
    from corpus import DOMAINS, documents

    held_out = {kind: [text for text in documents(kind, "held_out") if len(text) >= 400] for kind in DOMAINS}
    bursts = [Burst(kind, (OPENINGS[kind], *excerpts(held_out[kind][:6]))) for kind in DOMAINS]
    mixed = chain.from_iterable(excerpts(held_out[kind][6:9]) for kind in DOMAINS)
    return [*bursts, Burst("mixed", (OPENINGS["mixed"], *mixed))]


def excerpts(texts: Sequence[str]) -> Iterator[str]:
    """Beginnings of different lengths, so that the load is uneven."""
    for i, text in enumerate(texts):
        yield text[: 400 + 250 * (i % 3)]


def show_answers(bursts: Sequence[Burst], answers: Sequence[Sequence[Answer]]) -> None:
    """The short prompt of every kind with its continuation."""
    table = Table("kind", "prompt", "continuation", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for burst, (answer, *_) in zip(bursts, answers, strict=True):
        table.add_row(burst.kind, escape(burst.prompts[0]), escape(answer.text), end_section=True)
    console.print(table)


def compare(bursts: Sequence[Burst], ours: Sequence[Sequence[Answer]], stock: Sequence[Sequence[Answer]]) -> bool:
    """Print how many answers are equal, token for token, and the first ones that are not; True if all are."""
    kinds = [burst.kind for burst in bursts for _ in burst.prompts]
    pairs = list(zip(kinds, chain.from_iterable(ours), chain.from_iterable(stock), strict=True))
    different = [(kind, a.token_ids, b.token_ids) for kind, a, b in pairs if a.token_ids != b.token_ids]
    num_tokens = sum(len(b.token_ids) for _, _, b in pairs)
    equal = f"{len(pairs) - len(different)} of {len(pairs)} answers equal stock vLLM's, token for token"
    console.print(f"[bold {'red' if different else 'green'}]{equal}[/] (greedy, float32, {num_tokens} tokens)\n")
    for kind, a, b in different[:5]:
        console.print(f"  {kind}: {list(a)}\n  stock: {list(b)}")
    return not different


# ---- plans -----------------------------------------------------------------------------------------------------------


class PlanReader:
    """Reads what is appended to the plan log, from one call of ``read`` to the next.

    What is there already when it is made, the batches by which the engine measures its memory, is left out.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open(encoding="utf-8")
        self.file.seek(0, 2)

    def read(self) -> Outcomes:
        """New batches by layer number."""
        outcomes: Outcomes = {}
        for record in map(json.loads, self.file):
            number = re.findall(r"\d+", record["layer"])[0]
            outcomes.setdefault(number, []).append(outcome(record))
        return outcomes


def outcome(record: dict[str, Any]) -> BatchOutcome:
    """A line of the plan log; loads and times in token blocks."""
    return BatchOutcome(
        kappa=record["kappa"],
        fixed_loads=tuple(record["fixed_loads"]),
        loads=tuple(record["loads"]),
        replicas=record["replicas"],
        blocks_moved=record["blocks_moved"],
        transfers=record["transfers"],
        fixed_time=max(record["fixed_loads"]),
        time=max(record["loads"]),
        gated=record["gated"],
    )


def show_plans(bursts: Sequence[Burst], plans: Sequence[Outcomes]) -> None:
    """The table over all prompts, by layer, and the picture by kind and layer."""
    names = sorted(plans[0], key=int)
    by_layer = {name: list(chain.from_iterable(plan.get(name, ()) for plan in plans)) for name in names}
    layers = [accumulate(name, outcomes) for name, outcomes in by_layer.items()]
    total = accumulate("all", list(chain.from_iterable(by_layer.values())))
    console.print(
        f"What the two ranks computed in {layers[0].num_batches} batches a layer, blocks of {BLOCK_ROWS} rows. Counts "
        "are sums;\nmax/mean is the time of the busiest rank over that of a perfect balance, batch after batch."
    )
    console.print(layer_table(layers, total))
    panels = [
        accumulate(f"{burst.kind}, layer {name}", plan[name])
        for burst, plan in zip(bursts, plans, strict=True)
        for name in names
    ]
    title = f"Load of the two ranks, {REPLICA_SLOTS} replica slots each, all batches of a kind"
    write_atomically(PICTURE, draw_loads(panels, title, f"blocks of {BLOCK_ROWS} rows"))
    console.print(f"picture:  {PICTURE}\nplan log: {PLAN_LOG}")


# ---- replay ----------------------------------------------------------------------------------------------------------


def show_replay() -> None:
    """Seal the captured routes as a window and draw it."""
    window = seal(ReplayStore(REPLAY), "demo")
    write_atomically(REPLAY_PICTURE, window_picture(window, num_ranks=2))
    console.print(
        f"replay:   {REPLAY}: {len(window)} trajectories, {int(window.lengths.sum()):,} tokens sealed as window demo; "
        f"see {REPLAY_PICTURE} and: megaflux replay stats {REPLAY} --ranks 2"
    )


if __name__ == "__main__":
    main()
