"""Options that describe the shape of a layer, for commands that compile or measure one."""

from __future__ import annotations

from typing import Annotated

import typer

Hidden = Annotated[int, typer.Option(help="Hidden size H of the layer.")]
Intermediate = Annotated[int, typer.Option(help="Intermediate size I of one expert.")]
Experts = Annotated[int, typer.Option(help="Experts E.")]
TopK = Annotated[int, typer.Option(help="Experts of a token.")]
Ranks = Annotated[int, typer.Option("--ranks", "-p", help="Ranks, a GPU each.")]
ReplicaSlots = Annotated[int, typer.Option("--replica-slots", "-s", help="Replica slots of a rank.")]

__all__ = ["Experts", "Hidden", "Intermediate", "Ranks", "ReplicaSlots", "TopK"]
