"""The device planner: how long plan and routes take, stage by stage.

Method: CUDA-graph replays of one launch (histogram, exchange, plan, routes, forward tables of Qwen3's shape), events
around each, after warm-up; the slowest rank of each replay counts. Top-8, blocks of 128, s = E / 4P replica slots (16
at most), no copies held before; tables for at least 8192 tokens. Before it is timed, every setting's plan is compared
with the reference planner's.

* ``total_us``: median replay (``total_p99_us`` beside it), the start of the graph included; with real ranks also
  ``total_fastest_us``, the faster rank of each replay, which did not wait for the other one to begin.
* ``histogram_us``, ``exchange_us``, ``search_us``: SM clock of the planning block at the ends of the stages, from a
  build that records it, converted by the global timer of the same launches. ``search_us`` is everything from counts
  to the published plan; ``greedy_us``, ``refine_us``, ``tables_us`` are its parts.
* ``routes_us``: the rest of the launch, from the published plan to the end.

*Virtual* ranks share one GPU: 8 ranks have 1/8 of its multiprocessors each for histogram and routes, and their links
are its memory, so these rows say ``emulated``; the search is the same as on real ranks. Baseline of ``total_us``: the
paper's range on 8 B200 (42.6 to 65.9 us at E = 128, 49.8 to 72.0 us at E = 256; the upper end is given); of
``search_us``: the compiled CPU planner on the same counts in the same run.

Run: ``python -m benchmarks.bench_planner`` on one GPU for 8 virtual ranks;
``torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_planner`` for real ranks. Writes planner.json and .png
(``planner_real.json`` for real ranks) into ``$OUT``, default benchmarks/results.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.planner_map import Mark
from megaflux_kernels.worklist import LayerShape
from numpy.typing import NDArray

from benchmarks.harness import (
    RESULTS,
    ResultRow,
    RunContext,
    figure,
    print_table,
    summarise,
    time_call,
    write_results,
)
from benchmarks.planner_cases import expected_tables, first_difference
from benchmarks.planner_rig import Rig, planner_shape, real_rig, virtual_rig
from megaflux_serve.planning import plan_replicas, planner, workload
from megaflux_serve.routing import CountArray, expert_counts
from megaflux_serve.slots import SlotLayout

BENCH = "planner"
TOP_K = 8
VIRTUAL_RANKS = 8
EXPERTS = (128, 256, 512)
TOKENS = tuple(1024 * k for k in (1, 4, 8, 32, 128))
ROUTINGS = ("balanced", "zipf-k3", "zipf-k6")
STUDIED_TOKENS = 8192
"""All routings at this batch, one routing at the others."""
PAPER_US = {128: 65.9, 256: 72.0}
REPLAYS, WARMUP = 300, 30


@dataclass(frozen=True)
class Setting:
    """One measurement."""

    experts: int
    tokens: int
    routing: str


@dataclass(frozen=True)
class Stages:
    """Microseconds of one launch's stages, medians over launches."""

    histogram: float
    exchange: float
    greedy: float
    refine: float
    tables: float
    blocks: float

    @property
    def search(self) -> float:
        """Counts to published plan."""
        return self.blocks + self.greedy + self.refine + self.tables


def settings() -> list[Setting]:
    """Every expert count at every batch, and every routing at one batch."""
    grid = [Setting(e, t, "zipf-k6") for e in EXPERTS for t in TOKENS]
    return grid + [Setting(e, STUDIED_TOKENS, routing) for e in EXPERTS for routing in ROUTINGS if routing != "zipf-k6"]


def ids_of(setting: Setting, num_ranks: int) -> NDArray[np.int32]:
    """int32 [P, M, k]: distinct experts of every token, with the setting's shares of experts."""
    shares = workload.balanced_shares(setting.experts)
    if setting.routing != "balanced":
        shares = workload.zipf_shares(setting.experts, float(setting.routing.removeprefix("zipf-k")))
    counts = workload.permute(workload.scale_counts(shares, num_ranks * setting.tokens, TOP_K), workload.SEEDS[0])
    routes = workload.realise_routes(counts, num_ranks, TOP_K, workload.SEEDS[0])
    return np.ascontiguousarray(routes.reshape(num_ranks, setting.tokens, TOP_K), dtype=np.int32)


def check(rig: Rig, counts: CountArray, launches: int) -> None:
    """Raise unless the last plan of every local rank equals the reference's, slot for slot."""
    rig.assert_no_failure()
    search = rig.ranks[0].shape.search
    layout = SlotLayout(search.num_experts, search.num_ranks, search.num_replica_slots)
    plan = planner.plan_replicas(counts, layout)
    for rank in rig.ranks:
        difference = first_difference(expected_tables(plan, rank.rank, launches), rank.plan())
        if difference is not None:
            raise AssertionError(f"rank {rank.rank}, E = {layout.num_experts}: {difference}")


def replay_us(rig: Rig) -> NDArray[np.float64]:
    """float64 [REPLAYS]: device time of one graph replay each, no copies held before it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.launch()
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(WARMUP + REPLAYS)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        rig.resident.fill_(-1)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    samples = [1e3 * begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)]
    return np.array(samples[WARMUP:])


def stage_us(rig: Rig, launches: int = 40) -> Stages:
    """Stages of the first local rank's planning block."""
    clocks, spans = [], []
    for _ in range(launches):
        rig.resident.fill_(-1)
        rig.launch()
        trace = rig.ranks[0].regions["trace"].cpu().numpy()
        clocks.append(np.diff(trace[Mark.START : Mark.PLAN + 1]))
        spans.append((trace[Mark.PLAN] - trace[Mark.START], trace[Mark.PLAN_NS] - trace[Mark.START_NS]))
    cycles, nanoseconds = np.array(spans[5:], dtype=np.float64).sum(axis=0)
    stages = np.median(np.array(clocks[5:], dtype=np.float64), axis=0) * nanoseconds / cycles / 1e3
    histogram, sent, received, blocks, greedy, refine, tables = stages
    return Stages(histogram, sent + received, greedy, refine, tables, blocks)


def measure(setting: Setting, rig: Rig, ids: NDArray[np.int32], group: dist.ProcessGroup | None) -> list[ResultRow]:
    """Check and time one setting; rows of this process's ranks, the slowest rank of all processes counting."""
    ranks = [rank.rank for rank in rig.ranks]
    counts = np.stack([expert_counts(i, setting.experts) for i in ids])
    rig.load([ids[rank] for rank in ranks])
    rig.resident.fill_(-1)
    rig.launch()
    torch.cuda.synchronize()
    check(rig, counts, int(rig.ranks[0].regions["state"][0]))
    stages, samples = stage_us(rig), replay_us(rig)[None]
    rig.assert_no_failure()
    if group is not None:
        gathered: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (samples[0], stages), group=group)
        samples = np.stack([times for times, _ in gathered])
    total = summarise(samples)
    planning = time_call(lambda: plan_replicas(counts, rig_layout(rig)), iterations=30)
    case = {
        "experts": setting.experts,
        "ranks": len(ids),
        "tokens_per_rank": setting.tokens,
        "routing": setting.routing,
        "emulated": group is None,
    }
    paper = {"name": "paper, 8 B200", "value": PAPER_US[setting.experts]} if setting.experts in PAPER_US else None
    cpu = {"name": "CPU planner", "value": summarise(planning).median_us}
    values = {
        "total_us": (total.median_us, paper),
        "total_p99_us": (total.p99_us, None),
        "histogram_us": (stages.histogram, None),
        "exchange_us": (stages.exchange, None),
        "search_us": (stages.search, cpu),
        "greedy_us": (stages.greedy, None),
        "refine_us": (stages.refine, None),
        "tables_us": (stages.tables + stages.blocks, None),
        "routes_us": (max(0.0, total.median_us - stages.histogram - stages.exchange - stages.search), None),
    }
    if group is not None:
        values["total_fastest_us"] = (float(np.median(samples.min(axis=0))), None)
    return [ResultRow(BENCH, case, name, value, "us", base) for name, (value, base) in values.items()]


def rig_layout(rig: Rig) -> SlotLayout:
    """The core's layout of a rig's shape."""
    search = rig.ranks[0].shape.search
    return SlotLayout(search.num_experts, search.num_ranks, search.num_replica_slots)


def draw(rows: list[ResultRow], path: Path) -> None:
    """Total and stages over the batch, one panel an expert count, with the paper's upper end as a line."""
    with figure(path, columns=len(EXPERTS), title="Device planner: time of one launch") as axes:
        for axis, experts in zip(axes, EXPERTS, strict=True):
            for metric in ("total_us", "search_us", "histogram_us", "routes_us"):
                points = sorted(
                    (row.case["tokens_per_rank"], row.value)
                    for row in rows
                    if row.metric == metric and row.case["experts"] == experts and row.case["routing"] == "zipf-k6"
                )
                axis.plot(*zip(*points, strict=True), marker="o", label=metric.removesuffix("_us"))
            if experts in PAPER_US:
                axis.axhline(PAPER_US[experts], linestyle=":", color="black", label="paper, 8 B200, slowest")
            axis.set(title=f"E = {experts}", xscale="log", xlabel="tokens a rank", ylabel="us", ylim=(0, None))
            axis.legend(fontsize=7)


def main() -> None:
    """Measure every setting, print, write and draw."""
    group = None
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        group = dist.group.WORLD
    num_ranks = VIRTUAL_RANKS if group is None else dist.get_world_size(group)
    rows: list[ResultRow] = []
    for setting in settings():
        search = SearchShape(setting.experts, num_ranks, min(16, setting.experts // (4 * num_ranks)))
        capacity = max(setting.tokens, STUDIED_TOKENS)  # tables of a server that takes larger batches
        shape = planner_shape(search, TOP_K, capacity, num_ranks if group is None else 1)
        layer = LayerShape(num_ranks, setting.experts, search.num_replica_slots, 2048, 768, TOP_K, capacity)
        if group is None:
            rig = virtual_rig(shape, layer=layer, trace=True)
        else:
            rig = real_rig(shape, group, layer=layer, trace=True)
        rows += measure(setting, rig, ids_of(setting, num_ranks), group)
        if group is None or dist.get_rank(group) == 0:
            print(setting, {row.metric: round(row.value, 1) for row in rows if row.case == rows[-1].case}, flush=True)
    if group is None or dist.get_rank(group) == 0:
        stem = "planner" if group is None else "planner_real"
        folder = Path(os.environ.get("OUT", RESULTS))
        context = RunContext.current(torch.cuda.get_device_name(), "torch", "nvidia-cutlass-dsl", "numba")
        write_results(folder / f"{stem}.json", rows, context)
        draw(rows, folder / f"{stem}.png")
        print_table(rows, f"Device planner, {num_ranks} {'virtual' if group is None else 'real'} ranks")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
