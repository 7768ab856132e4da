"""Eight ranks on one GPU: the shape of MegaFlux figures 3 and 4, by number of experts, batch size and routing.

    python3 benchmarks/bench_layer_emulated.py

Every rank is a virtual rank with an eighth of the multiprocessors and a copy of its own of everything; links are the
GPU's memory. So the share of a step that the busiest rank decides is real, and what transfers cost is not: rows are
marked ``emulated``. The layer is the paper's, 7168/2048, top-8, a quarter of spare capacity; BF16 here.

A step is the whole layer: copies of the inputs, planner, forward kernel and combine, timed until the last rank ends;
the median of three, launches queued behind a pause. Variants: ``fixed``; ``pipelined``, replicas move in every batch;
``staged``, the same with the transfer in a launch of its own. Outputs of all three must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megaflux_kernels.worklist import LayerShape

from benchmarks import cases
from benchmarks.harness.figure import figure
from benchmarks.harness.rows import RESULTS, ResultRow, RunContext, write_results
from benchmarks.harness.table import print_table
from benchmarks.layer_workloads import ROUTINGS, routes
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors.megakernel import MegakernelExecutor
from megaflux_serve.layer import ReplicatedMoE
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.workspace import ExpertWeights, Workspace

RANKS, HIDDEN, INTERMEDIATE, TOP_K = 8, 7168, 2048, 8
REPEATS, PAUSE_CYCLES = 3, 20_000_000
START = time.monotonic()

Key = tuple[int, int, str]
"""Experts, tokens a rank, routing."""


def make_layer(experts: int, slots: int, max_tokens: int) -> ReplicatedMoE:
    """All ranks of the layer; weights depend on nothing but their expert's number."""
    executor = MegakernelExecutor(RANKS, None, max_tokens, timeout_s=10.0)
    config = MegaFluxConfig(replica_slots=slots, sticky=False, max_tokens=max_tokens)
    layout = config.slot_layout(experts, RANKS)
    generator, home = torch.Generator("cuda"), []
    for rank in range(RANKS):
        own = layout.experts_per_rank
        w13 = torch.empty(own, 2 * INTERMEDIATE, HIDDEN, device="cuda", dtype=torch.bfloat16)
        w2 = torch.empty(own, HIDDEN, INTERMEDIATE, device="cuda", dtype=torch.bfloat16)
        for index, expert in enumerate(layout.home_experts(rank)):
            generator.manual_seed(int(expert))
            w13[index].normal_(std=HIDDEN**-0.5, generator=generator)
            w2[index].normal_(std=INTERMEDIATE**-0.5, generator=generator)
        home.append(ExpertWeights(w13, w2))
    return ReplicatedMoE("moe", layout, config, executor, Workspace(layout.num_replica_slots), home)


def make_batches(experts: int, tokens: int, routing: str) -> list[RoutingBatch]:
    """One batch of every rank."""
    ids, _ = routes(LayerShape(RANKS, experts, 0, HIDDEN, INTERMEDIATE, TOP_K, tokens), tokens, routing)
    generator, batches = torch.Generator("cuda").manual_seed(5), []
    for of_rank in ids:
        rows = torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
        weights = torch.rand(tokens, TOP_K, generator=generator, device="cuda")
        topk = torch.from_numpy(of_rank).int().cuda()
        batches.append(RoutingBatch(rows, topk, weights / weights.sum(1, keepdim=True)))
    return batches


def digest(outputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Two sums over the bits of every output, one of them weighted by place."""
    sums = []
    for output in outputs:
        bits = output.view(torch.int16).flatten().long()
        place = torch.arange(len(bits), device=bits.device) % 65_521
        sums += [bits.sum(), (bits * place).sum()]
    return tuple(torch.stack(sums).tolist())


def step_ms(layer: ReplicatedMoE, batches: list[RoutingBatch]) -> float:
    """Median time of a step, milliseconds."""
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(PAUSE_CYCLES)
        begin.record()
        layer.forward(batches)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def run_experts(experts: int, options: argparse.Namespace) -> list[ResultRow]:
    """All batch sizes and routings for one number of experts; layers are made one after another to save memory."""
    times: dict[tuple[str, Key], float] = {}
    digests: dict[Key, tuple[int, ...]] = {}
    loads: dict[tuple[str, Key], int] = {}
    for slots in (0, experts // (4 * RANKS)):
        layer = make_layer(experts, slots, max(options.tokens))
        for tokens in options.tokens:
            for routing in options.routings:
                key, batches = (experts, tokens, routing), make_batches(experts, tokens, routing)
                outputs = digest(layer.forward(batches))
                if digests.setdefault(key, outputs) != outputs:
                    raise SystemExit(f"{key}: the replicated layer's outputs differ")
                variant = "pipelined" if slots else "fixed"
                loads[variant, key] = layer.on_device.last_plan().max_load
                times[variant, key] = step_ms(layer, batches)
                if slots:
                    layer.on_device.pipelined = False
                    if digest(layer.forward(batches)) != outputs:
                        raise SystemExit(f"{key}: the staged outputs differ")
                    times["staged", key] = step_ms(layer, batches)
                    layer.on_device.pipelined = True
        layer.on_device.last_plan()  # raises what a wait has left behind
        del layer
        torch.cuda.empty_cache()
    rows = []
    for key in digests:
        fixed = times["fixed", key]
        ideal = loads["fixed", key] / loads["pipelined", key]
        case = {"shape": f"{HIDDEN}x{INTERMEDIATE}", "experts": experts, "tokens_per_rank": key[1], "routing": key[2]}
        case |= {"ranks": RANKS, "emulated": True}
        for variant in ("fixed", "staged", "pipelined"):
            value, at = times[variant, key], {**case, "variant": variant}
            base = {"name": "fixed", "value": fixed} if variant != "fixed" else None
            rows.append(ResultRow("layer_emulated", at, "latency_ms", value, "ms", base))
            if variant != "fixed":
                rows.append(ResultRow("layer_emulated", at, "speedup_over_fixed", fixed / value, "1"))
                rows.append(ResultRow("layer_emulated", at, "ideal_speedup", ideal, "1"))
        gains = ", ".join(f"{v} {fixed / times[v, key]:.3f}x" for v in ("staged", "pipelined"))
        print(f"[{time.monotonic() - START:5.1f}] {key}: fixed {fixed:.2f} ms, {gains}, ideal {ideal:.3f}x", flush=True)
    return rows


def draw(rows: Sequence[ResultRow], path: Path) -> None:
    """Speed-up over fixed by tokens a rank: a panel a routing, a colour a number of experts, staged dashed."""
    gains = [row for row in rows if row.metric == "speedup_over_fixed"]
    routings, experts = (list(dict.fromkeys(row.case[name] for row in gains)) for name in ("routing", "experts"))
    title = "Speed-up over fixed placement, eight virtual ranks on one GPU (emulated)"
    with figure(path, len(routings), title=title, panel_inches=(2.9, 2.8)) as axes:
        for axis, routing in zip(axes, routings, strict=True):
            for color, number in enumerate(experts):
                for variant, style in (("pipelined", "-"), ("staged", "--")):
                    own = {"routing": routing, "experts": number, "variant": variant}
                    points = [
                        (row.case["tokens_per_rank"], row.value) for row in gains if own.items() <= row.case.items()
                    ]
                    label = f"E {number}, {variant}"
                    axis.plot(*zip(*points, strict=True), style, color=f"C{color}", marker="o", ms=3, label=label)
            axis.axhline(1.0, color="0.4", lw=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({row.case["tokens_per_rank"] for row in gains}))
            axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
            axis.set_ylim(0.9, 1.05 * max(row.value for row in gains))
            axis.set_title(str(routing))
            axis.set_xlabel("tokens a rank")
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096])
    real = [f"real-{band}" for band in ("low", "median", "high", "extreme")] if cases.families()[1] is None else []
    default = ["balanced", *real, "zipf-3", "zipf-6"]
    parser.add_argument("--routings", nargs="+", default=default, choices=ROUTINGS)
    parser.add_argument("--out", type=Path, default=RESULTS / "layer_emulated.json")
    options = parser.parse_args()
    if not real:
        print(cases.families()[1])
    rows = []
    for experts in options.experts:
        rows += run_experts(experts, options)
        context = RunContext.current(f"1 x {torch.cuda.get_device_name()}", "torch", "nvidia-cutlass-dsl")
        write_results(options.out, rows, context)
    print_table(rows, "layer_emulated")
    draw(rows, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
