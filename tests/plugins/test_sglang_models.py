"""SGLang against a plain transformers forward, where SGLang's own backend cannot be the reference: a model with shared
experts, which SGLang itself does not run on a CPU, and weights that a training framework hands to the offline engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.engine_runs import NUM_TOKENS, PROMPTS, TINY_MOE
from tests.plugins.processes import run_script
from tests.plugins.random_moe import write_neighbours, write_shared_experts
from tests.plugins.sglang_runs import ENVIRONMENT, MEGAFLUX, PYTHON, needs_sglang, serve

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), needs_sglang]

MEGAFLUX_OPTIONS = json.dumps({"block_rows": 4, "replica_slots": 3})
ENGINE: dict[str, Any] = {"moe_a2a_backend": "megaflux", "moe_runner_backend": "megaflux", "tp_size": 2, "ep_size": 2}
ENGINE |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "mem_fraction_static": 0.6}
ENGINE |= {"max_total_tokens": 4096}


def test_shared_experts_are_added_once_for_data_parallel_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.oracles.greedy_transformers import greedy_tokens

    model = write_shared_experts(tmp_path / "model")
    expected = greedy_tokens(model, PROMPTS, NUM_TOKENS)

    flags = ["--tp-size", "2", "--ep-size", "2", "--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"]
    variables = {"MEGAFLUX_OPTIONS": MEGAFLUX_OPTIONS}
    with serve([*flags, *MEGAFLUX], tmp_path / "server.log", variables, model) as server:
        assert [answer["output_ids"] for answer in server.generate_together(PROMPTS)] == expected


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

    before = tokens()
    is_done, why = engine.update_weights_from_tensor(list(load_file(other / "model.safetensors").items()))
    if not is_done:
        raise RuntimeError(why)
    said.write_text(json.dumps([before, tokens()]))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
