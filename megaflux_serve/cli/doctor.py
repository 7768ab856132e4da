"""``megaflux doctor``: what can this machine run, and why not the rest?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megaflux_serve import __version__
from megaflux_serve.cli.machine import Machine, probe_machine
from megaflux_serve.cli.verdicts import Verdict, judge_engines, judge_executors, notes


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and verdicts as JSON.")] = False,
) -> None:
    """What can this machine run, and what is missing for the rest?

    Status 0 if at least one executor can run, else 1.
    """
    machine = probe_machine()
    executors, engines = judge_executors(machine), judge_engines(machine)
    if as_json:
        verdicts = {"executors": [asdict(v) for v in executors], "engines": [asdict(v) for v in engines]}
        typer.echo(
            json.dumps(
                {"version": __version__, "machine": asdict(machine), **verdicts, "notes": notes(machine)}, indent=2
            )
        )
    else:
        _print(machine, {"executor": executors, "engine": engines})
    raise typer.Exit(0 if any(verdict.can_run for verdict in executors) else 1)


def _print(machine: Machine, groups: dict[str, list[Verdict]]) -> None:
    """Facts, a table of verdicts for each group, notes."""
    console = Console(highlight=False)
    for name, value in _facts(machine).items():
        console.print(f"{name:<8} {value}", soft_wrap=True)
    for kind, verdicts in groups.items():
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=" ", title_justify="left")
        table.add_column(kind, min_width=10, no_wrap=True)
        table.add_column("runs", no_wrap=True)
        table.add_column("because")
        for verdict in verdicts:
            answer = "[green]yes[/green]" if verdict.can_run else "[red]no[/red]"
            table.add_row(verdict.subject, answer, escape(verdict.reason))
            if verdict.remedy:
                table.add_row("", "", f"[yellow]do:[/yellow] {escape(verdict.remedy)}")
        console.print(table)
    for note in notes(machine):
        console.print(f"\nnote: {note}", soft_wrap=True)


def _facts(machine: Machine) -> dict[str, str]:
    """The machine in a few lines."""
    gpus = [f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})" for gpu in machine.gpus]
    links = {True: ", all reach each other's memory", False: ", not all reach each other's memory", None: ""}
    return {
        "megaflux": __version__,
        "python": f"{machine.python} on {machine.system}",
        "cpu": f"{machine.cpu_cores} cores, {machine.memory_free_gib:.1f} of {machine.memory_gib:.1f} GiB memory free",
        "disk": f"{machine.disk_free_gib:.1f} GiB free in this folder",
        "gpu": ", ".join(gpus) + links[machine.peer_access] if gpus else "none that torch sees",
        "packages": ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version) or "none",
    }
