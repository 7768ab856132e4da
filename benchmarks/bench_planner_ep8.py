"""The device planner on eight ranks over MegaFlux's grid, on one to eight GPUs; what is timed, ``bench_planner`` says.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_planner_ep8 --out planner_ep8.json

The forward tables are those of the paper's layer, one realisation a routing. With fewer than eight GPUs each process
plans for several virtual ranks in one launch, with a share of the multiprocessors each, and rows are marked
``emulated``.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.bench_planner import Setting, run
from benchmarks.ep8_grid import HIDDEN, INTERMEDIATE, RANKS, add_options, join
from benchmarks.harness import RESULTS, ResultRow, RunContext, print_table, write_results

BENCH = "planner_ep8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{BENCH}.json")
    options = parser.parse_args()
    group = join()
    gpus = dist.get_world_size(group)
    context = RunContext.current(f"{gpus} x {torch.cuda.get_device_name()}", "torch", "nvidia-cutlass-dsl", "numba")
    rows: list[ResultRow] = []
    for experts in options.experts:
        settings = [Setting(experts, tokens, routing) for tokens in options.tokens for routing in options.routings]
        new = run(group, RANKS, settings, (HIDDEN, INTERMEDIATE))
        rows += [dataclasses.replace(row, bench=BENCH) for row in new]
        if dist.get_rank(group) == 0:
            write_results(options.out, rows, context)
    if dist.get_rank(group) == 0:
        print_table(rows, "Device planner, eight ranks")
    dist.barrier(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
