"""tiny-moe is a checkpoint that loads, has learnt what its report says, and routes its three domains differently."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="tiny-moe is read with transformers")

FOLDER = Path(__file__).parents[2] / "models" / "tiny-moe"
sys.path.insert(0, str(FOLDER))

import corpus  # noqa: E402
import measure  # noqa: E402
import report as tiny_report  # noqa: E402

NUM_ROWS = 32  # a fifth of the rows behind the committed report
# Fewer rows and another Python's library move a perplexity by less; an untrained model is off by a factor of 40.
PERPLEXITY_TOLERANCE = 0.25
# Square root of the Jensen-Shannon divergence in each layer. Two halves of one domain stay below 0.07. Code and prose
# share words, so that they are nearer to each other than to arithmetic.
LEAST_DISTANCE = {"code - prose": 0.15, "code - arithmetic": 0.5, "prose - arithmetic": 0.5}


@pytest.fixture(scope="module")
def committed():
    return json.loads((FOLDER / "report.json").read_text())


@pytest.fixture(scope="module")
def loaded():
    return measure.load(FOLDER)


@pytest.fixture(scope="module")
def readings(loaded):
    """Perplexity and expert counts of each domain, on a sample made again from this machine's library."""
    model, tokenizer = loaded
    found = {d: measure.read(model, measure.held_out_rows(tokenizer, d, NUM_ROWS)) for d in corpus.DOMAINS}
    return {domain: (np.exp(loss), counts) for domain, (loss, counts) in found.items()}


def test_configuration_tokenizer_and_weights_agree(loaded, committed):
    model, tokenizer = loaded
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["num_experts_per_tok"], config["num_hidden_layers"]) == (16, 2, 4)
    assert len(tokenizer) == config["vocab_size"] == model.get_input_embeddings().num_embeddings
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert sum(p.numel() for p in model.parameters()) == committed["parameters"]
    assert (FOLDER / "model.safetensors").stat().st_size == committed["weight_bytes"] <= 6_000_000


def test_text_survives_the_tokenizer(loaded):
    _, tokenizer = loaded
    text = 'def f(x):\n\n    return "naïve — 漢字\t🙂" + str(1234)  \r\n\n\t# end'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_chat_is_written_as_it_was_taught(loaded):
    _, tokenizer = loaded
    question, _ = corpus.as_chat(corpus.Problem(12, "+", 30))
    messages = [{"role": "user", "content": "12 + 30 ="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == question


def test_no_problem_is_both_taught_and_held_out():
    train, held_out = set(corpus.problems("train", 50)), set(corpus.problems("held_out", 50))
    assert len(train) + len(held_out) == 2_500 + 1_275
    assert train.isdisjoint(held_out)
    assert all(p.sign == "-" or corpus.Problem(p.right, "+", p.left) in held_out for p in held_out)


@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_held_out_perplexity_is_the_committed_one(readings, committed, domain):
    figures = committed["held_out"][domain]
    perplexity, _ = readings[domain]
    assert perplexity == pytest.approx(figures["perplexity"], rel=PERPLEXITY_TOLERANCE)
    assert perplexity < figures["unigram_perplexity"] / 3


def test_held_out_sums_are_answered_as_often_as_committed_and_far_more_often_than_by_chance(loaded, committed):
    for limit, found in measure.arithmetic_accuracy(*loaded, "held_out").items():
        stated = committed["arithmetic"]["held_out"][limit]
        assert found["problems"] == stated["problems"]
        # Another CPU may round a near-tie the other way: one problem, or two in a hundred.
        slack = 0.02 + 1 / found["problems"]
        assert found["lines"] == pytest.approx(stated["lines"], abs=slack)
        assert found["chats"] == pytest.approx(stated["chats"], abs=slack)
        assert found["lines"] > 4 * found["commonest_answer"]


def test_domains_use_different_experts_in_every_layer_and_each_expert_is_used(readings):
    use = measure.expert_use({domain: counts for domain, (_, counts) in readings.items()})
    for pair, least in LEAST_DISTANCE.items():
        assert min(use["js_distance"][pair]) > least
    together = sum(counts / counts.sum() for _, counts in readings.values())
    assert (together > 0).all()
    for domain in corpus.DOMAINS:
        assert max(use["ep2_max_over_mean"][domain]) > 1.1


def test_js_distance_of_equal_and_disjoint_shares_is_0_and_1():
    p, q = np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.25, 0.75])
    assert measure.js_distance(p, p) == 0
    assert measure.js_distance(p, q) == 1


def test_readme_shows_the_committed_figures(committed):
    readme = (FOLDER / "README.md").read_text()
    training = json.loads((FOLDER / "training.json").read_text())
    assert readme == tiny_report.with_figures(readme, tiny_report.figures(training, committed))
