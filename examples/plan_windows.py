"""The training side of a rollout, without training: seal what was captured, plan it, again and again, with metrics.

A trainer does the same between rollout and optimizer steps: it calls ``seal`` and ``plan_window``, tells ``events``
what came of it, and serves the metrics of its process. Plans are not kept.

    python examples/plan_windows.py out/demo/replay --port 9401 --every 10
"""

from __future__ import annotations

import argparse
import time
from itertools import count
from pathlib import Path

from prometheus_client import start_http_server

from megaflux_serve.capture import ReplayStore, SealedWindow, seal
from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.metrics import events
from megaflux_serve.routepack import CostModel, Demand, DenseStage, PlanOptions, Topology, plan_window
from megaflux_serve.routepack.placement import Placement
from megaflux_serve.routepack.population import SearchOptions

TOPOLOGY = Topology(num_ranks=2, num_slots=2, capacity=2048)
OPTIONS = PlanOptions(CostModel((DenseStage("attention", 1.0, 0.1),)), search=SearchOptions(budget_s=0.5))


def main() -> None:
    parser = argparse.ArgumentParser(description="Seal and plan windows of a replay store, with metrics.")
    parser.add_argument("store", type=Path, help="folder of a replay store; waited for")
    parser.add_argument("--port", type=int, default=9401, help="of the metrics, at 127.0.0.1 (default: 9401)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between windows (default: 10)")
    args = parser.parse_args()
    events.prepare_windows()
    start_http_server(args.port, addr="127.0.0.1")
    placement: Placement | None = None
    for number in count(1):
        time.sleep(args.every)
        window = next_window(args.store, f"step-{number}-{time.time_ns()}")
        if window is not None:
            placement = planned(window, placement)


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


def planned(window: SealedWindow, before: Placement | None) -> Placement | None:
    """The placement for a window, and the metrics of its plan; the placement before if the window is too small."""
    try:
        plan = plan_window(Demand.of(window.counts, window.lengths), None, TOPOLOGY, OPTIONS, before)
    except InputError as refused:
        print(f"no plan: {refused}", flush=True)
        return before
    events.window_planned(plan)
    print(f"{len(window)} trajectories, {plan.layout.num_rows} rows, {plan.num_moved} experts moved", flush=True)
    return plan.placement


if __name__ == "__main__":
    main()
