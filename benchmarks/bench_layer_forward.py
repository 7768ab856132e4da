"""The forward megakernel on real ranks: checked against float64, then timed with and without replication.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_layer_forward.py --shapes qwen3-30b-a3b --tokens 8192

One process a GPU. Plans and tables are made on the host beforehand (the planner has its own benchmark), and so is
the copy of the hidden states into the symmetric buffer. A step is the forward kernel and the combine, one CUDA
graph with the two small launches that number it and clear its counters; the slowest rank counts. Shapes and routings
are those of ``layer_workloads``, the protocols *burst* and *sustained* those of ``layer_timing``.

Variants: ``fixed``, the placement without replicas; ``staged``, the plan with the transfer in a launch before;
``pipelined``, the plan with the transfer inside; ``resident``, the plan with its weights already there; and the peers
of ``layer_peers`` that are installed.

Reported: latency_ms; tflops_per_gpu, 6 H I k M over it; roofline_fraction, the largest of matrix, memory and link time
of the busiest rank over it; speedup_over_fixed beside ideal_speedup, the ratio of the busiest ranks' blocks;
hidden_pct, the share of the transfer that computing hides (MegaFlux section 4.3), one minus the excess of pipelined by
that of staged, both over resident, where staged costs at least 2 %; sm_clock_mhz and power_w of every sustained run;
relative_l2 of the fixed placement against float64. Before anything is timed, that must be within 0.5 %, and replicated
and staged results equal to fixed bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megaflux_kernels.forward import TRACE, ForwardConfig, shared_config
from megaflux_kernels.symmetric import SymmetricMemory
from megaflux_kernels.worklist import LayerShape
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.harness.rows import RESULTS, Plain, ResultRow
from benchmarks.harness.table import print_table
from benchmarks.layer_peers import PEERS, Gathered, installed_peers, make_peers
from benchmarks.layer_pictures import draw_results, draw_trace
from benchmarks.layer_rig import Rig, memory_sizes
from benchmarks.layer_timing import PROTOCOLS, Sustained, align, burst_ms, gather, hidden_pct, save, say, sustained
from benchmarks.layer_workloads import ROUTINGS, SHAPES, roofline_ms, routes
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.routing import kappa

LIMIT = 0.005
VARIANTS = ("fixed", "staged", "pipelined", "resident")


Plans = dict[str, tuple[list[dict[str, Tensor]], bool]]
"""By variant: the local ranks' tables, and whether replicas are copied in a stage of their own."""


class Steps:
    """One variant's step as a CUDA graph: the launch is numbered, then the forward kernel and the combine."""

    def __init__(self, rig: Rig, tokens: list[int], tables: list[dict[str, Tensor]], staged: bool) -> None:
        self.tables, self.graph = tables, torch.cuda.CUDAGraph()
        rig.load(tables)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=rig.streams[0]):
            rig.launch(tokens, staged=staged)

    def __call__(self) -> None:
        self.graph.replay()


def check(rig: Rig, tokens: list[int], topk: list[NDArray[np.int64]], plans: Plans, name: str) -> float:
    """Stop the run unless fixed results agree with float64 and the other variants equal them; the relative L2."""
    fixed, errors = None, [0.0]
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
            errors = [max(of_rank) for of_rank in gather(rig.errors(topk)[0])]
            if not max(errors) < LIMIT:
                problems.append(f"relative L2 {errors}")
        else:
            different = int((fixed.view(torch.int16) != results.view(torch.int16)).sum())
            if different:
                problems.append(f"{different} of {fixed.numel()} values differ from fixed")
        problems = [problem for of_rank in gather(problems) for problem in of_rank]
        if problems:
            raise SystemExit(f"{name} {variant}: {problems}")
    say(f"  {name}: relative L2 {max(errors):.5f}; equal bit for bit: {', '.join(plans)}")
    align()
    return max(errors)


def layer_shape(name: str, max_tokens: int) -> LayerShape:
    """A shape for batches of at most ``max_tokens`` tokens a rank; without replica slots where there is one rank."""
    experts, hidden, intermediate, top_k, slots = SHAPES[name]
    ranks = dist.get_world_size()
    return LayerShape(ranks, experts, slots if ranks > 1 else 0, hidden, intermediate, top_k, max_tokens)


def make_rig(name: str, max_tokens: int, config: ForwardConfig) -> Rig:
    """Buffers and weights of a shape."""
    shape = layer_shape(name, max_tokens)
    sizes = memory_sizes(shape, config.tiling)
    memories = [SymmetricMemory.allocate(size, shape.num_ranks, dist.group.WORLD) for size in sizes]
    return Rig(shape, config, list(zip(*memories, strict=True)))


def run_case(rig: Rig, name: str, tokens: int, routing: str, options: argparse.Namespace) -> list[ResultRow]:
    """Check and time every variant of one case."""
    topk, home = routes(rig.shape, tokens, routing)
    rig.place(home)
    align()
    each = [tokens] * rig.shape.num_ranks
    fixed, plan = rig.plan(topk, False), rig.plan(topk, True)
    say(
        f"{name} {tokens} tokens {routing}: kappa {kappa(plan.counts):.2f}, blocks {fixed.loads.tolist()} -> "
        f"{plan.loads.tolist()}, {plan.num_replicas} replicas, "
        f"{sum(rig.ranks[0].map.memory_use().values()) / 2**30:.2f} GiB a rank"
    )
    plans = {"fixed": (rig.tables(topk, fixed), False)}
    if plan.num_replicas:
        tables = rig.tables(topk, plan)
        plans |= {"staged": (tables, True), "pipelined": (tables, False)}
        plans["resident"] = (rig.tables(topk, dataclasses.replace(plan, transfers=plan.transfers[:0])), False)
    plans = {variant: plan for variant, plan in plans.items() if variant in options.variants}
    error = check(rig, each, topk, plans, f"{name} {tokens} {routing}")
    case: dict[str, Plain] = {
        "shape": name,
        "tokens_per_rank": tokens,
        "routing": routing,
        "ranks": rig.shape.num_ranks,
    }
    if rig.config.trace:
        return trace_rows(rig, each, plans, case)
    steps: dict[str, tuple[Callable[[], object], torch.cuda.Stream]] = {}
    for variant, (tables, staged) in plans.items():
        steps[variant] = (Steps(rig, each, tables, staged), rig.streams[0])
    if routing in options.peer_routings and options.peers:
        rig.load(plans["fixed"][0])
        align()
        rig.launch(each)
        torch.cuda.synchronize()
        at, expected = Gathered(rig, topk), rig.out[0][:tokens].clone()
        for peer, step in make_peers(options.peers, at, expected).items():
            steps[peer] = (step, torch.cuda.current_stream())
    timed = time_steps(rig, steps, set(VARIANTS) - set(options.sustained), options.span_ms)
    rows = result_rows(case, rig.shape, topk, (fixed, plan), timed)
    rows.append(ResultRow("layer_forward", {**case, "variant": "fixed"}, "relative_l2", error, "1"))
    failures = [failure for of_rank in gather(rig.failures()) for failure in of_rank]
    if failures:
        raise SystemExit(f"{name} {tokens} {routing}: {failures}")
    return rows


def time_steps(
    rig: Rig,
    steps: dict[str, tuple[Callable[[], object], torch.cuda.Stream]],
    burst_only: set[str],
    span_ms: float,
) -> dict[tuple[str, str], Sustained]:
    """Every step under both protocols: (protocol, variant) -> time, with clock and power where it is sustained."""
    timed: dict[tuple[str, str], Sustained] = {}
    for protocol in PROTOCOLS:
        for variant, (step, stream) in steps.items():
            if protocol == "sustained" and variant in burst_only:
                continue
            if isinstance(step, Steps):
                rig.load(step.tables)
            align()
            step()
            align()
            if protocol == "burst":
                timed[protocol, variant] = Sustained(burst_ms(step, stream), ())
            else:
                timed[protocol, variant] = sustained(step, stream, timed["burst", variant].ms, span_ms)
    return timed


def result_rows(
    case: Mapping[str, Plain],
    shape: LayerShape,
    topk: list[NDArray[np.int64]],
    plans: tuple[ReplicaPlan, ReplicaPlan],
    timed: dict[tuple[str, str], Sustained],
) -> list[ResultRow]:
    """What the times mean; ``plans`` are fixed and replicated."""
    fixed, plan = plans
    flops = 6 * shape.hidden * shape.intermediate * shape.top_k * int(case["tokens_per_rank"])
    rows: list[ResultRow] = []

    def add(variant: str, protocol: str, metric: str, value: float, unit: str, base: float | None = None) -> None:
        at = {**case, "variant": variant, "protocol": protocol}
        baseline = None if base is None else {"name": "fixed", "value": base}
        rows.append(ResultRow("layer_forward", at, metric, value, unit, baseline))

    for (protocol, variant), run in timed.items():
        base = timed[protocol, "fixed"].ms
        mine = fixed if variant == "fixed" or variant in PEERS else plan
        tflops = flops / run.ms * 1e-9
        add(variant, protocol, "latency_ms", run.ms, "ms", None if variant == "fixed" else base)
        add(variant, protocol, "tflops_per_gpu", tflops, "TFLOP/s")
        add(variant, protocol, "roofline_fraction", roofline_ms(shape, mine, topk) / run.ms, "1")
        if variant in ("staged", "pipelined"):
            add(variant, protocol, "speedup_over_fixed", base / run.ms, "1")
            add(variant, protocol, "ideal_speedup", fixed.max_load / plan.max_load, "1")
        rows += run.rows("layer_forward", {**case, "variant": variant, "protocol": protocol})
        state = "".join(f"  {row.value:.0f} {row.unit}" for row in run.rows("layer_forward", case))
        say(f"    {protocol:9s} {variant:26s} {run.ms:8.3f} ms {tflops:7.1f} TFLOP/s {base / run.ms:6.3f}x{state}")
    for protocol in PROTOCOLS:
        if {(protocol, variant) for variant in ("staged", "pipelined", "resident")} <= set(timed):
            staged, pipelined, resident = (timed[protocol, v].ms for v in ("staged", "pipelined", "resident"))
            if (hidden := hidden_pct(staged, pipelined, resident)) is not None:
                add("pipelined", protocol, "hidden_pct", hidden, "%")
                say(f"    {protocol:9s} separate transfer {staged - resident:.3f} ms, hidden {hidden:.0f} %")
    return rows


def trace_rows(rig: Rig, tokens: list[int], plans: Plans, case: Mapping[str, Plain]) -> list[ResultRow]:
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
    parser.add_argument("--sustained", nargs="*", default=list(VARIANTS), choices=VARIANTS, help="others: bursts only")
    parser.add_argument("--trace", action="store_true", help="record times inside the kernel instead")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: those that are installed")
    parser.add_argument("--peer-routings", nargs="*", default=ROUTINGS, choices=ROUTINGS, help="routings for peers")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer_forward.json")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if options.peers is None:
        options.peers, reasons = installed_peers()
        for reason in reasons:
            say(reason)
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


if __name__ == "__main__":
    main()
