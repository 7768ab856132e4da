"""SGLang against a plain transformers forward, where SGLang's own backend cannot be the reference: every class of
models that is served, most of which SGLang itself does not run on a CPU, and weights that a training framework hands
to the offline engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from megaflux_sglang.checks import ARCHITECTURES

from tests.plugins.engine_runs import NUM_TOKENS, PROMPTS, TINY_MOE
from tests.plugins.processes import run_script
from tests.plugins.random_moe import write_neighbours, write_random
from tests.plugins.sglang_models import MODELS, WITHOUT_DP_LM_HEAD
from tests.plugins.sglang_runs import ATTENTION, ENVIRONMENT, MEGAFLUX, PYTHON, needs_sglang, serve

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), needs_sglang]

MEGAFLUX_OPTIONS = json.dumps({"block_rows": 4, "replica_slots": 3})
ENGINE: dict[str, Any] = {"moe_a2a_backend": "megaflux", "moe_runner_backend": "megaflux", "tp_size": 2, "ep_size": 2}
ENGINE |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "mem_fraction_static": 0.6}
ENGINE |= {"max_total_tokens": 4096}


class Checkpoint(NamedTuple):
    """A model and the greedy tokens after each prompt."""

    family: str
    folder: Path
    tokens: list[list[int]]


def test_every_served_class_but_the_tiny_models_own_is_tested_here() -> None:
    assert {f"{family}ForCausalLM" for family in MODELS} | {"Qwen3MoeForCausalLM"} == set(ARCHITECTURES)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A small model of each class, and its tokens in a plain forward."""
    pytest.importorskip("transformers")
    from tests.oracles.greedy_transformers import greedy_tokens

    folder = write_random(tmp_path_factory.mktemp("models") / request.param, request.param, MODELS[request.param])
    return Checkpoint(request.param, folder, greedy_tokens(folder, PROMPTS, NUM_TOKENS))


@pytest.mark.parametrize("attention", ATTENTION)
def test_tokens_of_a_class_equal_a_plain_forward(checkpoint: Checkpoint, attention: str, tmp_path: Path) -> None:
    flags = ["--tp-size", "2", "--ep-size", "2", *ATTENTION[attention], *MEGAFLUX]
    if checkpoint.family == WITHOUT_DP_LM_HEAD:
        flags = [flag for flag in flags if flag != "--enable-dp-lm-head"]
    variables = {"MEGAFLUX_OPTIONS": MEGAFLUX_OPTIONS}
    with serve(flags, tmp_path / "server.log", variables, checkpoint.folder) as server:
        assert [server.complete(prompt) for prompt in PROMPTS[:3]] == checkpoint.tokens[:3]  # data-parallel: one idles
        assert [answer["output_ids"] for answer in server.generate_together(PROMPTS)] == checkpoint.tokens


def test_tensors_of_a_training_framework_reach_every_replica(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.oracles.greedy_transformers import greedy_tokens

    other = write_neighbours(TINY_MOE, tmp_path / "other")
    said, log = tmp_path / "said.json", tmp_path / "engine.log"
    variables = ENVIRONMENT | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "MEGAFLUX_OPTIONS": MEGAFLUX_OPTIONS}
    run_script(PYTHON, __file__, [other, said], log, variables, timeout_s=900)
    before, after = json.loads(said.read_text())
    assert before == greedy_tokens(TINY_MOE, PROMPTS, NUM_TOKENS)
    assert after == greedy_tokens(other, PROMPTS, NUM_TOKENS)


def main(other: Path, said: Path) -> None:
    """The child process: tokens of the offline engine, before and after it was given the tensors of ``other``."""
    import sglang
    from safetensors.torch import load_file

    engine = sglang.Engine(model_path=str(TINY_MOE), **ENGINE)

    def tokens() -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        return [answer["output_ids"] for answer in engine.generate(PROMPTS, sampling)]

    def do(update: Callable[..., tuple[bool, str]], *arguments: Any) -> None:
        is_done, why = update(*arguments)
        if not is_done:
            raise RuntimeError(why)

    before = tokens()
    has_sessions = hasattr(engine, "begin_weight_update")  # from 0.5.21
    if has_sessions:
        do(engine.begin_weight_update)
    do(engine.update_weights_from_tensor, list(load_file(other / "model.safetensors").items()))
    if has_sessions:
        do(engine.end_weight_update)
    said.write_text(json.dumps([before, tokens()]))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
