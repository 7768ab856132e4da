"""Twenty thousand launches in a row, every one another batch, every one compared bit for bit.

    torchrun --standalone --nproc-per-node 2 benchmarks/stress_layer.py

One process a GPU, planned on the device. Routes are drawn on the device from a distribution that changes with every
launch: uniform, Zipf of several slopes, a few hot experts, all rows to one expert; batches of all sizes, ranks without
rows and with one, unequal ranks. Each batch goes through a layer without replica slots and through one with, whose
replicas stay or move in turn; a rank counts the values that differ on the device and looks at them once in a while.
Every 500th output is compared with float64 as well. A failed wait ends the run with its rank, phase and slot. A run of
limited time says how many launches it made.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.harness.rows import RESULTS, ResultRow
from benchmarks.layer_timing import align, gather, save, say
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors import DeviceExecutor, select_executor
from megaflux_serve.routing import RoutingBatch
from tests.kernels.layer_cases import LIMIT, DeviceCase

CASE = DeviceCase(num_experts=32, num_ranks=2, num_slots=4, hidden=512, intermediate=256, top_k=4, max_tokens=2048)
LOOK, EXACT = 100, 500
"""Launches between two looks at differences and clock, and between two comparisons with float64."""


class Batches:
    """An endless sequence of batches of one rank; sizes from the host, routes and rows from the device."""

    def __init__(self, case: DeviceCase, rank: int) -> None:
        self.case, self.rank = case, rank
        self.sizes, self.shared = np.random.default_rng(rank), np.random.default_rng(12345)
        self.generator = torch.Generator("cuda").manual_seed(rank)
        self.popularity = torch.zeros(case.num_experts, device="cuda")

    def num_tokens(self) -> int:
        """Nothing, one row, a full batch, or any size, small ones more often."""
        kind = self.sizes.integers(10)
        if kind < 3:
            return (0, 1, self.case.max_tokens)[kind]
        return int(self.case.max_tokens * self.sizes.random() ** 2)

    def scores(self, tokens: int) -> Tensor:
        """float32 [tokens, E]; the favourites are those of all ranks, their order changes with every launch."""
        case, kind = self.case, self.shared.integers(5)
        order = torch.from_numpy(self.shared.permutation(case.num_experts)).cuda(non_blocking=True)
        place = order.float()
        if kind == 0:
            popularity = self.popularity
        elif kind < 3:
            popularity = -float(1 + kind) * torch.log1p(place)
        elif kind == 3:
            popularity = 6.0 * (place < case.top_k)
        else:
            popularity = 1e4 * (place == 0)
        uniform = torch.rand(tokens, case.num_experts, generator=self.generator, device="cuda")
        return popularity - torch.log(-torch.log(uniform.clamp(1e-6, 1 - 1e-6)))

    def __next__(self) -> RoutingBatch:
        tokens, case = self.num_tokens(), self.case
        ids = self.scores(tokens).topk(case.top_k, dim=1).indices.int()
        rows = torch.randn(tokens, case.hidden, dtype=torch.bfloat16, generator=self.generator, device="cuda")
        weights = torch.rand(tokens, case.top_k, generator=self.generator, device="cuda")
        return RoutingBatch(rows, ids, weights / weights.sum(1, keepdim=True))


def run(case: DeviceCase, launches: int, seconds: float) -> list[ResultRow]:
    """All launches, or as many as the seconds allow; the counts as rows."""
    rank = dist.get_rank()
    config = MegaFluxConfig(executor="megakernel", replica_slots=case.num_slots, max_tokens=case.max_tokens)
    executor = select_executor(config, case.num_ranks, dist.group.WORLD)
    assert isinstance(executor, DeviceExecutor)
    options = (config.model_copy(update={"replica_slots": 0}), config, config.model_copy(update={"sticky": False}))
    fixed, sticky, moving = (case.layer(executor, option) for option in options)
    batches, differ = Batches(case, rank), torch.zeros(LOOK, dtype=torch.int64, device="cuda")
    errors, sizes, replicas, begin = [0.0], [], 0, time.monotonic()
    align()
    for launch in range(launches):
        batch = next(batches)
        sizes.append(len(batch.hidden))
        layer = moving if launch % 2 else sticky
        expected, output = fixed.forward_rank(batch), layer.forward_rank(batch)
        differ[launch % LOOK] = (expected.view(torch.int16) != output.view(torch.int16)).sum()
        if launch % EXACT == 0:
            errors += case.errors([batch], [output])
        if launch % LOOK == LOOK - 1:
            assert layer.on_device is not None
            replicas += layer.on_device.last_plan().num_replicas
            found = [(launch - LOOK + 1 + i, count) for i, count in enumerate(differ.tolist()) if count]
            if found or not max(errors) < LIMIT:
                words = ", ".join(f"{count} values of launch {i} ({sizes[i]} tokens)" for i, count in found)
                raise SystemExit(f"rank {rank}: different are {words or 'none'}; relative L2 {max(errors)}")
            if max(gather(time.monotonic() - begin)) > seconds:
                launches = launch + 1
                break
    torch.cuda.synchronize()
    assert moving.on_device is not None
    moving.on_device.last_plan()  # raises what a wait has left behind
    total, differing, worst, elapsed, seen = zip(
        *gather((sum(sizes), int(differ.sum()), max(errors), time.monotonic() - begin, replicas)), strict=True
    )
    if sum(differing) or not max(worst) < LIMIT or not max(seen):
        raise SystemExit(f"{sum(differing)} values differ, relative L2 {max(worst)}, {max(seen)} replicas in samples")
    at = {"ranks": case.num_ranks, "experts": case.num_experts, "hidden": case.hidden, "top_k": case.top_k}
    values = (
        ("launches", float(launches), "1"),
        ("launches_in_all", 2.0 * launches, "1"),
        ("rows", float(sum(total)), "1"),
        ("values_that_differ", float(sum(differing)), "1"),
        ("relative_l2_max", max(worst), "1"),
        ("elapsed_s", max(elapsed), "s"),
    )
    return [ResultRow("layer_stress", at, metric, value, unit) for metric, value, unit in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--launches", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many, at the next look")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer_stress.json")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = run(replace(CASE, num_ranks=dist.get_world_size()), options.launches, options.seconds)
    for row in rows:
        say(f"{row.metric}: {row.value:g}")
    save(options.out, rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
