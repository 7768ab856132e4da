"""Windows for the RoutePack benchmarks: synthetic ones shaped like the paper's corpus, and a real one of gpt-oss-20b.

The paper's replay corpus is not public. ``synthetic_windows`` draws windows of its shape (Table 3: 64 prompts with
eight rollouts each, 23 x 128 and 40 x 512 experts, four task kinds in its mix) from a log-normal routing model. An
expert's share in a trajectory is the softmax of a common taste, a task's, a prompt's and a little noise; tastes have a
part that all experts of a rank share, which is what makes ranks uneven. Length follows prompt and task through a
Gaussian copula with the paper's quantiles, prompts of like length being spread over the data-parallel slots. Common
tastes drift from window to window, so that a placement ages.

The eight parameters of each model were fitted, by random search and by hand, to what the paper says of its corpus
before any scheduling, under identity placement with 8 ranks and DP-local FFD. Paper, and here in brackets (three
windows):

=====================================  ===============  ===============
                                       Tiny             Flash
=====================================  ===============  ===============
length P50 / P95                       7298 / 7890      3178 / 7323
hottest expert, times its share        6.5 (6.5)        10.2 (8.8)
worst rank of a layer, max / mean      2.35 (2.40)      1.64 (1.73)
global expert excess, %                61.2 (61.2)      36.0 (36.8)
row-local excess, %                    9.4 (9.7)        3.2 (3.3)
row-local excess after Reroute, %      23.2 (22.8)      11.4 (12.4)
rows of DP-local FFD                   63.3 (63.7)      31.7 (32.5)
expert cost that global FFD adds, %    13.0 (4.0)       5.8 (3.5)
=====================================  ===============  ===============

The last line could not be met together with the others. The drift is set so that the paper's own repair moves about as
many experts a window as its Table 5 says. Synthetic windows show what a planner does with such statistics, not what it
would do with that corpus.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.routepack import CostModel, Demand, DenseStage, Topology, stages_from_shape

TOPOLOGY = Topology(num_ranks=8, num_slots=8, capacity=8192)
"""DP = EP = 8, EDP = 1, 8192-token cells: section 4.2 and appendix K."""
PROMPTS, ROLLOUTS = 64, 8
QUANTILE_LEVELS = (0.0, 0.05, 0.09, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Model:
    """One routing model.

    Attributes:
        name: ``tiny`` or ``flash``.
        num_layers, num_experts, top_k: shape of the router.
        cost: the paper's dense-side coefficients (appendix K).
        mix: shares of math, code, STEM and logic prompts.
        quantiles: lengths at ``QUANTILE_LEVELS``; the median and the 95th are the paper's.
        taste, rank_taste: spread of the common taste by expert, and by rank.
        task, rank_task, prompt, rank_prompt: the same for tasks and prompts.
        prompt_length, task_length: how much of a length the prompt decides (0 to 1), and spread between tasks.
        drift: spread of the change of the common taste between windows.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    cost: CostModel
    mix: tuple[float, ...]
    quantiles: tuple[int, ...]
    taste: float
    rank_taste: float
    task: float
    rank_task: float
    prompt: float
    rank_prompt: float
    prompt_length: float
    task_length: float
    drift: float
    noise: float = 0.12


TINY = Model(
    "tiny", 23, 128, 8,
    CostModel((DenseStage("kda+ffn", 148.689), DenseStage("mla", 42.896, 53.333))),
    (0.587, 0.152, 0.221, 0.041),
    (100, 700, 6600, 7150, 7298, 7650, 7890, 8192),
    taste=0.52, rank_taste=0.24, task=0.34, rank_task=0.46, prompt=0.16, rank_prompt=0.32,
    prompt_length=0.97, task_length=1.2, drift=0.042,
)  # fmt: skip
FLASH = Model(
    "flash", 40, 512, 8,
    CostModel((DenseStage("kda+ffn", 155.017), DenseStage("mla", 27.803, 24.889))),
    (0.564, 0.155, 0.236, 0.045),
    (800, 1300, 1480, 2200, 3178, 4900, 7323, 8192),
    taste=0.6, rank_taste=0.17, task=0.4, rank_task=0.17, prompt=0.2, rank_prompt=0.34,
    prompt_length=0.95, task_length=0.2, drift=0.038,
)  # fmt: skip
MODELS = {model.name: model for model in (TINY, FLASH)}


def synthetic_windows(model: Model, count: int, seed: int = 0) -> Iterator[Demand]:
    """``count`` consecutive windows of 512 trajectories; the same seed gives the same windows."""
    rng = np.random.default_rng(seed)
    common = _taste(rng, model, 1, model.taste, model.rank_taste)[0]
    tasks = _taste(rng, model, len(model.mix), model.task, model.rank_task)
    task_length = rng.normal(0, model.task_length, len(model.mix))
    for _ in range(count):
        common = common + rng.normal(0, model.drift, common.shape)
        task = rng.choice(len(model.mix), p=np.array(model.mix) / sum(model.mix), size=PROMPTS)
        lengths, task = _lengths(rng, model, task, task_length)
        prompts = _taste(rng, model, PROMPTS, model.prompt, model.rank_prompt)
        counts = np.empty((PROMPTS * ROLLOUTS, model.num_layers, model.num_experts), dtype=np.int32)
        for i, length in enumerate(lengths):
            group = i // ROLLOUTS
            logits = common + tasks[task[group]] + prompts[group] + rng.normal(0, model.noise, common.shape)
            counts[i] = _routed(rng, logits, int(length), model.top_k)
        yield Demand.of(counts, lengths)


def _taste(
    rng: np.random.Generator, model: Model, count: int, spread: float, rank_spread: float
) -> NDArray[np.float64]:
    """float64 [count, L, E] logits: independent by expert, and shared by the experts of a rank."""
    shape = (count, model.num_layers, TOPOLOGY.num_ranks)
    shared = np.repeat(rng.normal(0, rank_spread, shape), model.num_experts // TOPOLOGY.num_ranks, axis=2)
    return rng.normal(0, spread, (count, model.num_layers, model.num_experts)) + shared


def _lengths(
    rng: np.random.Generator, model: Model, task: NDArray[np.int64], task_length: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths [512] and the tasks [64] of the prompts in their final order: of every eight prompts of like length, each
    data-parallel slot gets one."""
    latent = task_length[task] + math.sqrt(model.prompt_length) * rng.normal(size=PROMPTS)
    order = rng.permuted(np.argsort(-latent).reshape(-1, TOPOLOGY.num_slots), axis=1).reshape(-1)
    own = math.sqrt(1 - model.prompt_length) * rng.normal(size=PROMPTS * ROLLOUTS)
    z = np.repeat(latent[order], ROLLOUTS) + own
    level = (np.argsort(np.argsort(z)) + rng.random(z.size)) / z.size
    quantiles = np.array(model.quantiles) * (1 + 0.01 * rng.normal())
    quantiles[-1] = model.quantiles[-1]
    return np.interp(level, QUANTILE_LEVELS, quantiles).clip(1, TOPOLOGY.capacity).astype(np.int64), task[order]


def _routed(rng: np.random.Generator, logits: NDArray[np.float64], length: int, top_k: int) -> NDArray[np.int32]:
    """int32 [L, E] rows of one trajectory: ``top_k * length`` a layer, no expert above ``length``."""
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = np.minimum(shares / shares.sum(axis=1, keepdims=True), 0.7 / top_k)
    counts = rng.multinomial(top_k * length, shares / shares.sum(axis=1, keepdims=True)).astype(np.int32)
    for layer, expert in np.argwhere(counts > length):
        counts[layer, counts[layer].argmin()] += counts[layer, expert] - length
        counts[layer, expert] = length
    return counts


def gptoss_routes() -> Path:
    """Where the gpt-oss-20b trace is, or would be: ``MEGAFLUX_TRACES``, by default ``../shared/traces``."""
    root = Path(os.environ.get("MEGAFLUX_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
    return root / "gptoss20b" / "routed_experts.npz"


GPTOSS_TOPOLOGY = Topology(num_ranks=8, num_slots=8, capacity=1024)
"""Cells of 1024 tokens: trajectories hold at most 512 generated tokens, median 300."""
GPTOSS_COST = CostModel(stages_from_shape(24, 2880, 2880, 4096, 1024))
"""24 layers, hidden 2880, expert width 2880, 64 heads of 64."""
