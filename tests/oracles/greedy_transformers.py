"""Greedy continuations as a plain transformers forward makes them, in float32. Imports nothing of the library."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def greedy_tokens(checkpoint: Path, prompts: list[str], num_tokens: int) -> list[list[int]]:
    """The ``num_tokens`` most likely token ids after each prompt, one after the other and without a cache."""
    encode = AutoTokenizer.from_pretrained(checkpoint).encode
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()
    continuations = []
    for prompt in prompts:
        tokens = encode(prompt)
        given = len(tokens)
        for _ in range(num_tokens):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        continuations.append(tokens[given:])
    return continuations


__all__ = ["greedy_tokens"]
