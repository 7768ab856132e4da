"""``megaflux calibrate``: what do a block, a replica and a plan cost on this machine?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.planning.calibration import layer_name, store_costs
from megaflux_serve.planning.gate import GateCosts


def calibrate(
    hidden: Annotated[int, typer.Option(help="Hidden size H of the layer.")],
    intermediate: Annotated[int, typer.Option(help="Intermediate size I of one expert.")],
    experts: Annotated[int, typer.Option(help="Experts to plan for.")] = 128,
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="Ranks to plan for.")] = 2,
    hidden_permille: Annotated[int, typer.Option(help="Share of the transfers that computing hides.")] = 0,
) -> None:
    """What do a block, a replica and a plan cost on this machine?

    Measures the gate's costs of one layer shape on two Hopper GPUs that reach each other's memory, stores them in
    ~/.cache/megaflux/calibration.json (or $MEGAFLUX_CALIBRATION) and prints them. A server then takes the shape's name
    as its option gate, for example "2048x768".

    A block is timed in the forward kernel, a replica as a copy between the GPUs, a plan as the search on the device.
    How much of the transfers computing hides depends on the batch: 0 is safe, the paper measures 560 to 760.

    [bold]Example[/bold]

      [cyan]megaflux calibrate --hidden 2048 --intermediate 768 --experts 128[/cyan]
    """
    for name, value in (("hidden", hidden), ("intermediate", intermediate), ("experts", experts), ("ranks", ranks)):
        if value < 1:
            raise ConfigError(name, value, "an integer of at least 1")
    if experts % ranks:
        raise ConfigError("ranks", ranks, f"a divisor of the {experts} experts")
    device = usable_device()
    from megaflux_serve.cli import measure

    costs = GateCosts(
        measure.block_ns(hidden, intermediate),
        measure.replica_ns(hidden, intermediate),
        measure.plan_ns(experts, ranks),
        hidden_permille,
    )
    path = store_costs(layer_name(hidden, intermediate), costs, device)
    typer.echo(json.dumps({"layer": layer_name(hidden, intermediate), "device": device, **asdict(costs)}))
    typer.echo(f"stored in {path}", err=True)


def usable_device() -> str:
    """The name of the GPUs that are measured.

    Raises:
        UnsupportedError: not two Hopper GPUs that reach each other's memory, or the kernels are not installed.
    """
    try:
        import megaflux_kernels.forward  # noqa: F401
        import torch
    except ImportError as error:
        raise UnsupportedError("calibrate", f"needs {error.name}", "install megaflux-serve[gpu]") from None
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(1, 0):
        reason = f"torch sees {torch.cuda.device_count()} GPUs; two that reach each other's memory are measured"
        raise UnsupportedError("calibrate", reason, "run it on such a machine, or give the gate's costs as JSON")
    if torch.cuda.get_device_capability()[0] != 9:
        raise UnsupportedError("calibrate", f"{torch.cuda.get_device_name()} is not a Hopper GPU", "give costs as JSON")
    return str(torch.cuda.get_device_name())
