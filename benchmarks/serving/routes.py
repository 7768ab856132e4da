"""A real routing trace as a table: the experts of every token id, layer by layer.

Decides how the trace's skew reaches a served model whose weights are random: token id t is routed as token t of the
trace. A prompt of consecutive ids is then routed as that stretch of the trace, wherever it runs, however it is chunked
and batched, so all backends get the same routes and a histogram can be predicted exactly.

The trace is cut into windows of ``cases.EVENT_TOKENS`` tokens. A window's histogram of a layer is resized to E experts
(MegaFlux appendix B.1; here with one order of experts for all windows, so that an expert that stays hot stays the same
expert), scaled to top-k, and realised exactly. A model's layers take the trace's layers at even distances.

* ``real``: experts in an order drawn once a layer, as they fall on homes.
* ``real-hot-rank``: the same histograms with a layer's hottest experts on rank 0, the next on rank 1, and so on: the
  worst placement.
* ``balanced``: all experts alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks import cases
from benchmarks.serving.models import NUM_WINDOWS, ServedModel
from megaflux_serve.errors import ConfigError
from megaflux_serve.planning import workload
from megaflux_serve.routing import CountArray, expert_counts
from megaflux_serve.trace import read_trace

ROUTINGS = ("balanced", "real", "real-hot-rank")

RouteTable = NDArray[np.int16]
"""[layers, vocabulary, k] expert ids, distinct in a row."""


def route_table(model: ServedModel, routing: str) -> RouteTable:
    """The table of one routing; the same arguments give the same table.

    Args:
        model: to be served.
        routing: one of ``ROUTINGS``.

    Raises:
        InputError: the trace is missing.
    """
    windows: NDArray[np.int64]
    if routing == "balanced":
        windows = np.ones((model.layers, NUM_WINDOWS, 1), dtype=np.int64)
    else:
        windows = window_histograms(model.layers)
    length = model.vocabulary // NUM_WINDOWS
    table = np.empty((model.layers, model.vocabulary, model.top_k), dtype=np.int16)
    for layer, histograms in enumerate(windows):
        for window, shares in enumerate(expert_shares(histograms, model.experts, routing, layer)):
            counts = workload.scale_counts(shares, length, model.top_k)
            seed = layer * NUM_WINDOWS + window
            table[layer, window * length :][:length] = workload.realise_routes(counts, 1, model.top_k, seed)[0]
        whole = NUM_WINDOWS * length
        table[layer, whole:] = table[layer, : model.vocabulary - whole]
    return table


def window_histograms(num_layers: int) -> NDArray[np.int64]:
    """int64 [layers, windows, E0]: assignments by expert of the trace's model, of layers at even distances."""
    layers = read_trace(cases.GPT_OSS).layers
    chosen = [layers[i * len(layers) // num_layers] for i in range(num_layers)]
    return np.array([list(layer.batches(cases.EVENT_TOKENS))[:NUM_WINDOWS] for layer in chosen])


def expert_shares(histograms: NDArray[np.int64], num_experts: int, routing: str, layer: int) -> NDArray[np.float64]:
    """float64 [windows, E], each summing to 1: the load distribution of one layer in every window.

    Args:
        histograms: int64 [windows, E0].
        num_experts: E.
        routing: one of ``ROUTINGS``.
        layer: seeds the order of experts of ``real``.
    """
    if routing == "balanced":
        return np.tile(workload.balanced_shares(num_experts), (len(histograms), 1))
    hottest_first = np.argsort(-histograms.sum(axis=0), kind="stable")
    cumulative = np.cumsum(histograms[:, hottest_first], axis=1) / histograms.sum(axis=1, keepdims=True)
    edges = np.arange(num_experts + 1) / num_experts
    known = np.arange(histograms.shape[1] + 1) / histograms.shape[1]
    shares = np.stack([np.diff(np.interp(edges, known, np.append(0.0, window))) for window in cumulative])
    if routing == "real-hot-rank":
        return shares
    return shares[:, np.random.Generator(np.random.PCG64(layer)).permutation(num_experts)]


def trace_prompts(model: ServedModel, num_prompts: int, length: int) -> list[list[int]]:
    """Token ids of prompts that take the trace's windows in turn, each from its start.

    Args:
        model: whose vocabulary is the trace.
        num_prompts: of the batch; beyond the number of windows they repeat.
        length: tokens a prompt, at most a window's ids.

    Raises:
        ConfigError: a prompt longer than a window.
    """
    window = model.vocabulary // NUM_WINDOWS
    if length > window:
        raise ConfigError("length", length, f"at most the {window} token ids of a window")
    starts = [(i % NUM_WINDOWS) * window for i in range(num_prompts)]
    return [list(range(start, start + length)) for start in starts]


def expected_counts(table: RouteTable, prompts: list[list[int]], num_experts: int) -> CountArray:
    """int64 [layers, E]: assignments by expert when every prompt token is routed once."""
    tokens = np.concatenate([np.asarray(prompt) for prompt in prompts])
    return np.stack([expert_counts(layer[tokens], num_experts) for layer in table])


def max_over_mean(table: RouteTable, prompts: list[list[int]], num_experts: int, num_ranks: int) -> float:
    """Load of the busiest rank over the mean with consecutive experts a rank, mean over layers, of all prompts."""
    loads = expected_counts(table, prompts, num_experts).reshape(len(table), num_ranks, -1).sum(axis=2)
    return float((loads.max(axis=1) / loads.mean(axis=1)).mean())
