"""The training side of a rollout, without training: seal what was captured, plan it, move experts; again and again.

A trainer does the same between rollout and optimizer steps: it calls ``seal``, ``plan_window`` and ``migrate``, tells
``events`` what came of it, and serves the metrics of its process. Here two ranks hold small experts, and no plan is
kept.

    python examples/plan_windows.py out/demo/replay --port 9401 --every 10
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from prometheus_client import start_http_server

from megaflux_serve.capture import ReplayStore, SealedWindow, seal
from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.metrics import events
from megaflux_serve.migration import ExpertState, TransferPlan, migrate
from megaflux_serve.routepack import CostModel, Demand, DenseStage, PlanOptions, Topology, WindowPlan, plan_window
from megaflux_serve.routepack.placement import Placement
from megaflux_serve.routepack.population import SearchOptions

TOPOLOGY = Topology(num_ranks=2, num_slots=2, capacity=2048)
OPTIONS = PlanOptions(CostModel((DenseStage("attention", 1.0, 0.1),)), search=SearchOptions(budget_s=0.5))
WEIGHTS = 96, 64
"""Extents of an expert's weights here."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Seal and plan windows of a replay store, with metrics.")
    parser.add_argument("store", type=Path, help="folder of a replay store; waited for")
    parser.add_argument("--port", type=int, default=9401, help="of the metrics, at 127.0.0.1 (default: 9401)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between windows (default: 10)")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(train, args=(f"{folder}/ranks", args), nprocs=TOPOLOGY.num_ranks)
    except KeyboardInterrupt:
        sys.exit(130)


def train(rank: int, meeting: str, args: argparse.Namespace) -> None:
    """One rank: the first one seals and plans, all move experts."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, TOPOLOGY.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=TOPOLOGY.num_ranks)
    assert dist.group.WORLD is not None
    if rank == 0:
        events.prepare_windows()
        start_http_server(args.port, addr="127.0.0.1")
    placement: Placement | None = None
    state: ExpertState | None = None
    for number in count(1):
        planned = [next_plan(args, number, placement) if rank == 0 else None]
        dist.broadcast_object_list(planned, src=0)
        plan = planned[0]
        if plan is None:
            continue
        if state is None:
            state = new_state(plan.before)
        report = migrate(state, TransferPlan(plan.before, plan.placement), dist.group.WORLD)
        placement = plan.placement
        if rank == 0:
            events.window_migrated(report)
            print(f"{report.num_moved} experts moved in {1000 * report.seconds:.1f} ms", flush=True)


def new_state(placement: Placement) -> ExpertState:
    """Weights and one moment for every slot of this rank."""
    layers = len(placement.slots)
    shape = placement.experts_per_rank, *WEIGHTS
    return ExpertState.of({name: [torch.zeros(shape) for _ in range(layers)] for name in ("weight", "exp_avg")})


def next_plan(args: argparse.Namespace, number: int, before: Placement | None) -> WindowPlan | None:
    """The plan of what has been captured meanwhile; None if that is too little."""
    time.sleep(args.every)
    window = next_window(args.store, f"step-{number}-{time.time_ns()}")
    return None if window is None else planned(window, before)


def next_window(folder: Path, name: str) -> SealedWindow | None:
    """Everything that no window holds yet, sealed; None if there is nothing."""
    start = time.perf_counter()
    try:
        window = seal(ReplayStore(folder), name)
    except (ConfigError, InputError) as nothing:
        print(f"no window: {nothing}", flush=True)
        return None
    events.window_sealed(time.perf_counter() - start)
    return window


def planned(window: SealedWindow, before: Placement | None) -> WindowPlan | None:
    """The plan of a window, and its metrics; None if the window is too small."""
    try:
        plan = plan_window(Demand.of(window.counts, window.lengths), None, TOPOLOGY, OPTIONS, before)
    except InputError as refused:
        print(f"no plan: {refused}", flush=True)
        return None
    events.window_planned(plan)
    print(f"{len(window)} trajectories, {plan.layout.num_rows} rows, {plan.num_moved} experts to move", flush=True)
    return plan


if __name__ == "__main__":
    main()
