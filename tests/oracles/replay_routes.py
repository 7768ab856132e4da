"""Random routes for tests. Imports nothing of the library."""

from __future__ import annotations

import numpy as np


def random_routes(seed: int, num_rows: int, num_layers: int, num_experts: int, top_k: int) -> np.ndarray:
    """int64 [rows, layers, k], distinct experts in a row of a layer, some more popular than others."""
    rng = np.random.default_rng(seed)
    score = rng.normal(size=(num_layers, num_experts)) + rng.gumbel(size=(num_rows, num_layers, num_experts))
    return np.argsort(-score, axis=2)[:, :, :top_k]
