"""The whole layer as an engine calls it: planned on the device, dispatched, computed, returned and combined.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_layer.py --shapes qwen3-30b-a3b --tokens 8192

One process a GPU, ``ReplicatedMoE`` on the megakernel executor, one batch captured into a CUDA graph and replayed:
copies of the inputs, planner, forward kernel and combine. Protocols are those of ``layer_timing``;
``bench_layer_forward`` times the forward kernel over tables made beforehand.

Variants: ``fixed``, no replica slots; ``moving``, every batch transfers the replicas that it uses; ``sticky``, replicas
stay, so that replays of one batch find them; ``gated``, moving where the gate expects it to pay, at costs that this run
has measured for the shape and batch size as ``megaflux calibrate`` does. Outputs of all must equal those of fixed bit
for bit before anything is timed.

Reported: latency_ms, tflops_per_gpu (6 H I k M over it), and speedup_over_fixed beside ideal_speedup, the ratio of the
busiest ranks' blocks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megaflux_kernels.worklist import LayerShape
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness.rows import RESULTS, Plain, ResultRow
from benchmarks.harness.table import print_table
from benchmarks.layer_pictures import draw_results
from benchmarks.layer_rig import expert_weights
from benchmarks.layer_timing import Sustained, align, burst_ms, gather, save, say, sustained
from benchmarks.layer_workloads import ROUTINGS, SHAPES, routes
from megaflux_serve.cli.measure import MeasuredShape, measure_costs
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors import select_executor
from megaflux_serve.layer import ReplicatedMoE
from megaflux_serve.planning import GateCosts
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.workspace import ExpertWeights, Workspace

VARIANTS = {"fixed": (False, True), "moving": (True, False), "sticky": (True, True), "gated": (True, False)}
"""Whether there are replica slots, and whether replicas stay."""


def make_layer(shape: LayerShape, config: MegaFluxConfig, home_rank: NDArray[np.int32] | None) -> ReplicatedMoE:
    """The layer on this rank with the weights of ``expert_weights``."""
    layout = config.slot_layout(shape.num_experts, shape.num_ranks, home_rank)
    pairs = [expert_weights(shape, int(expert), 0) for expert in layout.home_experts(dist.get_rank())]
    home = ExpertWeights(*(torch.stack(stack) for stack in zip(*pairs, strict=True)))
    executor = select_executor(config, shape.num_ranks, dist.group.WORLD)
    return ReplicatedMoE("moe", layout, config, executor, Workspace(layout.num_replica_slots), [home])


def capture(
    layer: ReplicatedMoE, batch: RoutingBatch, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """(graph of one batch, its output), after two batches that were not captured."""
    for _ in range(2):
        layer.forward_rank(batch)
    align()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = layer.forward_rank(batch)
    return graph, output


def make_batch(shape: LayerShape, topk: NDArray[np.int64]) -> RoutingBatch:
    """This rank's batch with these routes."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    weights = torch.rand(len(topk), shape.top_k, generator=generator, device="cuda")
    return RoutingBatch(
        torch.randn(len(topk), shape.hidden, generator=generator, device="cuda", dtype=torch.bfloat16),
        torch.from_numpy(topk).int().cuda(),
        weights / weights.sum(1, keepdim=True),
    )


def run_case(name: str, tokens: int, routing: str, options: argparse.Namespace, costs: GateCosts) -> list[ResultRow]:
    """Check and time every variant of one case."""
    experts, hidden, intermediate, top_k, slots = SHAPES[name]
    shape = LayerShape(dist.get_world_size(), experts, slots, hidden, intermediate, top_k, tokens)
    topk, home = routes(shape, tokens, routing)
    batch, stream = make_batch(shape, topk[dist.get_rank()]), torch.cuda.Stream()
    expected: Tensor | None = None
    timed: dict[tuple[str, str], Sustained] = {}
    loads: dict[str, int] = {}
    for variant, (replicated, sticky) in VARIANTS.items():
        config = MegaFluxConfig(
            executor="megakernel",
            replica_slots=slots if replicated else 0,
            sticky=sticky,
            max_tokens=max(options.tokens),
            gate=costs if variant == "gated" else None,
        )
        layer = make_layer(shape, config, home)
        graph, output = capture(layer, batch, stream)
        graph.replay()
        align()
        if expected is None:
            expected = output.clone()
        different = sum(gather(int((expected.view(torch.int16) != output.view(torch.int16)).sum())))
        if different or not bool(torch.isfinite(expected).all()):
            raise SystemExit(f"{name} {tokens} {routing} {variant}: {different} values differ from fixed")
        assert layer.on_device is not None
        plan = layer.on_device.last_plan()
        loads[variant] = plan.max_load
        say(
            f"{name} {tokens} {routing} {variant}: blocks {plan.loads.tolist()}, {len(plan.transfers)} transfers, "
            f"{torch.cuda.mem_get_info()[0] / 2**30:.0f} GiB free"
        )
        burst = Sustained(burst_ms(graph.replay, stream, repeats=3), ())
        timed["burst", variant] = burst
        timed["sustained", variant] = sustained(graph.replay, stream, burst.ms, options.span_ms)
        layer.on_device.last_plan()  # raises what a wait has left behind
        del layer, graph, output
        torch.cuda.empty_cache()
    case: dict[str, Plain] = {"shape": name, "tokens_per_rank": tokens, "routing": routing, "ranks": shape.num_ranks}
    return result_rows(case, 6 * hidden * intermediate * top_k * tokens, timed, loads)


def result_rows(
    case: Mapping[str, Plain], flops: int, timed: dict[tuple[str, str], Sustained], loads: dict[str, int]
) -> list[ResultRow]:
    """What the times of (protocol, variant) mean; ``flops`` are a rank's, ``loads`` the busiest rank's blocks."""
    rows = []
    for (protocol, variant), run in timed.items():
        at, fixed = {**case, "variant": variant, "protocol": protocol}, timed[protocol, "fixed"].ms
        base = {"name": "fixed", "value": fixed} if variant != "fixed" else None
        tflops = flops / run.ms * 1e-9
        rows.append(ResultRow("layer", at, "latency_ms", run.ms, "ms", base))
        rows.append(ResultRow("layer", at, "tflops_per_gpu", tflops, "TFLOP/s"))
        rows += run.rows("layer", at)
        if variant != "fixed":
            rows.append(ResultRow("layer", at, "speedup_over_fixed", fixed / run.ms, "1"))
            rows.append(ResultRow("layer", at, "ideal_speedup", loads["fixed"] / loads[variant], "1"))
        say(f"    {protocol:9s} {variant:8s} {run.ms:8.3f} ms {tflops:7.1f} TFLOP/s {fixed / run.ms:6.3f}x")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--routings", nargs="+", default=["balanced"], choices=ROUTINGS)
    parser.add_argument("--span-ms", type=float, default=250, help="timed part of a sustained run")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer.json")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    assert dist.group.WORLD is not None
    rows = []
    for name in options.shapes:
        for tokens in options.tokens:
            costs = measure_costs(MeasuredShape(*SHAPES[name], tokens), dist.group.WORLD, max(options.tokens))
            say(f"{name} {tokens}: {costs}")
            torch.cuda.empty_cache()
            for routing in options.routings:
                rows += run_case(name, tokens, routing, options, costs)
            save(options.out, rows)
    if dist.get_rank() == 0:
        print_table(rows, "layer")
        draw_results(rows, options.out.with_suffix(".png"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
