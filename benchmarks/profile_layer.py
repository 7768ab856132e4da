"""One rank's launches at a real shape, for Nsight Compute; its replays of a kernel allow no rank to wait for another.

    ncu --metrics ... -k regex:Forward python3 benchmarks/profile_layer.py --shape qwen3-30b-a3b

The rank holds the experts that each of two ranks would hold and serves a balanced batch of as many rows, all its own:
the products and the traffic of its memory are those of a rank of two, without the link.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megaflux_kernels.worklist import LayerShape

from benchmarks.layer_rig import draw_routes, virtual_rig
from benchmarks.layer_workloads import SHAPES

SHARE = 2
"""Ranks that the experts would be spread over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--launches", type=int, default=3)
    options = parser.parse_args()
    experts, hidden, intermediate, top_k, _ = SHAPES[options.shape]
    shape = LayerShape(1, experts // SHARE, 0, hidden, intermediate, top_k, options.tokens)
    rig = virtual_rig(shape, timeout_s=60.0)
    topk = draw_routes(shape, [options.tokens], seed=17)
    rig.load(rig.tables(topk, rig.plan(topk, False)))
    for _ in range(options.launches):
        rig.launch([options.tokens])
    torch.cuda.synchronize()
    if rig.failures():
        raise SystemExit(rig.failures())
    errors = max(rig.errors(topk)[0])
    weights = shape.slots * 6 * hidden * intermediate
    print(f"{options.shape}: {dataclasses.asdict(shape)}, weights {weights / 2**20:.0f} MiB, relative L2 {errors:.5f}")


if __name__ == "__main__":
    main()
