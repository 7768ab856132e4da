"""``megaflux routepack moves``: what a saved plan moves between ranks, before anything moves.

Parses, calls and prints.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megaflux_serve.errors import ConfigError
from megaflux_serve.routepack import TransferPlan, load_plan

GIB, TIB = 1 << 30, 1 << 40
TRAINED = 14.0
"""Bytes of a parameter in BF16 with float32 main weights and Adam's two moments."""
WIDEST = 1 << 20
"""Of models and experts; with experts of at most a TiB, sums of bytes are far from 64 bits."""


def moves(
    plan: Annotated[Path, typer.Argument(help="Folder of a saved plan.")],
    hidden: Annotated[int, typer.Option(help="H, width of the model.", min=1, max=WIDEST)],
    intermediate: Annotated[int, typer.Option(help="I, width of an expert.", min=1, max=WIDEST)],
    parameter_bytes: Annotated[
        float, typer.Option(help="Bytes that move with a parameter: 14 for BF16, main weights and Adam; 2 for BF16.")
    ] = TRAINED,
    staging_gib: Annotated[
        float | None, typer.Option(help="What a rank may hold beside its slots, GiB; by default what a layer needs.")
    ] = None,
    link_gbps: Annotated[float, typer.Option(help="What a rank receives from its peers, GB/s.")] = 50.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a plan moves: experts and bytes by rank, steps, memory beside the slots, and the time on the link.

    Example: megaflux routepack moves plan --hidden 2880 --intermediate 2880
    """
    for name, value in (("parameter_bytes", parameter_bytes), ("staging_gib", staging_gib), ("link_gbps", link_gbps)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(name, value, "a finite number above 0")
    parameters = 3 * hidden * intermediate
    if parameters * parameter_bytes > TIB:
        raise ConfigError("parameter_bytes", parameter_bytes, f"at most {TIB / parameters:g}, for an expert of 1 TiB")
    made = load_plan(plan)
    transfers = TransferPlan(made.before, made.placement)
    expert_bytes = math.ceil(parameters * parameter_bytes)
    steps = transfers.steps(expert_bytes, None if staging_gib is None else int(staging_gib * GIB))
    found = traffic(transfers, expert_bytes) | {"steps": len(steps)}
    found["seconds_on_the_link"] = max(found["received_bytes"]) / (link_gbps * 1e9)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console()
    console.print(
        f"{found['moved']} of {made.placement.slots.size} experts change their slot, in {found['layers']} of "
        f"{len(made.placement.slots)} layers; {expert_bytes / 2**20:.1f} MiB each"
    )
    console.print(traffic_table(found))
    console.print(
        f"{len(steps)} steps; the largest layer needs {max(found['staged_bytes']) / GIB:.2f} GiB beside a rank's "
        f"slots; the busiest rank receives for {1000 * found['seconds_on_the_link']:.0f} ms at {link_gbps:g} GB/s"
    )


def traffic(transfers: TransferPlan, expert_bytes: int) -> dict[str, Any]:
    """What moves, by rank."""
    counted = transfers.traffic()
    return {
        "moved": len(transfers.moves),
        "layers": len(set(transfers.moves[:, 0].tolist())),
        "expert_bytes": expert_bytes,
        "sent": counted.sent.tolist(),
        "received": counted.received.tolist(),
        "local": counted.local.tolist(),
        "received_bytes": (counted.received * expert_bytes).tolist(),
        "staged_bytes": (counted.staged * expert_bytes).tolist(),
    }


def traffic_table(found: dict[str, Any]) -> Table:
    """One line a rank."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "experts\nsent", "experts\nreceived", "GiB\nreceived", "moved on\nthe rank"):
        table.add_column(name, justify="right")
    columns = zip(found["sent"], found["received"], found["received_bytes"], found["local"], strict=True)
    for rank, (sent, received, received_bytes, local) in enumerate(columns):
        table.add_row(str(rank), str(sent), str(received), f"{received_bytes / GIB:.2f}", str(local))
    return table
