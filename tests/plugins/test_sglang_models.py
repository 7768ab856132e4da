"""SGLang against a plain transformers forward, where SGLang's own backend cannot be the reference: a model with shared
experts, which SGLang itself does not run on a CPU, and weights that a training framework hands to the offline engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.engine_runs import NUM_TOKENS, PROJECT, PROMPTS, TINY_MOE, stop
from tests.plugins.random_moe import write_neighbours
from tests.plugins.sglang_runs import ENVIRONMENT, MEGAFLUX, PYTHON, needs_sglang, serve

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), needs_sglang]

MEGAFLUX_OPTIONS = json.dumps({"block_rows": 4, "replica_slots": 3})
ENGINE: dict[str, Any] = {"moe_a2a_backend": "megaflux", "moe_runner_backend": "megaflux", "tp_size": 2, "ep_size": 2}
ENGINE |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "mem_fraction_static": 0.6}
ENGINE |= {"max_total_tokens": 4096}
SHARED_EXPERTS = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def test_shared_experts_are_added_once_for_data_parallel_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import torch
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    from tests.oracles.greedy_transformers import greedy_tokens

    model = tmp_path / "model"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHARED_EXPERTS)).float().save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MOE / name, model)
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
    variables["PYTHONPATH"] = str(PROJECT)
    with log.open("w") as output:
        process = subprocess.Popen(
            [PYTHON, __file__, str(other), str(said)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )
    try:
        assert process.wait(timeout=900) == 0, log.read_text()[-4000:]
    finally:
        stop(process)
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
