"""How far two right BF16 implementations of a model may differ: the yardstick for ``agreement`` (bench_serving.py).

A plain forward pass on the CPU of the model that is served, with its random weights, in three arithmetics: ``exact`` in
float32; ``stock`` rounds to BF16 where vLLM's Triton experts store, the inputs of SwiGLU and each rank's sum too;
``ours`` rounds where the megakernel stores. All products are exact in float32, so that nothing else differs.

Reported over the last positions of random prompts, for each pair: how often the next tokens agree, and by how much the
log-probability of the token differs, where they do. Weights are made and used layer by layer: 6 GB, a few minutes.

    python -m benchmarks.bench_bf16_noise
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import RESULTS, ResultRow, RunContext, cpu_name, print_table, write_results
from benchmarks.serving.models import MODELS, ServedModel
from benchmarks.serving.progress import say
from benchmarks.serving.weights import checkpoint

BENCH = "bf16_noise"
EPSILON, ROPE_BASE = 1e-6, 1e6
PAIRS = (("exact", "stock"), ("exact", "ours"), ("stock", "ours"))

Round = Callable[[Tensor], Tensor]


def keep(x: Tensor) -> Tensor:
    """Float32 as it is."""
    return x


def bf16(x: Tensor) -> Tensor:
    """Float32 values that BF16 can hold."""
    return x.bfloat16().float()


@dataclasses.dataclass
class Arithmetic:
    """One way to compute the model, and its state.

    Attributes:
        name: of the way.
        store: how every stored activation is rounded.
        swiglu_input: how the two halves of the first product are.
        num_sums: ranks whose sums of a token are rounded before they are added; 0 where a token has one sum.
        x: residual stream, float32 [tokens, H].
    """

    name: str
    store: Round
    swiglu_input: Round
    num_sums: int
    x: Tensor

    def attend(self, weights: dict[str, Tensor], model: ServedModel, length: int) -> None:
        """Add the attention of sequences of ``length`` tokens."""
        hidden = self.store(norm(self.x))
        shape = (-1, length)
        q, k, v = (self.store(hidden @ weights[f"self_attn.{name}_proj.weight"].T) for name in "qkv")
        q = self.store(rotate(self.store(norm(q.view(*shape, model.heads, model.head_dim)))))
        k = self.store(rotate(self.store(norm(k.view(*shape, model.kv_heads, model.head_dim)))))
        v = v.view(*shape, model.kv_heads, model.head_dim)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        out = self.store(out.reshape(len(self.x), -1))
        self.x = self.store(self.x + self.store(out @ weights["self_attn.o_proj.weight"].T))

    def route(self, gate: Tensor, model: ServedModel) -> None:
        """Choose experts and begin the sums."""
        self.hidden = self.store(norm(self.x))
        logits = self.store(self.hidden @ gate.T)
        weights, self.ids = logits.softmax(1).topk(model.top_k)
        self.weights = weights / weights.sum(1, keepdim=True)
        self.sums = torch.zeros(max(1, self.num_sums), *self.x.shape)

    def add_expert(self, expert: int, gate: Tensor, up: Tensor, down: Tensor, num_experts: int) -> None:
        """Add what one expert gives to the tokens that chose it."""
        token, choice = (self.ids == expert).nonzero(as_tuple=True)
        rows, scale = self.hidden[token], self.weights[token, choice, None]
        act = self.store(F.silu(self.swiglu_input(rows @ gate.T)) * self.swiglu_input(rows @ up.T))
        result = act @ down.T
        # vLLM's kernel scales a row before it stores it; ours stores it and scales it in the combine.
        result = self.store(result * scale) if self.num_sums else self.store(result) * scale
        self.sums[expert * len(self.sums) // num_experts].index_add_(0, token, result)

    def finish_layer(self) -> None:
        """Add the experts' sums to the residual stream."""
        total = self.store(self.sums).sum(0)
        self.x = self.store(self.x + self.store(total))


def norm(x: Tensor) -> Tensor:
    """RMS norm with unit weights."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of [sequences, length, heads, head_dim]."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None, None] * ROPE_BASE ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def log_probabilities(model: ServedModel, tokens: Tensor, last: int) -> dict[str, Tensor]:
    """Float32 [sequences * last, vocabulary] by arithmetic, at the last positions of ``tokens`` [sequences, length]."""
    config = SimpleNamespace(
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        head_dim=model.head_dim,
        num_key_value_heads=model.kv_heads,
        moe_intermediate_size=model.intermediate,
        num_experts=model.experts,
        vocab_size=model.vocabulary,
        num_hidden_layers=model.layers,
    )
    tensors = ((name, tensor.float()) for name, tensor in checkpoint(config, torch.bfloat16, torch.device("cpu")))
    _, embedding = next(tensors)
    x = embedding[tokens.flatten()]
    ways = [
        Arithmetic("exact", keep, keep, 0, x),
        Arithmetic("stock", bf16, bf16, 2, x),
        Arithmetic("ours", bf16, keep, 0, x),
    ]
    del embedding
    for layer in range(model.layers):
        run_layer(ways, tensors, model, tokens.shape[1])
        say(f"layer {layer}")
    (_, _), (_, head) = next(tensors), next(tensors)  # the last norm, which is 1, and the output matrix
    result = {}
    for way in ways:
        final = way.store(norm(way.x)).view(*tokens.shape, -1)[:, -last:].flatten(0, 1)
        result[way.name] = way.store(final @ head.T).log_softmax(1)
    return result


def run_layer(ways: list[Arithmetic], tensors: Iterator[tuple[str, Tensor]], model: ServedModel, length: int) -> None:
    """One layer in every arithmetic, on the checkpoint's tensors in their order."""
    weights: dict[str, Tensor] = {}
    while "gate" not in weights:
        name, tensor = next(tensors)
        weights[name.split(".", 3)[3] if not name.endswith("mlp.gate.weight") else "gate"] = tensor
    for way in ways:
        way.attend(weights, model, length)
        way.route(weights["gate"], model)
    for expert in range(model.experts):
        gate, up, down = (next(tensors)[1] for _ in range(3))
        for way in ways:
            way.add_expert(expert, gate, up, down, model.experts)
    for way in ways:
        way.finish_layer()


def compare(a: Tensor, b: Tensor) -> dict[str, tuple[float, str]]:
    """Metrics as (value, unit) of two sets of log-probabilities, by the names that ``agreement`` has."""
    chosen, other = a.argmax(1), b.argmax(1)
    same = chosen == other
    at = chosen[same, None]
    differences = (a[same].gather(1, at) - b[same].gather(1, at)).abs().numpy()
    return {
        "next_token_equal_pct": (100 * float(same.float().mean()), "%"),
        "logprob_difference_median": (float(np.median(differences)), "1"),
        "logprob_difference_p99": (float(np.percentile(differences, 99)), "1"),
        "logprob_difference_max": (float(differences.max()), "1"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=MODELS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--last", type=int, default=16, help="positions of a sequence that are compared")
    options = parser.parse_args()
    model = dataclasses.replace(MODELS[options.model], layers=options.layers)
    torch.manual_seed(0)
    tokens = torch.randint(model.vocabulary, (options.sequences, options.length))
    with torch.inference_mode():
        values = log_probabilities(model, tokens, options.last)
    case = {"model": model.name, "layers": model.layers, "positions": options.sequences * options.last}
    rows = [
        ResultRow(BENCH, case | {"reference": a, "other": b}, metric, value, unit)
        for a, b in PAIRS
        for metric, (value, unit) in compare(values[a], values[b]).items()
    ]
    print_table(rows, BENCH)
    write_results(RESULTS / f"{BENCH}.json", rows, RunContext.current(cpu_name(), "torch"))


if __name__ == "__main__":
    main()
