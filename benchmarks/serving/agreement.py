"""Agreement with stock vLLM: greedy tokens and their log-probabilities, beside the noise of BF16 in stock vLLM itself.

Decides what is compared. Where two answers have the same tokens so far, both engines saw the same text, so the next
log-probabilities differ by arithmetic only. How large such differences are without MegaFlux is measured as well: stock
vLLM against itself with other batch sizes, which changes the order of its sums.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.harness import Plain, ResultRow
from benchmarks.serving.engine import Completion
from benchmarks.serving.fleet import Fleet
from benchmarks.serving.models import ServedModel

BENCH = "agreement"
REFERENCE, OTHER_BATCHES = "stock", "stock, batches half as large"

Answers = dict[str, list[Completion]]


def measure(
    fleet: Fleet, model: ServedModel, num_prompts: int, lengths: tuple[int, int], output_tokens: int, batch: int
) -> Answers:
    """Greedy answers by backend, every engine asked in the same batches, and stock once more in others.

    Args:
        fleet: the engines.
        model: that they serve.
        num_prompts: of random tokens.
        lengths: least and most tokens of a prompt.
        output_tokens: of every answer.
        batch: requests at a time.
    """
    draw = random.Random(1)
    prompts = [[draw.randrange(model.vocabulary) for _ in range(draw.randint(*lengths))] for _ in range(num_prompts)]
    chunk = batch * lengths[1]
    answers = _ask(fleet, prompts, output_tokens, batch, chunk)
    again = _ask(fleet, prompts, output_tokens, batch // 2, chunk, only=[REFERENCE])
    return answers | {OTHER_BATCHES: again[REFERENCE]} if REFERENCE in again else answers


def _ask(
    fleet: Fleet, prompts: list[list[int]], output_tokens: int, batch: int, chunk: int, only: Sequence[str] = ()
) -> Answers:
    answers: Answers = {}
    for start in range(0, len(prompts), batch):
        part = fleet.each("complete", prompts[start : start + batch], output_tokens, chunk, True, only=only)
        for backend, completions in part.items():
            answers.setdefault(backend, []).extend(completions)
    return {backend: answers[backend] for backend in part}  # those that answered to the end


def rows(model: ServedModel, answers: Answers) -> Iterator[ResultRow]:
    """The distribution of differences to the reference, and of replicated to fixed placement."""
    for reference in (REFERENCE, "fixed"):
        for backend in answers if reference in answers else ():
            if backend == reference or (reference == "fixed" and "stock" in backend):
                continue
            case: dict[str, Plain] = {
                "model": model.name,
                "layers": model.layers,
                "prompts": len(answers[backend]),
                "reference": reference,
                "backend": backend,
            }
            for metric, (value, unit) in compare(answers[reference], answers[backend]).items():
                yield ResultRow(BENCH, case, metric, value, unit)


def compare(reference: Sequence[Completion], other: Sequence[Completion]) -> dict[str, tuple[float, str]]:
    """Metrics as (value, unit) of two lists of answers to the same prompts.

    ``logprob_...`` are absolute differences over the positions that both engines reached with the same tokens and at
    which they chose the same one.
    """
    agreed, answers_equal, first_equal = [], 0, 0
    for a, b in zip(reference, other, strict=True):
        same = next(
            (i for i, pair in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if pair[0] != pair[1]), None
        )
        length = len(a.token_ids) if same is None else same
        answers_equal += same is None
        first_equal += length > 0
        agreed += [abs(x - y) for x, y in zip(a.logprobs[:length], b.logprobs[:length], strict=True)]
    differences = np.array(agreed or [0.0])
    positions = len(agreed) + len(reference) - answers_equal  # and the first position that differs
    return {
        "answers_equal_pct": (100 * answers_equal / len(reference), "%"),
        "first_token_equal_pct": (100 * first_equal / len(reference), "%"),
        "next_token_equal_pct": (100 * len(agreed) / positions, "%"),
        "logprob_difference_median": (float(np.median(differences)), "1"),
        "logprob_difference_p99": (float(np.percentile(differences, 99)), "1"),
        "logprob_difference_max": (float(differences.max()), "1"),
    }
