"""Serve under load, watch with Prometheus, and draw every dashboard.

Starts the demonstration's server, the process that seals and plans its captured routes, and a Prometheus with this
project's configuration and rules; asks prompts for a while; then draws the dashboards from Prometheus' answers. The
pictures are not Grafana's: ``dashboards/compose.yaml`` starts that. Everything goes to ``out/watch``.

    python examples/watch_demo.py                      the pictures, after a minute of load
    python examples/watch_demo.py --seconds 300 --images docs/images
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path

from dashboards.picture import draw
from dashboards.queries import dashboards
from examples.prometheus_server import Prometheus, PrometheusError, config_for, prometheus_command
from examples.serve_demo import MAX_TOKENS, REPLAY, console, megaflux_server, prompts, wait_for
from examples.vllm_server import Server, ServerError, free_port
from megaflux_serve.durable import write_atomically

PROJECT = Path(__file__).resolve().parents[1]
OUT = PROJECT / "out" / "watch"
SCRAPE_S, RATE_INTERVAL = 2, "20s"
BURST = 4
"""Prompts that are asked at the same time, so that batches differ."""


@dataclass(frozen=True)
class Watched:
    """A server under watch.

    Attributes:
        server: it answers.
        prometheus: scrapes it and the process that plans windows.
        started: when watching began, Unix time.
    """

    server: Server
    prometheus: Prometheus
    started: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve under load, watch with Prometheus, draw the dashboards.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load (default: 60)")
    parser.add_argument("--images", type=Path, default=OUT, help="folder of the pictures (default: out/watch)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is stopped then, too
    try:
        with watched() as watch:
            load(watch.server, args.seconds)
            for path in draw_all(watch, args.images):
                console.print(f"picture: {path}")
    except (ServerError, PrometheusError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def watched() -> Iterator[Watched]:
    """The demonstration's server, ready and scraped.

    Raises:
        ServerError, PrometheusError: one of them did not start.
    """
    prometheus_command()  # before the server takes its minute
    trainer_port = free_port()
    with megaflux_server(None, OUT) as server:
        config = config_for(
            PROJECT / "dashboards" / "prometheus",
            {"megaflux-server": f"127.0.0.1:{server.port}", "megaflux-trainer": f"127.0.0.1:{trainer_port}"},
            SCRAPE_S,
        )
        wait_for(server)
        with planner(trainer_port), Prometheus(config, OUT / "prometheus") as prometheus:
            yield Watched(server, prometheus, time.time())


@contextmanager
def planner(port: int) -> Iterator[None]:
    """The process that seals and plans windows, stopped at the end."""
    command = [sys.executable, str(PROJECT / "examples" / "plan_windows.py"), str(OUT / REPLAY.name)]
    with (OUT / "windows.log").open("wb") as log:
        process = subprocess.Popen([*command, "--port", str(port), "--every", "5"], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def load(server: Server, seconds: float) -> None:
    """Ask prompts of all kinds, a few at a time, until the time is over."""
    end = time.monotonic() + seconds
    asked = cycle(chain.from_iterable(burst.prompts for burst in prompts()))
    while time.monotonic() < end:
        server.complete([next(asked) for _ in range(BURST)], MAX_TOKENS, lambda: None)


def draw_all(watch: Watched, folder: Path) -> list[Path]:
    """A picture of every dashboard, from the start of watching until now."""
    end, paths = time.time(), []
    for dashboard in dashboards():
        path = folder / f"{dashboard['uid'].replace('megaflux', 'dashboard')}.png"
        write_atomically(path, draw(dashboard, watch.prometheus, watch.started, end, RATE_INTERVAL))
        paths.append(path)
    return paths


if __name__ == "__main__":
    main()
