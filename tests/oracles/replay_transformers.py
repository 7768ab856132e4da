"""Routes of a model as a plain transformers forward makes them, in float32. Imports nothing of the library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def route_oracle(checkpoint: Path) -> Callable[[list[int]], np.ndarray]:
    """A function from token ids [n] to the experts [n, layers, k] that every layer's router selects, best first."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()

    def routes(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
        selected = [layer.topk(model.config.num_experts_per_tok, dim=-1).indices for layer in logits]
        return torch.stack(selected, dim=1).numpy()

    return routes
