"""The device planner: how long plan and routes take, stage by stage.

Method: CUDA-graph replays of one launch (histogram, exchange, plan, routes, forward tables of Qwen3's shape), events
around each, after warm-up. A round of replays is queued while the device sleeps, so that the host is never waited for;
real ranks meet in an all-reduce before each replay, as the ranks of a server do in the layer before, and the slowest
rank of each replay counts. Top-8, blocks of 128, s = E / 4P replica slots (16 at most), no copies held before; tables
for at least 8192 tokens. Before it is timed, every setting's plan and routes are compared with the reference's.

* ``total_us``: median replay (``total_p99_us`` beside it), the start of the graph included. Baseline: the paper's range
  on 8 B200 (42.6 to 65.9 us at E = 128, 49.8 to 72.0 us at E = 256; the upper end is given).
* ``histogram_us``, ``exchange_us``, ``search_us``: the planning block's SM clock at the ends of the stages, converted
  by the global timer of the same launches. ``search_us`` is everything from counts to the published plan (baseline: the
  compiled CPU planner on the same counts in the same run); ``greedy_us``, ``refine_us``, ``tables_us`` are its parts.
* ``routes_us``: the rest of the launch, from the published plan to the end. In it ``load_us`` (the plan is seen and
  copied) and ``write_us`` (routes and tables) of the first chunk. ``launch_us``: what of the total lies before the
  planning block's first instruction and after the first chunk's last.
* ``eta``: share of the excess over the mean load that the plan removes, ``weights_moved``: experts copied for it; the
  baselines are EPLB's global packing for the same counts with the same slots, ``eplb_us`` the time of packing (CPU,
  compiled). EPLB may place every expert anew, which is why it suits windows of many batches and not a single one.

*Virtual* ranks share one GPU: 8 ranks have 1/8 of its multiprocessors each for histogram and routes, and their links
are its memory, so these rows say ``emulated``; the search is the same as on real ranks.

Run: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_planner`` for real ranks and then, on the first GPU,
8 virtual ones; ``python -m benchmarks.bench_planner`` for these alone. Writes planner.json and .png into ``$OUT``,
default benchmarks/results.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.planner_map import Mark, PlannerShape
from megaflux_kernels.symmetric import local_ranks
from megaflux_kernels.worklist import LayerShape
from numpy.typing import NDArray

from benchmarks import cases
from benchmarks.harness import (
    RESULTS,
    Plain,
    ResultRow,
    RunContext,
    figure,
    print_table,
    summarise,
    time_call,
    write_results,
)
from benchmarks.planner_cases import expected_tables, first_difference
from benchmarks.planner_compile import Job, compile_all
from benchmarks.planner_rig import Rig, make_rig, planner_shape
from megaflux_serve.planning import eta, fixed_rank_rows, plan_replicas, planner, workload
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.routes import map_blocks, source_routes
from megaflux_serve.routepack.eplb import eplb_rank_loads, eplb_slots
from megaflux_serve.routing import expert_counts
from megaflux_serve.slots import SlotLayout

BENCH = "planner"
TOP_K = 8
WIDTHS = (2048, 768)
"""H and I of Qwen3-30B-A3B."""
VIRTUAL_RANKS = 8
EXPERTS = (128, 256, 512)
TOKENS = tuple(1024 * k for k in (1, 4, 8, 32, 128))
ROUTINGS = ("balanced", "zipf-k3", "zipf-k6")
STUDIED_TOKENS = 8192
"""All routings at this batch, one routing at the others."""
PAPER_US = {128: 65.9, 256: 72.0}
ROUNDS, REPLAYS = 7, 50
"""The first round is warm-up."""
QUEUEING_CYCLES = 12_000_000
"""A sleep of the device in which the host queues a round."""
TRACED = 40


@dataclass(frozen=True)
class Setting:
    """One measurement."""

    experts: int
    tokens: int
    routing: str


@dataclass(frozen=True)
class Stages:
    """Microseconds of one launch's stages, medians over launches; ``span``, from first to last, is the mean."""

    histogram: float
    exchange: float
    greedy: float
    refine: float
    tables: float
    blocks: float
    load: float
    write: float
    span: float

    @property
    def search(self) -> float:
        """Counts to published plan."""
        return self.blocks + self.greedy + self.refine + self.tables


def settings() -> list[Setting]:
    """Every expert count at every batch, and every routing at one batch."""
    grid = [Setting(e, t, "zipf-k6") for e in EXPERTS for t in TOKENS]
    return grid + [Setting(e, STUDIED_TOKENS, routing) for e in EXPERTS for routing in ROUTINGS if routing != "zipf-k6"]


def ids_of(setting: Setting, num_ranks: int) -> NDArray[np.int32]:
    """int32 [P, M, k]: distinct experts of every token, with the setting's shares of experts; first realisation."""
    shares = cases.family_shares(setting.routing, setting.experts)[0]
    counts = workload.permute(workload.scale_counts(shares, num_ranks * setting.tokens, TOP_K), workload.SEEDS[0])
    routes = workload.realise_routes(counts, num_ranks, TOP_K, workload.SEEDS[0])
    return np.ascontiguousarray(routes.reshape(num_ranks, setting.tokens, TOP_K), dtype=np.int32)


def check(rig: Rig, plan: ReplicaPlan, ids: NDArray[np.int32]) -> None:
    """Raise unless the last plan and the routes of every local rank equal the reference's."""
    rig.assert_no_failure()
    blocks = map_blocks(plan)
    for rank in rig.ranks:
        routes = source_routes(plan, blocks, rank.rank, ids[rank.rank])
        wanted = expected_tables(plan, rank.rank, int(rank.regions["state"][0]))
        got = dict(rank.plan())
        for name, values in (
            ("route_place", routes.rank << 16 | routes.slot),
            ("route_row", routes.pool_row(plan.block_rows)),
        ):
            wanted[name], got[name] = values, rank.regions[name][: len(values)].cpu().numpy()
        difference = first_difference(wanted, got)
        if difference is not None:
            raise AssertionError(f"rank {rank.rank}, E = {plan.layout.num_experts}: {difference}")


def rounds(rig: Rig, count: int, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Before each of ``count`` launches: no copies held, all ranks met; the device sleeps until they are queued."""
    torch.cuda._sleep(QUEUEING_CYCLES)
    token = torch.zeros(1, device="cuda")
    for _ in range(count):
        rig.resident.fill_(-1)
        if group is not None:
            dist.all_reduce(token, group=group)
        yield


def replay_us(rig: Rig, group: dist.ProcessGroup | None) -> NDArray[np.float64]:
    """float64 [(ROUNDS - 1) * REPLAYS]: device time of one graph replay each."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.launch()
    samples = []
    for _ in range(ROUNDS):
        begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS)] for _ in range(2))
        for begin, end, _ in zip(begins, ends, rounds(rig, REPLAYS, group), strict=True):
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        samples += [1e3 * begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)]
    return np.array(samples[REPLAYS:])


def stage_us(rig: Rig, group: dist.ProcessGroup | None) -> Stages:
    """Stages of the first local rank's planning block and first chunk."""
    traces = torch.empty(TRACED, int(Mark.SIZE), dtype=torch.int64, device="cuda")
    for launch, _ in enumerate(rounds(rig, TRACED, group)):
        rig.launch()
        traces[launch].copy_(rig.ranks[0].regions["trace"])
    trace = traces.cpu().numpy()[5:]
    cycles = (trace[:, Mark.PLAN] - trace[:, Mark.START]).sum()
    us_per_cycle = (trace[:, Mark.PLAN_NS] - trace[:, Mark.START_NS]).sum() / cycles / 1e3
    steps = np.median(np.diff(trace[:, Mark.START : Mark.ROUTED + 1], axis=1), axis=0) * us_per_cycle
    histogram, sent, received, blocks, greedy, refine, tables = (float(step) for step in steps[: Mark.PLAN])
    load, write = float(steps[Mark.SEEN]), float(steps[Mark.LOADED])
    span = float((trace[:, Mark.ROUTED_NS] - trace[:, Mark.START_NS]).mean()) / 1e3
    return Stages(histogram, sent + received, greedy, refine, tables, blocks, load, write, span)


def balance(plan: ReplicaPlan) -> dict[str, tuple[float, float]]:
    """(the plan's, EPLB's) share of the excess removed and experts copied; nothing where there is no excess."""
    share, layout = eta(plan), plan.layout
    if share is None:
        return {}
    rows = plan.counts.sum(axis=0)
    slots = eplb_slots(rows[None], layout.num_ranks, layout.num_replica_slots)
    most, mean = float(fixed_rank_rows(plan).max()), rows.sum() / layout.num_ranks
    moved = sum(int((layout.home_rank[np.unique(held)] != rank).sum()) for rank, held in enumerate(slots[0]))
    packed = (most - float(eplb_rank_loads(rows[None], slots).max())) / (most - mean)
    return {"eta": (share, packed), "weights_moved": (len(plan.transfers), moved)}


def measure(setting: Setting, rig: Rig, ids: NDArray[np.int32], group: dist.ProcessGroup | None) -> list[ResultRow]:
    """Check and time one setting; the slowest process counts."""
    search, ranks = rig.ranks[0].shape.search, [rank.rank for rank in rig.ranks]
    layout = SlotLayout(search.num_experts, search.num_ranks, search.num_replica_slots)
    counts = np.stack([expert_counts(i, setting.experts) for i in ids])
    rig.load([ids[rank] for rank in ranks])
    rig.resident.fill_(-1)
    rig.launch()
    torch.cuda.synchronize()
    plan = planner.plan_replicas(counts, layout)
    check(rig, plan, ids)
    stages, samples = stage_us(rig, group), replay_us(rig, group)[None]
    rig.assert_no_failure()
    if group is not None:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, samples[0], group=group)
        samples = np.stack(gathered)
    total, rows = summarise(samples), counts.sum(axis=0)[None]
    planning = summarise(time_call(lambda: plan_replicas(counts, layout), iterations=30)).median_us
    packing = summarise(time_call(lambda: eplb_slots(rows, layout.num_ranks, layout.num_replica_slots), iterations=30))
    values = {
        "total_us": total.median_us,
        "total_p99_us": total.p99_us,
        "histogram_us": stages.histogram,
        "exchange_us": stages.exchange,
        "search_us": stages.search,
        "greedy_us": stages.greedy,
        "refine_us": stages.refine,
        "tables_us": stages.tables + stages.blocks,
        "routes_us": max(0.0, total.median_us - stages.histogram - stages.exchange - stages.search),
        "load_us": stages.load,
        "write_us": stages.write,
        "launch_us": max(0.0, total.median_us - stages.span),
        "eplb_us": packing.median_us,
    }
    baselines = {"search_us": {"name": "CPU planner", "value": planning}}
    if setting.experts in PAPER_US:
        baselines["total_us"] = {"name": "paper, 8 B200", "value": PAPER_US[setting.experts]}
    case: dict[str, Plain] = {
        "experts": setting.experts,
        "ranks": len(ids),
        "tokens_per_rank": setting.tokens,
        "routing": setting.routing,
        "gpus": len(samples),
        "emulated": len(ranks) > 1,
    }
    timed = [ResultRow(BENCH, case, name, value, "us", baselines.get(name)) for name, value in values.items()]
    return timed + [
        ResultRow(BENCH, case, name, value, "1", {"name": "EPLB", "value": other})
        for name, (value, other) in balance(plan).items()
    ]


def shapes(
    setting: Setting, num_ranks: int, num_local: int, widths: tuple[int, int]
) -> tuple[PlannerShape, LayerShape]:
    """What a setting is compiled for; tables of a server that takes batches of ``STUDIED_TOKENS`` at least."""
    search = SearchShape(setting.experts, num_ranks, min(16, setting.experts // (4 * num_ranks)))
    capacity = max(setting.tokens, STUDIED_TOKENS)
    layer = LayerShape(num_ranks, setting.experts, search.num_replica_slots, *widths, TOP_K, capacity)
    return planner_shape(search, TOP_K, capacity, num_local), layer


def run(
    group: dist.ProcessGroup | None, num_ranks: int, settings: list[Setting], widths: tuple[int, int] = WIDTHS
) -> list[ResultRow]:
    """All settings.

    Args:
        group: processes that hold the ranks evenly, a device each; None: all ranks are virtual ones of this device.
        num_ranks: P.
        settings: in the order of measurement.
        widths: H and I of the layer whose forward tables are written.
    """
    num_local = len(local_ranks(num_ranks, group))
    planned = [(setting, *shapes(setting, num_ranks, num_local, widths)) for setting in settings]
    if group is None or dist.get_rank(group) == 0:
        compile_all(list({Job(shape, layer, trace=True) for _, shape, layer in planned}))
    if group is not None:
        dist.barrier(group)
    rows: list[ResultRow] = []
    for setting, shape, layer in planned:
        rig = make_rig(shape, group, layer=layer, trace=True)
        new = measure(setting, rig, ids_of(setting, num_ranks), group)
        rows += new
        if group is None or dist.get_rank(group) == 0:
            print(setting, {row.metric: round(float(row.value), 2) for row in new}, flush=True)
    return rows


def draw(rows: list[ResultRow], path: Path) -> None:
    """Total and stages over the batch, one panel an expert count, with the paper's upper end as a line."""
    with figure(path, columns=len(EXPERTS), title="Device planner: time of one launch") as axes:
        for axis, experts in zip(axes, EXPERTS, strict=True):
            for emulated, style in ((False, "-"), (True, "--")):
                for colour, metric in enumerate(("total_us", "search_us", "histogram_us", "routes_us")):
                    points = sorted(
                        (row.case["tokens_per_rank"], row.value)
                        for row in rows
                        if (row.metric, row.case["experts"], row.case["emulated"]) == (metric, experts, emulated)
                        and row.case["routing"] == "zipf-k6"
                    )
                    if points:
                        kind = "8 virtual ranks" if emulated else "real ranks"
                        label = f"{metric.removesuffix('_us')}, {kind}"
                        axis.plot(*zip(*points, strict=True), style, color=f"C{colour}", marker=".", label=label)
            if experts in PAPER_US:
                axis.axhline(PAPER_US[experts], linestyle=":", color="black", label="paper, 8 B200, slowest")
            axis.set(title=f"E = {experts}", xscale="log", yscale="log", xlabel="tokens a rank", ylabel="us")
            axis.legend(fontsize=6)


def main() -> None:
    """Measure every setting, print, write and draw."""
    rows: list[ResultRow] = []
    first = True
    if "RANK" in os.environ:
        device = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=torch.device("cuda", device))
        rows = run(dist.group.WORLD, dist.get_world_size(), settings())
        first = dist.get_rank() == 0
        dist.destroy_process_group()
    if first:
        rows += run(None, VIRTUAL_RANKS, settings())
        folder = Path(os.environ.get("OUT", RESULTS))
        context = RunContext.current(torch.cuda.get_device_name(), "torch", "nvidia-cutlass-dsl", "numba")
        write_results(folder / f"{BENCH}.json", rows, context)
        draw(rows, folder / f"{BENCH}.png")
        print_table(rows, "Device planner")


if __name__ == "__main__":
    main()
