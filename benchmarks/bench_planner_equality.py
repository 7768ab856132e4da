"""The device planner equals the reference planner: every table of every case, bit for bit.

Two parts, both against ``plan_replicas`` (the specification in plain Python) and ``source_routes``, ``forward_work``:

* *Plans*: histograms of ``benchmarks.planner_cases`` (24 shapes, E 8 to 512, P 1 to 72, s 0 to 16; four sets of options
  with and without the gate), planned in one launch a group, twice: the second run must equal the first.
* *Batches*: top-k ids of virtual ranks through the whole launch (histogram, exchange, plan, routes, forward tables),
  several batches in a row with changing plans, zero rows on some ranks, and copies kept from batch to batch.

The reference runs in processes of its own, so that the device waits little. Reported: ``cases_equal``, and the number
of cases as baseline. The command ends with status 1 if one case differs, and prints the first differences.

Run on Hopper GPUs: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_planner_equality`` compares batches
on real ranks first, each process its own tables; ``python -m benchmarks.bench_planner_equality [cases a group]`` on
virtual ranks alone (112: 10,752 plans, about two minutes). Writes planner_equality.json into ``$OUT``, default
benchmarks/results.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.planner_map import PlannerShape
from megaflux_kernels.worklist import LayerShape, Tiling, forward_work
from numpy.typing import NDArray

from benchmarks.harness import RESULTS, ResultRow, RunContext, print_table, write_results
from benchmarks.planner_cases import SHAPES, expected_tables, first_difference, groups
from benchmarks.planner_compile import Job, compile_all
from megaflux_serve.planning import ReplicaPlan, plan_replicas
from megaflux_serve.planning.planner import PlannerOptions
from megaflux_serve.planning.routes import map_blocks, source_routes
from megaflux_serve.routing import expert_counts
from megaflux_serve.slots import SlotLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SEED = 20
CASES_PER_GROUP = 112
SLICES = 8
BATCH_SHAPES = ((16, 2, 2, 2), (32, 4, 3, 6), (64, 8, 2, 8), (128, 8, 4, 8), (256, 8, 8, 8), (96, 16, 2, 4))
"""(experts, ranks, replica slots, top-k) of the batches."""
REAL_SHAPES = ((16, 2, 4), (64, 1, 6), (128, 8, 8), (256, 16, 8))
"""(experts, replica slots, top-k) of the batches on real ranks."""
BATCHES = 6
MAX_TOKENS = 3000


@dataclass
class Tally:
    """Cases compared and equal, and the first differences in words."""

    cases: int = 0
    equal: int = 0

    def add(self, label: str, difference: str | None) -> None:
        """Count one case; ``difference`` is None if it is equal."""
        self.cases += 1
        self.equal += difference is None
        if difference is not None and self.cases - self.equal <= 5:
            print(f"DIFFERS {label}: {difference}", flush=True)


def reference_slice(task: tuple[tuple[int, int, int], int, int, int]) -> list[dict[str, NDArray[np.integer]]]:
    """Expected tables of every ``SLICES``-th case of a group, beginning with ``first``."""
    shape, cases_per_group, index, first = task
    group = list(groups(shape, cases_per_group, SEED))[index]
    ranks = shape[1]
    return [expected_tables(group.plan(case), case % ranks, case + 1) for case in range(first, cases_per_group, SLICES)]


def start_reference(pool: Pool, cases_per_group: int) -> dict[tuple[tuple[int, int, int], int], list[AsyncResult[Any]]]:
    """Hand all groups to the pool, the slow shapes first."""
    pending = {}
    for shape in sorted(SHAPES, key=lambda s: -s[0] * s[1]):
        for index in range(4):
            tasks = [(shape, cases_per_group, index, first) for first in range(SLICES)]
            pending[shape, index] = [pool.apply_async(reference_slice, (task,)) for task in tasks]
    return pending


def compare_plans(cases_per_group: int, pending: dict[Any, list[AsyncResult[Any]]]) -> list[ResultRow]:
    """Plan every group twice on the device and compare with the reference."""
    from benchmarks.planner_rig import plan_group

    rows = []
    for shape in SHAPES:
        tally, start = Tally(), time.monotonic()
        for index, group in enumerate(groups(shape, cases_per_group, SEED)):
            plans, held = plan_group(group)
            again, held_again = plan_group(group)
            layout = SearchShape(*shape).plan
            for first, part in enumerate(pending[shape, index]):
                for case, expected in zip(range(first, cases_per_group, SLICES), part.get(300), strict=True):
                    difference = first_difference(expected, layout.split(plans[case]))
                    if difference is None and not np.array_equal(held[case], expected["replica_experts"]):
                        difference = f"copies held: {held[case].tolist()}"
                    if difference is None and not np.array_equal(held[case], held_again[case]):
                        difference = "copies held differ in the second run"
                    if difference is None:
                        difference = first_difference(expected, layout.split(again[case]))
                    tally.add(f"{shape} group {index} case {case}", difference)
        print(f"plans {shape}: {tally.equal}/{tally.cases} equal, {time.monotonic() - start:.1f} s", flush=True)
        at = {"part": "plans", "experts": shape[0], "ranks": shape[1], "replica_slots": shape[2], "emulated": True}
        rows.append(_row(at, tally))
    return rows


def compare_batches(shapes: tuple[tuple[int, int, int, int], ...], group: ProcessGroup | None) -> list[ResultRow]:
    """Run batches through the whole launch and compare plan, routes and forward tables of the local ranks.

    Args:
        shapes: (experts, ranks, replica slots, top-k).
        group: real ranks, one process a device; None for virtual ranks on this device.
    """
    from megaflux_kernels.planner_buffers import LaunchOptions

    from benchmarks.planner_rig import make_rig

    rows = []
    for batch_shape in shapes:
        experts, ranks, slots, top_k = batch_shape
        rng, tally = np.random.default_rng([SEED, experts, ranks]), Tally()
        home = rng.permutation(np.arange(experts, dtype=np.int32) % ranks)
        layout = SlotLayout(experts, ranks, slots, home)
        shape, layer = batch_shapes(*batch_shape, real=group is not None)
        rig = make_rig(shape, group, home, layer)
        held = layout.no_replicas()
        for batch in range(BATCHES):
            ids = [random_ids(rng, experts, top_k, batch) for _ in range(ranks)]
            rig.load([ids[rank.rank] for rank in rig.ranks])
            rig.launch(LaunchOptions(transfer_cost_blocks=batch % 2))
            rig.assert_no_failure()
            if group:
                group.barrier().wait()  # the other rank's launch writes tables of this one
            counts = np.stack([expert_counts(i, experts) for i in ids])
            plan = plan_replicas(counts, layout, PlannerOptions(transfer_cost_blocks=batch % 2), held)
            held = plan.replica_experts
            tally.add(
                f"batch {batch} of {batch_shape}",
                differing_batch(rig, plan, ids, layer, batch + 1),
            )
            if group:
                group.barrier().wait()
        print(f"batches {batch_shape}: {tally.equal}/{tally.cases} equal", flush=True)
        case = {"part": "batches", "experts": experts, "ranks": ranks, "replica_slots": slots, "emulated": not group}
        rows.append(_row(case, tally))
    return rows


def batch_shapes(experts: int, ranks: int, slots: int, top_k: int, real: bool) -> tuple[PlannerShape, LayerShape]:
    """What the batches of a shape are compiled for, on real or virtual ranks."""
    from benchmarks.planner_rig import planner_shape

    layer = LayerShape(ranks, experts, slots, 2048, 768, top_k, MAX_TOKENS)
    return planner_shape(SearchShape(experts, ranks, slots), top_k, MAX_TOKENS, 1 if real else ranks), layer


def random_ids(rng: np.random.Generator, experts: int, top_k: int, batch: int) -> NDArray[np.int32]:
    """int32 [M, k] distinct experts of each token, skewed more from batch to batch; sometimes no token or one."""
    num = int(rng.choice([0, 1, MAX_TOKENS, int(rng.integers(2, MAX_TOKENS))])) if batch else MAX_TOKENS
    scores = rng.random((num, experts)) + 0.2 * batch * np.linspace(0, 1, experts)
    return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32)


def differing_batch(
    rig: Any, plan: ReplicaPlan, ids: list[NDArray[np.int32]], layer: LayerShape, launch: int
) -> str | None:
    """The first difference of one batch: plan, routes and forward tables of every rank; None if all are equal."""
    blocks = map_blocks(plan)
    routes = [source_routes(plan, blocks, rank, i) for rank, i in enumerate(ids)]
    pool_rows = [route.pool_row(plan.block_rows) for route in routes]
    for buffers, forward in zip(rig.ranks, rig.tables, strict=True):
        rank, tables = buffers.rank, buffers.plan()
        got: dict[str, NDArray[Any]] = dict(tables)
        wanted: dict[str, NDArray[Any]] = expected_tables(plan, rank, launch)
        num = len(ids[rank])
        got["route_place"] = buffers.regions["route_place"].cpu().numpy()
        got["route_row"] = buffers.regions["route_row"].cpu().numpy()
        wanted["route_place"] = routes[rank].rank[:num] << 16 | routes[rank].slot[:num]
        wanted["route_row"] = pool_rows[rank][:num]
        moved = plan.transfers[plan.transfers[:, 1] == rank]
        homes = plan.layout.home_rank[moved[:, 0]], plan.layout.home_index[moved[:, 0]]
        transfers = np.stack([*homes, plan.layout.experts_per_rank + moved[:, 2], moved[:, 0]], axis=1)
        work = forward_work(
            rank,
            launch,
            layer,
            Tiling(),
            wanted["slot_blocks"][rank],
            [route.rank for route in routes],
            pool_rows,
            transfers,
        )
        for name in ("header", "tasks", "row_source", "transfers"):
            got[f"forward.{name}"] = getattr(forward, name).cpu().numpy()
            wanted[f"forward.{name}"] = getattr(work, name)
        got["forward.counters"] = forward.counters.cpu().numpy()
        wanted["forward.counters"] = np.zeros_like(got["forward.counters"])
        here = (work.places >= 0).any(axis=2)  # rows of tokens that this rank does not compute are never read
        got["forward.places"], wanted["forward.places"] = forward.places.cpu().numpy()[here], work.places[here]
        difference = first_difference(wanted, got)
        if difference is not None:
            return f"rank {rank}: {difference}"
    return None


def _row(case: dict[str, Any], tally: Tally) -> ResultRow:
    baseline = {"name": "cases compared", "value": tally.cases}
    return ResultRow("planner_equality", case, "cases_equal", tally.equal, "1", baseline)


def tally_of(rows: list[ResultRow]) -> Tally:
    """The cases of several rows together."""
    return Tally(sum(int(row.baseline["value"]) for row in rows if row.baseline), sum(int(row.value) for row in rows))


def compare_real() -> tuple[bool, list[ResultRow]]:
    """Compare batches on real ranks, each process its own tables.

    Returns:
        Whether this is rank 0, and the cases of all ranks by shape.
    """
    import torch
    import torch.distributed as dist

    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    shapes = tuple((experts, dist.get_world_size(), slots, top_k) for experts, slots, top_k in REAL_SHAPES)
    if dist.get_rank() == 0:
        compile_all([Job(*batch_shapes(*shape, real=True)) for shape in shapes])
    dist.barrier()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, compare_batches(shapes, dist.group.WORLD))
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    together = [list(of_shape) for of_shape in zip(*gathered, strict=True)]
    return first, [_row(dict(of_shape[0].case), tally_of(of_shape)) for of_shape in together]


def compare_virtual(cases_per_group: int) -> list[ResultRow]:
    """Compare batches and plans on this device."""
    batches = [Job(*batch_shapes(*shape, real=False)) for shape in BATCH_SHAPES]
    compile_all(batches + [Job(SearchShape(*shape)) for shape in SHAPES])
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
        pending = start_reference(pool, cases_per_group)
        return compare_batches(BATCH_SHAPES, None) + compare_plans(cases_per_group, pending)


def main() -> None:
    """Compare everything, print and write the rows; status 1 if a case differs."""
    import torch

    first, rows = compare_real() if "RANK" in os.environ else (True, [])
    if not first:
        return
    rows += compare_virtual(int(sys.argv[1]) if len(sys.argv) > 1 else CASES_PER_GROUP)
    for emulated in sorted({bool(row.case["emulated"]) for row in rows}):
        of_kind = [row for row in rows if row.case["emulated"] == emulated]
        rows.append(_row({"part": "all", "emulated": emulated}, tally_of(of_kind)))
    context = RunContext.current(torch.cuda.get_device_name(), "torch", "nvidia-cutlass-dsl", "numpy")
    write_results(Path(os.environ.get("OUT", RESULTS)) / "planner_equality.json", rows, context)
    print_table(rows, "Device planner against the reference")
    total = tally_of([row for row in rows if row.case["part"] == "all"])
    print(f"{total.equal} of {total.cases} cases equal", flush=True)
    sys.exit(0 if total.equal == total.cases else 1)


if __name__ == "__main__":
    main()
