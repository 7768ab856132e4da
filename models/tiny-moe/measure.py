"""Measure what a tiny-moe checkpoint has learnt, on held-out text, and how its experts are used.

Decides the figures of ``report.json``: perplexity against a unigram model, exact sums, expert shares of each domain and
what they mean for two expert-parallel ranks. Knows nothing of training; ``report.py`` draws what is measured here.
Run ``python models/tiny-moe/measure.py DIR`` after training into DIR.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from corpus import DOMAINS, NUMBER_LIMITS, Split, as_chat, as_line, documents, problems
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from megaflux_serve.routing import kappa, max_over_mean

ROW_TOKENS = 256
NUM_ROWS = 160  # held-out rows a domain: 40,960 tokens
EP_RANKS = 2  # contiguous halves of the experts, as an engine places them
BATCH_ROWS = 16
PROMPTS = {
    "code": ["def __init__(self,", "import os\n\n\ndef", "    for i in range("],
    "prose": ["Return the", "This module", "If the file does not exist,"],
    "arithmetic": ["7 + 8 =", "15 - 6 =", "12 + 30 ="],
}
CONTINUATION_TOKENS = 40


def load(checkpoint: Path) -> tuple[Qwen3MoeForCausalLM, PreTrainedTokenizerFast]:
    """The model in float32, ready to read, and its tokenizer."""
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(checkpoint)


def held_out_rows(tokenizer: PreTrainedTokenizerFast, domain: str, num_rows: int = NUM_ROWS) -> NDArray[np.int64]:
    """int64 [num_rows, ROW_TOKENS]: rows spread evenly over the held-out text of the domain.

    Raises:
        ValueError: the held-out text is too short for that many rows.
    """
    stream = token_stream(tokenizer, documents(domain, "held_out"))
    if len(stream) < num_rows * ROW_TOKENS:
        raise ValueError(f"{domain}: {len(stream)} held-out tokens; {num_rows} rows need {num_rows * ROW_TOKENS}")
    begin = np.linspace(0, len(stream) - ROW_TOKENS, num_rows).astype(np.int64)
    return stream[begin[:, None] + np.arange(ROW_TOKENS)]


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> NDArray[np.int64]:
    """int64 [tokens]: the documents one after another, each closed by the end-of-text token."""
    return np.concatenate([[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, verbose=False)["input_ids"]])


@torch.inference_mode()
def read(model: Qwen3MoeForCausalLM, rows: NDArray[np.int64]) -> tuple[float, NDArray[np.int64]]:
    """Read rows of tokens once.

    Args:
        model: any Qwen3-MoE model.
        rows: int64 [rows, tokens].

    Returns:
        Mean loss in nats a token, and int64 [layers, E]: rows that the routers sent to each expert.
    """
    config = model.config
    counts = np.zeros((config.num_hidden_layers, config.num_experts), dtype=np.int64)
    total = 0.0
    for begin in range(0, len(rows), BATCH_ROWS):
        tokens = torch.from_numpy(rows[begin : begin + BATCH_ROWS])
        output = model(tokens, output_router_logits=True, use_cache=False)
        total += F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.topk(config.num_experts_per_tok).indices.flatten()
            counts[layer] += np.bincount(chosen.numpy(), minlength=config.num_experts)
    return total / (rows.shape[0] * (rows.shape[1] - 1)), counts


def unigram_loss(train: NDArray[np.int64], rows: NDArray[np.int64], vocab_size: int) -> float:
    """Nats a token of the best model that ignores context: add-one frequencies of the domain's training tokens."""
    frequency = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.log(frequency / frequency.sum())[rows[:, 1:]].mean())


@torch.inference_mode()
def exact_answers(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, exchanges: list[tuple[str, str]]
) -> NDArray[np.bool_]:
    """bool [exchanges]: greedy decoding of the question gives the answer, up to its end of line or turn.

    Greedy decoding is right exactly when every token of the answer is the likeliest after those before it, so one
    reading of question and answer decides it.
    """
    questions = tokenizer([question for question, _ in exchanges])["input_ids"]
    answers = tokenizer([answer for _, answer in exchanges])["input_ids"]
    lengths = [(len(question), len(answer)) for question, answer in zip(questions, answers, strict=True)]
    right = np.zeros(len(exchanges), dtype=bool)
    for num_question, num_answer in sorted(set(lengths)):  # rows of one length need no padding
        members = [n for n, length in enumerate(lengths) if length == (num_question, num_answer)]
        tokens = torch.tensor([questions[n] + answers[n] for n in members])
        predicted = model(tokens, use_cache=False).logits[:, num_question - 1 : -1].argmax(-1)
        right[members] = (predicted == tokens[:, num_question:]).all(1).numpy()
    return right


def js_distance(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Square root of the Jensen-Shannon divergence in bits: 0 for equal distributions, 1 for disjoint ones."""
    middle = (p + q) / 2
    terms = [np.sum(x[x > 0] * np.log2(x[x > 0] / middle[x > 0])) for x in (p, q)]
    return math.sqrt(max(0.0, sum(terms) / 2))


def expert_use(counts: dict[str, NDArray[np.int64]]) -> dict[str, Any]:
    """Shares, skew and distances from int64 [layers, E] rows a domain; every list below has one entry a layer."""
    share = {domain: c / c.sum(axis=1, keepdims=True) for domain, c in counts.items()}
    return {
        "share": {domain: s.round(4).tolist() for domain, s in share.items()},
        "kappa": {domain: [round(kappa(layer), 3) for layer in c] for domain, c in counts.items()},
        "ep2_max_over_mean": {
            domain: [round(max_over_mean(layer.reshape(EP_RANKS, -1).sum(axis=1)), 3) for layer in c]
            for domain, c in counts.items()
        },
        "js_distance": {
            f"{a} - {b}": [round(js_distance(x, y), 3) for x, y in zip(share[a], share[b], strict=True)]
            for a, b in combinations(share, 2)
        },
    }


def arithmetic_accuracy(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, split: Split) -> dict[str, Any]:
    """Share of a split's problems answered exactly, for numbers below each limit.

    Returns:
        For each limit, how many problems there are, the share right as lines and as chats, and the share that always
        giving the commonest answer would get right.
    """
    accuracy = {}
    for limit in NUMBER_LIMITS:
        asked = problems(split, limit)
        accuracy[str(limit)] = {
            "problems": len(asked),
            "lines": round(float(exact_answers(model, tokenizer, [as_line(p) for p in asked]).mean()), 3),
            "chats": round(float(exact_answers(model, tokenizer, [as_chat(p) for p in asked]).mean()), 3),
            "commonest_answer": round(float(np.bincount([p.answer for p in asked]).max() / len(asked)), 3),
        }
    return accuracy


def continuations(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, str]]:
    """Greedy continuations of ``PROMPTS``; an arithmetic one ends with its line."""
    samples = []
    for domain, prompts in PROMPTS.items():
        for prompt in prompts:
            tokens = tokenizer(prompt, return_tensors="pt")
            output = model.generate(**tokens, max_new_tokens=CONTINUATION_TOKENS, do_sample=False)
            text = tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
            if domain == "arithmetic":
                text = text.partition("\n")[0]
            samples.append({"domain": domain, "prompt": prompt, "continuation": text})
    return samples


def measure(checkpoint: Path) -> dict[str, Any]:
    """Every figure that ``report.json`` holds, for the checkpoint in a folder."""
    model, tokenizer = load(checkpoint)
    held_out, counts = {}, {}
    for domain in DOMAINS:
        rows = held_out_rows(tokenizer, domain)
        loss, counts[domain] = read(model, rows)
        unigram = unigram_loss(token_stream(tokenizer, documents(domain, "train")), rows, model.config.vocab_size)
        held_out[domain] = {
            "tokens": rows.size,
            "bytes_per_token": round(len(tokenizer.decode(rows.flatten()).encode()) / rows.size, 2),
            "perplexity": round(math.exp(loss), 3),
            "unigram_perplexity": round(math.exp(unigram), 1),
        }
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": (checkpoint / "model.safetensors").stat().st_size,
        "held_out": held_out,
        "arithmetic": {split: arithmetic_accuracy(model, tokenizer, split) for split in get_args(Split)},
        "expert_use": expert_use(counts),
        "continuations": continuations(model, tokenizer),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path, help="folder that train.py wrote")
    checkpoint = parser.parse_args().checkpoint
    report = json.dumps(measure(checkpoint), indent=1)
    (checkpoint / "report.json").write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main()
