"""``megaflux calibrate``: what do a block, a replica and a plan cost on this machine?"""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import asdict
from multiprocessing.queues import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from megaflux_serve.cli.requirements import require_kernels
from megaflux_serve.cli.shape_options import Experts, Hidden, Intermediate, Ranks, ReplicaSlots, TopK
from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.planning.calibration import layer_name, store_costs
from megaflux_serve.planning.gate import GateCosts

if TYPE_CHECKING:
    from megaflux_serve.cli.measure import MeasuredShape


def calibrate(
    hidden: Hidden,
    intermediate: Intermediate,
    experts: Experts = 128,
    top_k: TopK = 8,
    ranks: Ranks = 2,
    replica_slots: ReplicaSlots = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of a rank's batch.")] = 1024,
) -> None:
    """What do a block, a replica and a plan cost on this machine?

    Measures the gate's costs of one layer shape on Hopper GPUs that reach each other's memory, stores them in
    ~/.cache/megaflux/calibration.json (or $MEGAFLUX_CALIBRATION) and prints them. A server then takes the shape's name
    as its option gate, for example "2048x768".

    A process a GPU runs the layer: without replicas, with replicas copied before it computes and while it does, and
    with replicas in place. How much of the copies computing hides depends on the batch; small batches, where the gate
    matters, hide least.

    [bold]Example[/bold]

      [cyan]megaflux calibrate --hidden 2048 --intermediate 768 --experts 128[/cyan]
    """
    numbers = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k, "tokens": tokens}
    for name, value in {**numbers, "replica_slots": replica_slots}.items():
        if value < 1:
            raise ConfigError(name, value, "an integer of at least 1")
    if ranks < 2 or experts % ranks:
        raise ConfigError("ranks", ranks, f"at least 2, and a divisor of the {experts} experts")
    device = usable_device(ranks)
    from megaflux_serve.cli import measure

    shape = measure.MeasuredShape(**numbers, replica_slots=replica_slots)
    shape.check(ranks)
    costs = on_ranks(shape, ranks)
    path = store_costs(layer_name(hidden, intermediate), costs, device)
    typer.echo(json.dumps({"layer": layer_name(hidden, intermediate), "device": device, **asdict(costs)}))
    typer.echo(f"stored in {path}", err=True)


def on_ranks(shape: MeasuredShape, ranks: int) -> GateCosts:
    """The costs, measured by a process a GPU."""
    import torch.multiprocessing as processes

    results = processes.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/ranks"
        processes.spawn(one_rank, (shape, ranks, meeting, results), nprocs=ranks)
    costs: GateCosts = results.get()
    return costs


def one_rank(rank: int, shape: MeasuredShape, ranks: int, meeting: str, results: SimpleQueue[GateCosts]) -> None:
    """One process of ``on_ranks``; rank 0 reports."""
    import torch
    import torch.distributed as dist

    from megaflux_serve.cli import measure

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=ranks, device_id=device)
    assert dist.group.WORLD is not None
    costs = measure.measure_costs(shape, dist.group.WORLD)
    if rank == 0:
        results.put(costs)
    dist.destroy_process_group()


def usable_device(ranks: int) -> str:
    """The name of the GPUs that are measured.

    Raises:
        UnsupportedError: not as many Hopper GPUs that reach each other's memory, or the kernels are not installed.
    """
    require_kernels("calibrate")
    import torch

    pairs = itertools.permutations(range(min(ranks, torch.cuda.device_count())), 2)
    if torch.cuda.device_count() < ranks or not all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
        reason = f"torch sees {torch.cuda.device_count()} GPUs; {ranks} that reach each other's memory are measured"
        raise UnsupportedError("calibrate", reason, "run it on such a machine, or give the gate's costs as JSON")
    if torch.cuda.get_device_capability()[0] != 9:
        raise UnsupportedError("calibrate", f"{torch.cuda.get_device_name()} is not a Hopper GPU", "give costs as JSON")
    return str(torch.cuda.get_device_name())
