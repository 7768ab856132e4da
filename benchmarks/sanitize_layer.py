"""A small layer to run under compute-sanitizer: every kernel, several batches, with and without replicas.

    compute-sanitizer --tool memcheck python3 benchmarks/sanitize_layer.py --ranks 1

All ranks are virtual ranks of one GPU. Inputs and comparisons are the host's, so that hardly a kernel but the layer's
own is checked. Waits are given a minute, since the tools slow the kernels down that others wait for.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors.megakernel import MegakernelExecutor
from megaflux_serve.layer import ReplicatedMoE
from megaflux_serve.routing import RoutingBatch
from megaflux_serve.workspace import ExpertWeights, Workspace

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, MAX_TOKENS = 8, 320, 192, 2, 300
TIMEOUT_S = 60.0


def host_layer(executor: MegakernelExecutor, slots: int) -> ReplicatedMoE:
    """A layer whose weights the host has drawn; the same for every number of slots."""
    config = MegaFluxConfig(replica_slots=slots, max_tokens=MAX_TOKENS)
    layout = config.slot_layout(EXPERTS, executor.num_ranks)
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator).bfloat16() * HIDDEN**-0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator).bfloat16() * INTERMEDIATE**-0.5
    homes = [torch.from_numpy(layout.home_experts(rank)).long() for rank in executor.local_ranks]
    home = [ExpertWeights(w13[experts].cuda(), w2[experts].cuda()) for experts in homes]
    return ReplicatedMoE("moe", layout, config, executor, Workspace(layout.num_replica_slots), home)


def host_batch(rank: int, tokens: int, seed: int) -> RoutingBatch:
    """Skewed routes to the lowest ids, drawn on the host."""
    rng = np.random.default_rng([seed, rank])
    scores = rng.gumbel(size=(tokens, EXPERTS)) - 1.5 * np.arange(EXPERTS) * (seed % 2)
    ids = np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)
    rows = torch.from_numpy(rng.standard_normal((tokens, HIDDEN), dtype=np.float32)).bfloat16()
    weights = torch.full((tokens, TOP_K), 1 / TOP_K)
    return RoutingBatch(rows.cuda(), torch.from_numpy(ids).cuda(), weights.cuda())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=1, help="virtual ranks on this GPU")
    ranks = parser.parse_args().ranks
    begin = time.monotonic()
    executor = MegakernelExecutor(ranks, None, MAX_TOKENS, TIMEOUT_S)
    fixed, replicated = host_layer(executor, 0), host_layer(executor, 2)
    for seed, sizes in enumerate(([MAX_TOKENS] * ranks, [1] + [77] * (ranks - 1), [0] * ranks, [130] * ranks)):
        batches = [host_batch(rank, tokens, seed) for rank, tokens in enumerate(sizes)]
        outputs = [[output.cpu() for output in layer.forward(batches)] for layer in (fixed, replicated)]
        assert replicated.on_device is not None
        plan = replicated.on_device.last_plan()
        for one, other in zip(*outputs, strict=True):
            if not torch.equal(one, other) or not bool(torch.isfinite(one.float()).all()):
                raise SystemExit(f"batch {seed}: the layers differ")
        print(
            f"batch {seed}: {sizes} tokens, {plan.num_replicas} replicas, {time.monotonic() - begin:.1f} s", flush=True
        )


if __name__ == "__main__":
    main()
