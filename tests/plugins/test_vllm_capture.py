"""Routes that the plugin records from real vLLM engines, against a plain transformers forward, row for row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaflux_serve.capture import ReplayRecord, ReplayStore, seal
from tests.plugins.engine_runs import (
    COMMON,
    NUM_TOKENS,
    OFFLINE_TIMEOUT_S,
    ONE_PROCESS,
    PROMPTS,
    PYTHON,
    TINY_MOE,
    Server,
    serve,
)
from tests.plugins.processes import run_script

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LABELS = {"megaflux_group": "g", "megaflux_task": "math", "megaflux_weights_version": "3"}
# Prompts are cut into chunks of at most 16 tokens, and the cache holds about half of what four requests need.
TIGHT = {
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "block_size": 32,
    "num_gpu_blocks_override": 8,
    "max_model_len": 128,
}
HAS_CONNECTOR = "import importlib.util as u, pathlib as p; f = p.Path(u.find_spec('vllm').origin).parent; "
HAS_CONNECTOR += "print((f / 'distributed' / 'aux_output_connector').exists())"


@pytest.fixture(scope="module", autouse=True)
def _vllm_returns_routes_on_a_cpu() -> None:
    found = subprocess.run([PYTHON, "-c", HAS_CONNECTOR], capture_output=True, text=True, check=True).stdout
    if found.strip() == "True":
        pytest.skip("this vLLM returns routes only from its second model runner, which its CPU build lacks")


def offline(folder: Path) -> dict[str, Any]:
    """What ``main`` says after it ran an engine that captures into ``folder / "store"``."""
    run_script(PYTHON, __file__, [folder], folder / "offline.log", ONE_PROCESS, OFFLINE_TIMEOUT_S)
    said: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return said


def token_ids(record: ReplayRecord) -> list[int]:
    """Prompt and output of a record, which the plugin always keeps."""
    assert record.token_ids is not None
    tokens: list[int] = record.token_ids.tolist()
    return tokens


def assert_routes_are_the_models(store: ReplayStore) -> None:
    """Every row of every record equals the forward of the same tokens."""
    pytest.importorskip("transformers")
    from tests.oracles.replay_transformers import route_oracle

    oracle = route_oracle(TINY_MOE)
    for record in store.records():
        wanted = oracle(token_ids(record))[:-1]
        assert record.valid.all()
        different = np.argwhere((record.routes != wanted).any(axis=2))
        assert not len(different), f"{record.id}: {len(different)} of {wanted[..., 0].size}, first {different[0]}"


def test_offline_routes_with_chunks_prefix_hits_preemption_stop_strings_and_several_samples(tmp_path: Path) -> None:
    said = offline(tmp_path)
    assert said["preemptions"] > 0
    assert said["prefix_hits"] > 0
    store = ReplayStore(tmp_path / "store")
    assert (store.model.num_experts, store.model.row_shape) == (16, (4, 2))
    records = list(store.records())
    assert sorted(token_ids(record) for record in records) == sorted(said["tokens"])
    assert {(record.task, record.weights_version, record.group) for record in records} == {("math", "3", "g")}
    assert_routes_are_the_models(store)
    assert len(seal(store, "window")) == len(said["tokens"])


@pytest.mark.parametrize("ranks", ["--data-parallel-size", "--tensor-parallel-size"])
def test_a_server_with_two_ranks_records_every_request_before_it_answers(ranks: str, tmp_path: Path) -> None:
    options = json.dumps({"megaflux": {"capture": str(tmp_path / "store")}})
    flags = ["--moe-backend", "megaflux", "--enable-expert-parallel", ranks, "2"]
    with serve([*flags, "--additional-config", options], tmp_path / "server.log") as server:
        begin_and_hang_up(server, PROMPTS[0])
        answers = complete_with_labels(server, PROMPTS)
        store = ReplayStore(tmp_path / "store")
        records = list(store.records())
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
            (counted,) = re.findall(r"megaflux_capture_records_total\{.*\} (.*)", response.read().decode())
    assert float(counted) == len(PROMPTS)
    assert sorted(map(len, answers)) == [NUM_TOKENS] * len(PROMPTS)
    assert sorted(token_ids(record)[record.prompt_tokens :] for record in records) == sorted(answers)
    assert all((record.task, record.weights_version) == ("math", "3") for record in records)
    assert_routes_are_the_models(store)


def complete_with_labels(server: Server, prompts: Sequence[str]) -> list[list[int]]:
    """Greedy tokens after each prompt, all sent at once."""

    def complete(prompt: str) -> list[int]:
        (choice,) = server.post("/v1/completions", server.body(prompt, vllm_xargs=LABELS))["choices"]
        assert choice.get("routed_experts") is None  # they are in the store, and nobody asked for them here
        tokens: list[int] = choice["token_ids"]
        return tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(complete, prompts))


def begin_and_hang_up(server: Server, prompt: str) -> None:
    """A long request whose client goes away after the first token; vLLM aborts it, and it is not recorded."""
    with server.open("/v1/completions", server.body(prompt, max_tokens=200, stream=True)) as response:
        response.readline()


def main(folder: Path) -> None:
    """The child process of ``offline``: greedy, samples of prompts that the cache knows, and a stop string."""
    from vllm import LLM, SamplingParams

    options = {"megaflux": {"capture": str(folder / "store")}}
    llm = LLM(
        model=str(TINY_MOE),
        moe_backend="megaflux",
        additional_config=options,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **(COMMON | TIGHT),
    )
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "extra_args": LABELS}
    tokens = []
    for prompts, sampling in (
        (PROMPTS[:2], SamplingParams(temperature=1, **common)),
        (PROMPTS[2:4], SamplingParams(temperature=1, n=3, **common)),
        (PROMPTS, SamplingParams(temperature=0, **common)),
    ):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        tokens += [[*output.prompt_token_ids, *sample.token_ids] for output in outputs for sample in output.outputs]
    stop = outputs[0].outputs[0].text[5:8]
    (stopped,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, stop=stop, **common), use_tqdm=False)
    assert stopped.outputs[0].stop_reason == stop, stopped  # found in the front end, which then ends the request
    tokens.append([*stopped.prompt_token_ids, *stopped.outputs[0].token_ids])
    metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    said = {
        "tokens": tokens,
        "preemptions": metrics["vllm:num_preemptions"],
        "prefix_hits": metrics["vllm:prefix_cache_hits"],
    }
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
