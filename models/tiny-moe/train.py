"""Train tiny-moe from nothing and write a checkpoint that transformers, vLLM and SGLang load.

Decides the shape of the model, its tokenizer and how it is trained. ``corpus.py`` decides the text; ``measure.py`` says
what was learnt. Run ``python models/tiny-moe/train.py --out DIR``; the README says how long it takes.

Every batch holds rows of each domain. The load-balancing loss is small and counts the batch as a whole: it keeps all
experts alive, and leaves the router free to send code, prose and arithmetic to different ones.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from corpus import DOMAINS, documents
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

END_OF_TEXT, CHAT_START, CHAT_END = SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 1024
# A word, one digit, punctuation, line breaks with the indentation that follows, or other blanks. Digits stay single, so
# that a sum is worked out digit by digit.
WORDS = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+ *(?=[^ ]|$)|\s+(?!\S)|\s+")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Stage(NamedTuple):
    """Part of the training run: rows of each domain a step, and tokens a row."""

    share: float
    rows: dict[str, int]
    row_tokens: int


# Small steps, because a few million tokens teach more in many steps than in few. The long rows at the end teach
# positions up to max_position_embeddings.
STAGES = (
    Stage(0.94, {"code": 2, "prose": 2, "arithmetic": 3}, 256),
    Stage(0.06, {"code": 1, "prose": 1, "arithmetic": 1}, 1024),
)
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 150
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
# Per layer, E * sum(share of rows * mean probability), which is 1 for a uniform router.
BALANCE_COEFFICIENT = 0.003
LOG_EVERY = 50


def model_config() -> Qwen3MoeConfig:
    """Qwen3-MoE with 2 of 16 experts a token; hidden size and intermediate size are multiples of 64 for the kernels."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.05,
        router_aux_loss_coef=BALANCE_COEFFICIENT,
        bos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        eos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
    )


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE over the training text; the special tokens take the ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.int64]:
    """int64 [tokens]: the documents one after another, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.concatenate([[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)])


class RowSampler:
    """Random rows of a domain's token stream that begin where a line begins, as a prompt does."""

    def __init__(self, tokenizer: Tokenizer, stream: NDArray[np.int64], rng: np.random.Generator) -> None:
        pieces = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        ends_line = np.array([piece == END_OF_TEXT or "Ċ" in piece for piece in pieces])  # "Ċ" is the byte of "\n"
        self.stream, self.rng = stream, rng
        self.starts = np.flatnonzero(ends_line[stream]) + 1

    def rows(self, num_rows: int, row_tokens: int) -> NDArray[np.int64]:
        """int64 [num_rows, row_tokens + 1]: inputs and, one to the right, targets."""
        fitting = np.searchsorted(self.starts, len(self.stream) - row_tokens - 1)
        begin = self.starts[self.rng.integers(fitting, size=num_rows)]
        return self.stream[begin[:, None] + np.arange(row_tokens + 1)]


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Mean over layers of ``E * sum_e(f_e * p_e)``, with f the share of rows and p the mean probability; 1 if uniform.

    Args:
        router_logits: one [tokens, E] tensor a layer.
        top_k: experts a token.
    """
    layers = []
    for logits in router_logits:
        num_experts = logits.shape[-1]
        rows = F.one_hot(logits.topk(top_k).indices, num_experts).float().mean(dim=(0, 1))
        layers.append(num_experts * (rows * logits.softmax(-1).mean(0)).sum())
    return torch.stack(layers).mean()


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine to a hundredth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: Qwen3MoeForCausalLM) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    scales = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def train(model: Qwen3MoeForCausalLM, samplers: dict[str, RowSampler], num_steps: int) -> list[dict[str, float]]:
    """Train in place. Returns a record every ``LOG_EVERY`` steps: tokens read, mean nats a token by domain."""
    optimizer = make_optimizer(model)
    history: list[dict[str, float]] = []
    recent: list[dict[str, float]] = []
    num_tokens = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("train", total=num_steps)
        for step in range(num_steps):
            stage = STAGES[0] if step < STAGES[0].share * num_steps else STAGES[1]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, num_steps)
            recent.append(train_step(model, optimizer, samplers, stage))
            num_tokens += sum(stage.rows.values()) * stage.row_tokens
            progress.advance(bar)
            if (step + 1) % LOG_EVERY == 0:
                means = {name: float(np.mean([record[name] for record in recent])) for name in recent[0]}
                rounded = {name: round(value, 4) for name, value in means.items()}
                history.append({"step": step + 1, "tokens": num_tokens} | rounded)
                progress.print(f"step {step + 1}: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
                recent.clear()
    return history


def train_step(
    model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, samplers: dict[str, RowSampler], stage: Stage
) -> dict[str, float]:
    """One step on rows of every domain. Returns each domain's loss in nats a token, and the balance loss."""
    rows = [samplers[domain].rows(num_rows, stage.row_tokens) for domain, num_rows in stage.rows.items()]
    tokens = torch.from_numpy(np.concatenate(rows))
    output = model(tokens[:, :-1], output_router_logits=True, use_cache=False)
    losses = F.cross_entropy(output.logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1)
    balance = balance_loss(output.router_logits, model.config.num_experts_per_tok)

    optimizer.zero_grad(set_to_none=True)
    (losses.mean() + BALANCE_COEFFICIENT * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()

    by_domain = losses.detach().split(list(stage.rows.values()))
    return {d: part.mean().item() for d, part in zip(stage.rows, by_domain, strict=True)} | {"balance": balance.item()}


def save(out: Path, model: Qwen3MoeForCausalLM, tokenizer: Tokenizer) -> None:
    """Write weights (bfloat16, one tensor an expert), configuration, tokenizer and generation defaults into ``out``."""
    model.to(torch.bfloat16).save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")  # the name that every release and engine reads
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ends = [tokenizer.token_to_id(CHAT_END), tokenizer.token_to_id(END_OF_TEXT)]
    pad = tokenizer.token_to_id(END_OF_TEXT)
    GenerationConfig(eos_token_id=ends, pad_token_id=pad, do_sample=False).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [CHAT_START, CHAT_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=3300, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads for torch; two are no faster (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    texts = {domain: documents(domain, "train") for domain in DOMAINS}
    tokenizer = train_tokenizer([text for domain in DOMAINS for text in texts[domain]])
    rng = np.random.default_rng(options.seed)
    samplers = {domain: RowSampler(tokenizer, token_stream(tokenizer, texts[domain]), rng) for domain in DOMAINS}

    model = Qwen3MoeForCausalLM(model_config())
    start = time.perf_counter()
    history = train(model, samplers, options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    save(options.out, model, tokenizer)
    record = {
        "steps": options.steps,
        "seed": options.seed,
        "threads": options.threads,
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "training_tokens": {domain: len(sampler.stream) for domain, sampler in samplers.items()},
        "software": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "loss": history,
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
