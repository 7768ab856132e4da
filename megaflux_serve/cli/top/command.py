"""``megaflux top``: what replication does now on a running server, in the terminal.

Parses, looks again and again, and prints; figures come from ``figures``, their looks from ``view``.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from megaflux_serve.cli.top.figures import figures
from megaflux_serve.cli.top.scrape import Change, Scrape, metrics_url, scrape
from megaflux_serve.cli.top.view import view
from megaflux_serve.errors import InputError


def top(
    address: Annotated[
        str, typer.Argument(help="A server, as host:port or URL of its API or its metrics.")
    ] = "127.0.0.1:8000",
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600.0, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Look once and leave, as is done where the output is no terminal."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print JSON.")] = False,
) -> None:
    """What does replication do now on a running server?

    Reads the metrics that dashboards are made of, without Prometheus or Grafana. Figures are of the time between two
    looks; after one look, of the time since the server started. Ctrl-C ends it.
    """
    url, console = metrics_url(address), Console(highlight=False)
    first = scrape(url)
    if as_json:
        typer.echo(json.dumps(asdict(figures(Change(None, first))), indent=2))
    elif once or not console.is_terminal:
        console.print(view(url, figures(Change(None, first))))
    else:
        watch(console, url, first, interval)


def watch(console: Console, url: str, first: Scrape, interval: float) -> None:
    """Show what changed since the last look until Ctrl-C; a server that is away for a while is waited for."""
    before, shown = first, view(url, figures(Change(None, first)), console.height)
    with Live(shown, console=console, screen=True, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            time.sleep(interval)
            try:
                now = scrape(url)
            except InputError as error:
                live.update(Group(f"[red]{escape(str(error))}[/red]; looking again", shown), refresh=True)
            else:
                before, shown = now, view(url, figures(Change(before, now)), console.height)
                live.update(shown, refresh=True)


__all__ = ["top"]
