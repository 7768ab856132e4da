"""Launch choices of the forward megakernel, one after another on the same batches.

    torchrun --standalone --nproc-per-node 2 benchmarks/sweep_layer_forward.py --shapes deepseek-v3-e64

Protocols and checks are those of ``bench_layer_forward``; the defaults of ``Tiling`` follow from what this prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megaflux_kernels.combine import compile_combine
from megaflux_kernels.forward import compile_forward, shared_config
from megaflux_kernels.transfer import compile_transfer
from megaflux_kernels.worklist import LayerShape, Tiling

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.bench_layer_forward import make_rig, run_case
from benchmarks.harness.rows import RESULTS
from benchmarks.layer_timing import save, say
from benchmarks.layer_workloads import ROUTINGS, SHAPES

CHOICES = {
    "groups-8": Tiling(group_blocks=8),
    "groups-16": Tiling(group_blocks=16),
    "groups-32": Tiling(group_blocks=32),
    "lag-400": Tiling(lag=400),
}


def compile_all(options: argparse.Namespace) -> None:
    """Compile what a run of two ranks needs, which saves three seconds of GPU time a choice; CUTE_DSL_ARCH=sm_90a."""
    for name in options.shapes:
        experts, hidden, intermediate, top_k, slots = SHAPES[name]
        shape = LayerShape(2, experts, slots, hidden, intermediate, top_k, options.tokens)
        compile_combine(hidden, top_k)
        for choice in options.choices:
            compile_forward(shape, dataclasses.replace(shared_config(), tiling=CHOICES[choice]))
            compile_transfer(shape, CHOICES[choice])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=CHOICES)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--routings", nargs="+", default=["balanced"], choices=ROUTINGS)
    parser.add_argument("--span-ms", type=float, default=150, help="timed part of a sustained run")
    parser.add_argument("--trace", action="store_true", help="record times inside the kernel instead")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer_forward_sweep.json")
    parser.add_argument("--compile", action="store_true", help="only fill the kernel cache; needs no GPU")
    options = parser.parse_args()
    if options.compile:
        compile_all(options)
        return
    options.variants = options.sustained = ("fixed",)
    options.peers = options.peer_routings = ()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = []
    for choice in options.choices:
        config = dataclasses.replace(shared_config(), tiling=CHOICES[choice], trace=options.trace)
        for name in options.shapes:
            say(f"{name}: {choice}")
            rig = make_rig(name, options.tokens, config)
            for routing in options.routings:
                for row in run_case(rig, name, options.tokens, routing, options):
                    rows.append(
                        dataclasses.replace(row, bench=f"{row.bench}_sweep", case={**row.case, "choice": choice})
                    )
            del rig
            torch.cuda.empty_cache()
            save(options.out, rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
