"""The forward megakernel on real ranks: checked against float64, then timed with and without replication.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_layer_forward.py --shapes qwen3-30b-a3b --tokens 8192

One process a GPU. Plans and tables are made on the host beforehand (the planner has its own benchmark), and so is
the copy of the hidden states into the symmetric buffer. A step is the forward kernel and the combine, replayed as CUDA
graphs with the two small launches that number it and clear its counters; the slowest rank counts.

Protocols: *burst*, the median of single steps after 50 ms of rest, ranks aligned and links awake; *sustained*,
after 0.5 s of rest the mean over the second 250 ms of steps back to back, where the power limit sets the clock.

Variants: ``fixed``, the placement without replicas; ``staged``, the plan with the transfer in a launch before;
``pipelined``, the plan with the transfer inside; ``resident``, the plan with its weights already there;
``all-gather + grouped_mm``, what torch offers: rows gathered, grouped products of the local experts, reduce-scatter.

Reported: latency_ms; tflops_per_gpu, 6 H I k M over it; roofline_fraction, the largest of matrix, memory and link time
of the busiest rank over it; speedup_over_fixed beside ideal_speedup, the ratio of the busiest ranks' blocks;
hidden_pct, the share of the transfer that computing hides (MegaFlux section 4.3), one minus the excess of pipelined by
that of staged, both over resident, where staged costs at least 2 %. Before anything is timed,
results must be within 0.5 % of float64, and replicated and staged results equal to fixed bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megaflux_kernels.forward import TRACE, ForwardConfig, shared_config
from megaflux_kernels.symmetric import SymmetricMemory
from megaflux_kernels.worklist import LayerShape
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.harness.rows import RESULTS, ResultRow, RunContext, write_results
from benchmarks.harness.table import print_table
from benchmarks.layer_pictures import draw_results, draw_trace
from benchmarks.layer_rig import Rig, draw_routes, memory_sizes
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.workload import concentrated_home, permute, realise_routes, scale_counts, zipf_shares
from megaflux_serve.routing import kappa

MATRIX_TFLOPS, MEMORY_GBPS, LINK_GBPS = 788.0, 4300.0, 394.0
"""Ceilings measured on an H200: cuBLAS 8192 cubed, device copy (read + write), copy engine over NVLink a direction."""

REST_S = 0.5
"""Seconds of rest before every sustained run: without it, its speed depended on what had run before."""

LIMIT = 0.005

SHAPES = {  # E, H, I, k, replica slots
    "qwen3-30b-a3b": (128, 2048, 768, 8, 4),
    "mixtral-8x7b": (8, 4096, 14336, 2, 1),
    "deepseek-v3-e64": (64, 7168, 2048, 8, 4),
    "olmoe": (64, 2048, 1024, 8, 4),
    "gpt-oss-20b": (32, 2880, 2880, 4, 2),
}
VARIANTS = ("fixed", "staged", "pipelined", "resident")
PROTOCOLS = ("burst", "sustained")
ROUTINGS = ("balanced", "zipf-3", "zipf-6", "zipf-3-one-rank", "zipf-6-one-rank")


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def save(path: Path, rows: Sequence[ResultRow]) -> None:
    """Write the rows so far, on rank 0."""
    if dist.get_rank() == 0:
        device = f"{dist.get_world_size()} x {torch.cuda.get_device_name()}"
        write_results(path, rows, RunContext.current(device, "torch", "nvidia-cutlass-dsl"))


def gather(value: object) -> list:
    """The value of every rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def align() -> None:
    """All ranks idle and together."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def routes(shape: LayerShape, tokens: int, routing: str) -> tuple[list[NDArray[np.int64]], NDArray[np.int32] | None]:
    """(ids of every rank, home map): ``one-rank`` homes the most loaded experts together."""
    if routing == "balanced":
        return draw_routes(shape, [tokens] * shape.num_ranks, seed=17), None
    skew = min(float(routing.split("-")[1]), 0.9 * shape.num_experts / shape.top_k)
    rows = scale_counts(zipf_shares(shape.num_experts, skew), shape.num_ranks * tokens, shape.top_k)
    rows = permute(rows, 17)
    home = concentrated_home(rows, shape.num_ranks) if routing.endswith("one-rank") else None
    ids = realise_routes(rows, shape.num_ranks, shape.top_k, 17)
    return list(ids.reshape(shape.num_ranks, tokens, shape.top_k).astype(np.int64)), home


class Steps:
    """One variant's step as CUDA graphs: the forward kernel with what precedes it, then the combine."""

    def __init__(self, rig: Rig, tokens: list[int], tables: list[dict[str, Tensor]], staged: bool) -> None:
        self.rig, self.stream, self.tables = rig, rig.streams[0], tables
        rank = rig.ranks[0]
        mine = tokens[rank.rank]
        self.forward, self.combine = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        rig.load(tables)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.forward, stream=self.stream):
            rig.launch(tokens, staged=staged, combine=False)
        with torch.cuda.graph(self.combine, stream=self.stream):
            rank.combine(rig.topk_weights[0][:mine], rig.out[0][:mine])

    def __call__(self) -> None:
        self.forward.replay()
        self.combine.replay()


def burst_ms(step: Callable[[], None], stream: torch.cuda.Stream, repeats: int = 5) -> float:
    """Median over repeats of the slowest rank, milliseconds."""
    ballast = torch.zeros(1 << 22, device="cuda")  # 16 MB wake a sleeping link, one element does not
    times = []
    with torch.cuda.stream(stream):
        for _ in range(repeats):
            torch.cuda.synchronize()
            time.sleep(0.05)
            dist.barrier()
            torch.cuda._sleep(1_000_000)
            for _ in range(2):
                dist.all_reduce(ballast)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return float(np.median(np.max(gather(times), axis=0)))


def sustained_ms(step: Callable[[], None], stream: torch.cuda.Stream, estimate_ms: float, span_ms: float) -> float:
    """Mean of the second half of a run back to back, slowest rank, milliseconds; as many steps on every rank."""
    count = max(10, int(span_ms / max(gather(estimate_ms))))
    time.sleep(REST_S)
    align()
    events = []
    with torch.cuda.stream(stream):
        for i in range(2 * count):
            step()
            if i % 8 == 7 or i + 1 in (count, 2 * count):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                events.append((i + 1, event))
                if len(events) > 4:
                    events[-4][1].synchronize()  # keep the queue short
    torch.cuda.synchronize()
    at = dict(events)
    return max(gather(at[count].elapsed_time(at[2 * count]) / count))


def grouped_peer(rig: Rig, topk: list[NDArray[np.int64]]) -> Callable[[], None]:
    """all-gather of rows, torch grouped products of this rank's experts, weighted sum, reduce-scatter."""
    shape, rank = rig.shape, rig.ranks[0]
    tokens = len(topk[0])
    ids = torch.from_numpy(np.concatenate(topk)).cuda()
    local = torch.full((shape.num_experts,), -1, device="cuda")
    local[torch.from_numpy(rig.layout.home_experts(rank.rank)).long().cuda()] = torch.arange(
        shape.home_slots, device="cuda"
    )
    token, choice = (local[ids] >= 0).nonzero(as_tuple=True)
    order = local[ids[token, choice]].argsort(stable=True)
    token, choice = token[order], choice[order]
    offsets = torch.bincount(local[ids[token, choice]], minlength=shape.home_slots).cumsum(0).int()
    weights = torch.empty(shape.num_ranks * tokens, shape.top_k, device="cuda")
    dist.all_gather_into_tensor(weights, rig.topk_weights[0][:tokens].contiguous())
    scale = weights[token, choice, None].bfloat16()
    rows = torch.empty(shape.num_ranks * tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")
    pool = rig.pools[0]
    w13, w2 = (stack[: shape.home_slots].transpose(1, 2) for stack in (pool.w1, pool.w2))

    def step() -> None:
        dist.all_gather_into_tensor(rows, rank.x[:tokens])
        gate, up = torch._grouped_mm(rows[token], w13, offs=offsets).chunk(2, dim=1)
        results = torch._grouped_mm(F.silu(gate) * up, w2, offs=offsets) * scale
        summed = torch.zeros_like(rows).index_add_(0, token, results)
        dist.reduce_scatter_tensor(out, summed)

    return step


def roofline_ms(shape: LayerShape, plan: ReplicaPlan, topk: list[NDArray[np.int64]]) -> float:
    """Largest of matrix, memory and link time of the busiest rank, from the rows that it receives."""
    hidden, intermediate = shape.hidden, shape.intermediate
    rows = plan.rows().sum(axis=0)
    moved = np.bincount(plan.transfers[:, 1], minlength=shape.num_ranks) if len(plan.transfers) else np.zeros(1)
    matrix = rows.max() * 6 * hidden * intermediate / (MATRIX_TFLOPS * 1e9)
    weights = shape.slots * 6 * hidden * intermediate
    memory = (weights + rows.max() * 2 * (4 * hidden + 2 * intermediate)) / (MEMORY_GBPS * 1e6)
    home = plan.layout.home_rank
    remote = 0
    for rank in range(shape.num_ranks):
        ids = np.concatenate([ids for source, ids in enumerate(topk) if source != rank] or [np.empty((0, 1), int)])
        remote = max(remote, int((home[ids] == rank).any(axis=1).sum()))
    link = (remote * 2 * hidden + moved.max() * 6 * hidden * intermediate) / (LINK_GBPS * 1e6)
    return max(matrix, memory, link)


def check(rig: Rig, tokens: list[int], topk: list[NDArray[np.int64]], plans: dict[str, tuple], name: str) -> None:
    """Stop the run unless fixed results agree with float64 and the other variants equal them."""
    fixed = None
    for variant, (tables, staged) in plans.items():
        rig.load(tables)
        if variant == "resident":  # its weights are those that the variant before has brought
            rig.ranks[0].results.fill_(float("nan"))
        else:
            rig.poison()
        align()
        rig.launch(tokens, staged=staged)
        torch.cuda.synchronize()
        problems = rig.failures()
        results = rig.ranks[0].results[: tokens[rig.ranks[0].rank]]
        if fixed is None:
            fixed = results.clone()
            errors = rig.errors(topk)[0]
            if not max(errors) < LIMIT:
                problems.append(f"relative L2 of results and out {errors}")
            say(f"  {name} {variant}: relative L2 {gather(errors)}")
        else:
            different = int((fixed.view(torch.int16) != results.view(torch.int16)).sum())
            if different:
                problems.append(f"{different} of {fixed.numel()} values differ from fixed")
        problems = [problem for of_rank in gather(problems) for problem in of_rank]
        if problems:
            raise SystemExit(f"{name} {variant}: {problems}")
    say(f"  {name}: variants equal bit for bit: {', '.join(plans)}")
    align()


def layer_shape(name: str, max_tokens: int) -> LayerShape:
    """A shape for batches of at most ``max_tokens`` tokens a rank; without replica slots where there is one rank."""
    experts, hidden, intermediate, top_k, slots = SHAPES[name]
    ranks = dist.get_world_size()
    return LayerShape(ranks, experts, slots if ranks > 1 else 0, hidden, intermediate, top_k, max_tokens)


def make_rig(name: str, max_tokens: int, config: ForwardConfig) -> Rig:
    """Buffers and weights of a shape."""
    shape = layer_shape(name, max_tokens)
    memories = [SymmetricMemory.rendezvous(size, dist.group.WORLD) for size in memory_sizes(shape, config.tiling)]
    return Rig(shape, config, [(memories[0], memories[1])])


def run_case(rig: Rig, name: str, tokens: int, routing: str, options: argparse.Namespace) -> list[ResultRow]:
    """Check and time every variant of one case."""
    shape, ranks = rig.shape, rig.shape.num_ranks
    topk, home = routes(shape, tokens, routing)
    rig.place(home)
    align()
    each = [tokens] * ranks
    fixed, plan = rig.plan(topk, False), rig.plan(topk, True)
    without_transfers = dataclasses.replace(plan, transfers=plan.transfers[:0])
    plans = {"fixed": (rig.tables(topk, fixed), False)}
    if plan.num_replicas:
        tables = rig.tables(topk, plan)
        plans |= {"staged": (tables, True), "pipelined": (tables, False)}
        plans["resident"] = (rig.tables(topk, without_transfers), False)
    loads = sum(ids.size for ids in topk)
    say(
        f"{name} {tokens} tokens {routing}: kappa {kappa(plan.counts):.2f}, blocks {fixed.loads.tolist()} -> "
        f"{plan.loads.tolist()}, {plan.num_replicas} replicas, {loads} rows, "
        f"{sum(rig.ranks[0].map.memory_use().values()) / 2**30:.2f} GiB a rank"
    )
    plans = {variant: plan for variant, plan in plans.items() if variant in options.variants}
    check(rig, each, topk, plans, f"{name} {tokens} {routing}")
    case = {"shape": name, "tokens_per_rank": tokens, "routing": routing, "ranks": ranks}
    if rig.config.trace:
        return trace_rows(rig, each, plans, case)
    steps: dict[str, tuple[Callable[[], None], torch.cuda.Stream]] = {}
    for variant, (tables, staged) in plans.items():
        steps[variant] = (Steps(rig, each, tables, staged), rig.streams[0])
    if options.peers:
        steps["all-gather + grouped_mm"] = (grouped_peer(rig, topk), torch.cuda.current_stream())
    flops = 6 * shape.hidden * shape.intermediate * shape.top_k * tokens
    rows, latency = [], {}
    for protocol in PROTOCOLS:
        for variant, (step, stream) in steps.items():
            if isinstance(step, Steps):
                rig.load(step.tables)
            align()
            step()
            align()
            if protocol == "burst":
                value = burst_ms(step, stream)
            else:
                value = sustained_ms(step, stream, latency["burst", variant], options.span_ms)
            latency[protocol, variant] = value
            at = {**case, "variant": variant, "protocol": protocol}
            mine = plan if variant not in ("fixed", "all-gather + grouped_mm") else fixed
            base = {"name": "fixed", "value": latency[protocol, "fixed"]}
            rows += [
                ResultRow("layer_forward", at, "latency_ms", value, "ms", base if variant != "fixed" else None),
                ResultRow("layer_forward", at, "tflops_per_gpu", flops / value * 1e-9, "TFLOP/s"),
                ResultRow("layer_forward", at, "roofline_fraction", roofline_ms(shape, mine, topk) / value, "1"),
            ]
            if variant in ("staged", "pipelined"):
                speedup, ideal = base["value"] / value, fixed.max_load / plan.max_load
                rows.append(ResultRow("layer_forward", at, "speedup_over_fixed", speedup, "1"))
                rows.append(ResultRow("layer_forward", at, "ideal_speedup", ideal, "1"))
            say(f"    {protocol:9s} {variant:24s} {value:8.3f} ms {flops / value * 1e-9:7.1f} TFLOP/s")
        if {"staged", "pipelined", "resident"} <= set(steps):
            resident = latency[protocol, "resident"]
            separate = latency[protocol, "staged"] - resident
            if separate > 0.02 * resident:  # below that the noise decides
                hidden_pct = 100 * (1 - (latency[protocol, "pipelined"] - resident) / separate)
                at = {**case, "variant": "pipelined", "protocol": protocol}
                rows.append(ResultRow("layer_forward", at, "hidden_pct", hidden_pct, "%"))
                say(f"    {protocol:9s} separate transfer {separate:.3f} ms, hidden {hidden_pct:.0f} %")
    failures = [failure for of_rank in gather(rig.failures()) for failure in of_rank]
    if failures:
        raise SystemExit(f"{name} {tokens} {routing}: {failures}")
    return rows


def trace_rows(rig: Rig, tokens: list[int], plans: dict[str, tuple], case: dict[str, object]) -> list[ResultRow]:
    """Where the time of a launch goes, microseconds since the first CTA's start: mean and last over the CTAs."""
    rows = []
    for variant, (tables, staged) in plans.items():
        rig.load(tables)
        align()
        for _ in range(4):  # back to back: the last one finds both ranks at work
            rig.launch(tokens, staged=staged)
        torch.cuda.synchronize()
        times = rig.ranks[0].trace.double().cpu().numpy() / 1000
        times[:, :6] -= times[:, 0].min()
        times[times < 0] = np.nan  # a CTA that pulled weights first marks no rows
        for rank, of_rank in enumerate(gather(times)):
            mean, last = np.nanmean(of_rank, axis=0), np.nanmax(of_rank, axis=0)
            shown = ", ".join(f"{mark} {a:.0f}/{b:.0f}" for mark, a, b in zip(TRACE, mean, last, strict=True))
            say(f"    trace {variant} rank {rank}: {shown}")
            for mark, a, b in zip(TRACE, mean, last, strict=True):
                at = {**case, "variant": variant, "rank": rank, "mark": mark}
                rows.append(ResultRow("layer_forward_trace", at, "mean_us", float(a), "us"))
                rows.append(ResultRow("layer_forward_trace", at, "last_us", float(b), "us"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--routings", nargs="+", default=["balanced"], choices=ROUTINGS)
    parser.add_argument("--span-ms", type=float, default=250, help="timed part of a sustained run")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="fixed is the base")
    parser.add_argument("--trace", action="store_true", help="record times inside the kernel instead")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave out the torch peer")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer_forward.json")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = []
    for name in options.shapes:
        rig = make_rig(name, max(options.tokens), dataclasses.replace(shared_config(), trace=options.trace))
        for tokens in options.tokens:
            for routing in options.routings:
                rows += run_case(rig, name, tokens, routing, options)
        del rig
        torch.cuda.empty_cache()
        save(options.out, rows)
    if dist.get_rank() == 0:
        print_table(rows, rows[0].bench)
        draw = draw_trace if options.trace else draw_results
        draw(rows, options.out.with_suffix(".png"))
    dist.barrier()
    dist.destroy_process_group()


START = time.monotonic()

if __name__ == "__main__":
    main()
