"""Experts that move to a window's placement, weights and optimizer state, beside the bare exchange of their bytes.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_migration              NCCL on GPUs, gloo without
    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_migration --layers 2 --scale 8

A rank holds E/P experts a layer of Qwen3-30B-A3B's shape (or a part of its width, ``--scale``): BF16 weights, float32
main weights and Adam's two moments, 14 bytes a parameter. The placement goes from the identity to RoutePack's repair
for Zipf loads, and back; each is checked expert by expert before anything is timed. The slowest rank counts, the
median of several; the peer exchanges the same tensors in one batch, without anything staged or agreed.

Reported: migration_ms; received_gbps, what the busiest rank received over it; both by ``staging``, the layers that may
wait beside the slots at a time; and num_moved, experts that move.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import Plain, ResultRow, RunContext, cpu_name, print_table, write_results
from benchmarks.harness.rows import RESULTS
from megaflux_serve.messages import Message, exchange
from megaflux_serve.migration import ExpertState, TransferPlan, logical_experts, migrate
from megaflux_serve.planning.workload import permute, scale_counts, zipf_shares
from megaflux_serve.routepack.placement import Placement, repair_placement

BENCH = "migration"
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, KAPPA = 128, 2048, 768, 8, 3.0
TENSORS = {"weight": torch.bfloat16, "main": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
TIMEOUT_S = 60.0


def placements(layers: int, num_ranks: int) -> tuple[Placement, Placement]:
    """(identity, what RoutePack repairs it to for Zipf loads that differ by layer)."""
    shares = zipf_shares(EXPERTS, KAPPA)
    loads = np.stack([permute(scale_counts(shares, 65536, TOP_K), seed) for seed in range(layers)]).astype(np.int64)
    before = Placement.identity(layers, EXPERTS, num_ranks)
    return before, repair_placement(loads, before)


def make_state(placement: Placement, rank: int, parameters: int, device: torch.device) -> ExpertState:
    """Every tensor holds the number of its expert."""
    extents = placement.experts_per_rank, parameters
    layers = range(len(placement.slots))
    state = ExpertState.of(
        {n: [torch.empty(extents, dtype=t, device=device) for _ in layers] for n, t in TENSORS.items()}
    )
    for _, expert, tensors in logical_experts(state, placement, rank):
        for tensor in tensors.values():
            tensor.fill_(expert)
    return state


def check(state: ExpertState, placement: Placement, rank: int) -> None:
    """Stop the run unless every slot holds the expert that the placement says."""
    for layer, expert, tensors in logical_experts(state, placement, rank):
        for name, tensor in tensors.items():
            if not bool((tensor == expert).all()):
                raise SystemExit(f"rank {rank}, layer {layer}: {name} of expert {expert} is another's")


def bare_exchange(state: ExpertState, plan: TransferPlan, group: dist.ProcessGroup) -> Callable[[], object]:
    """The same tensors, all at once, into memory that is there."""
    rank, per_rank = dist.get_rank(group), plan.before.experts_per_rank
    outgoing, incoming = list[Message](), list[Message]()
    for (layer, _, old, new), source, destination in zip(plan.moves.tolist(), *plan.ranks(plan.moves), strict=True):
        if source == rank != destination:
            outgoing += [(int(destination), tensor) for tensor in state.slot(layer, old % per_rank)]
        if destination == rank != source:
            incoming += [(int(source), torch.empty_like(tensor)) for tensor in state.slot(layer, new % per_rank)]
    return lambda: exchange(group, "bare", outgoing, incoming, TIMEOUT_S)


def slowest_ms(step: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    """Milliseconds of a step on the slowest rank."""
    dist.barrier(group)
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    times: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(times, 1000 * (time.perf_counter() - begin), group=group)
    return max(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--scale", type=int, default=1, help="divides the parameters of an expert")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{BENCH}.json")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    before, after = placements(options.layers, num_ranks)
    state = make_state(before, rank, 3 * HIDDEN * INTERMEDIATE // options.scale, device)
    there, back = TransferPlan(before, after), TransferPlan(after, before)
    layer_bytes = int(there.traffic().staged.max()) * state.expert_bytes
    received = int(there.traffic().received.max()) * state.expert_bytes
    case: dict[str, Plain] = {"ranks": num_ranks, "layers": options.layers, "experts": EXPERTS}
    case["expert_mib"] = state.expert_bytes / 2**20
    rows = [ResultRow(BENCH, case, "num_moved", float(len(there.moves)), "1")]
    bare = bare_exchange(state, there, group)
    ms = float(np.median([slowest_ms(bare, group, device) for _ in range(1 + options.repeats)][1:]))
    rows += result_rows(case | {"variant": "bare exchange"}, ms, received, None)
    for layers in dict.fromkeys((1, options.layers)):
        times = []
        for plan in (there, back) * (1 + options.repeats):
            move = partial(migrate, state, plan, group, layers * layer_bytes)
            times.append(slowest_ms(move, group, device))
            check(state, plan.after, rank)
        rows += result_rows(case | {"variant": "migrate", "staging": layers}, float(np.median(times[2:])), received, ms)
    if rank == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
        write_results(
            options.out, rows, RunContext.current(f"{num_ranks} x {name}" if device.type == "cuda" else name, "torch")
        )
        print_table(rows, BENCH)
    dist.barrier()
    dist.destroy_process_group()


def result_rows(case: Mapping[str, Plain], ms: float, received: int, bare_ms: float | None) -> list[ResultRow]:
    """Time and rate of one variant."""
    base = None if bare_ms is None else {"name": "bare exchange", "value": bare_ms}
    return [
        ResultRow(BENCH, case, "migration_ms", ms, "ms", base),
        ResultRow(BENCH, case, "received_gbps", received / ms * 1e-6, "GB/s"),
    ]


if __name__ == "__main__":
    main()
