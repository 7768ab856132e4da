"""Routes that the plugin records from real SGLang servers, against a plain transformers forward, row for row.

Every server has a cache of 256 tokens a rank, cuts prompts into chunks of 32, and has SGLang retract a request every
few steps, so that requests compute again and hit prefixes. Three servers, one after the other; six minutes on two busy
cores.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from megaflux_serve.capture import ReplayRecord, ReplayStore, seal
from tests.plugins.engine_runs import NUM_TOKENS, PROMPTS, TINY_MOE
from tests.plugins.sglang_runs import MEGAFLUX, Server, needs_sglang, serve

pytest.importorskip("transformers")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), needs_sglang]

TIGHT = ["--chunked-prefill-size", "32", "--max-total-tokens", "256", "--schedule-conservativeness", "0.01"]
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}  # whether a cache overflows is chance
TWO = ["--tp-size", "2", "--ep-size", "2"]
DATA = ["--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"]
SERVERS = {
    "one rank, SGLang's backend": [],
    "two ranks of data parallelism": [*TWO, *MEGAFLUX, *DATA],
    "two ranks of tensor parallelism": [*TWO, *MEGAFLUX],
}
LABELS = {"megaflux_task": "math", "megaflux_weights_version": "3"}


@dataclass(frozen=True)
class Run:
    """What a server was asked and what it stored.

    Attributes:
        answers: to the prompts, twice.
        samples: of one prompt, with labels.
        updated: the answer after an update of weights to version 9.
        records: by id of the request, read while the server runs.
        counted: records that the server counts on ``/metrics``.
        store: where the server captured to.
    """

    answers: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    updated: dict[str, Any]
    records: dict[str, ReplayRecord]
    counted: int
    store: ReplayStore


@pytest.fixture(scope="module", params=SERVERS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A server that captures, asked for whatever makes routes hard to keep."""
    folder = tmp_path_factory.mktemp("capture")
    flags = [*SERVERS[request.param], *TIGHT, "--enable-metrics"]
    options: dict[str, Any] = {"capture": str(folder / "store")}
    if MEGAFLUX[0] in flags:
        options |= {"block_rows": 4, "replica_slots": 3}
    with serve(flags, folder / "server.log", RETRACTING | {"MEGAFLUX_OPTIONS": json.dumps(options)}) as server:
        answers = server.generate_together(PROMPTS)
        abort(server, PROMPTS[0])
        with urllib.request.urlopen(f"{server.url}/health_generate", timeout=60):
            answers += server.generate_together(PROMPTS)
        sampling = {"n": 3, "temperature": 1, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "custom_params": LABELS}
        samples = server.post("/generate", {"text": PROMPTS[2], "sampling_params": sampling})
        update = {"model_path": str(TINY_MOE), "weight_version": "9"}
        assert server.post("/update_weights_from_disk", update)["success"]
        updated = server.generate(PROMPTS[0])
        store = ReplayStore(folder / "store")
        records = {record.id: record for record in store.records()}
        return Run(answers, samples, updated, records, counted(server), store)


def counted(server: Server) -> int:
    """``megaflux_capture_records_total`` of all ranks."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("megaflux_capture_records_total{")))


def abort(server: Server, prompt: str) -> None:
    """A long request that is aborted while it runs."""
    more = {"rid": "aborted", "sampling_params": {"max_new_tokens": 190, "ignore_eos": True}}
    asked = threading.Thread(target=server.generate, args=(prompt,), kwargs=more)
    asked.start()
    time.sleep(0.3)
    request = urllib.request.Request(
        f"{server.url}/abort_request", b'{"rid": "aborted"}', {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60):
        asked.join()


def test_every_request_is_recorded_before_its_answer_and_nothing_else(run: Run) -> None:
    answers = [*run.answers, *run.samples, run.updated]
    assert set(run.records) == {answer["meta_info"]["id"] for answer in answers}
    assert run.counted == len(answers)
    for answer in answers:
        record = run.records[answer["meta_info"]["id"]]
        assert record.token_ids is not None
        assert record.token_ids[record.prompt_tokens :].tolist() == answer["output_ids"]
        assert record.prompt_tokens == answer["meta_info"]["prompt_tokens"]
        assert "routed_experts" not in answer["meta_info"]


def test_requests_were_retracted_and_hit_prefixes(run: Run) -> None:
    assert sum(answer["meta_info"]["num_retractions"] for answer in run.answers) > 0
    assert sum(answer["meta_info"]["cached_tokens"] for answer in run.answers) > 0


def test_routes_of_every_token_equal_a_plain_forward(run: Run) -> None:
    from tests.oracles.replay_transformers import route_oracle

    oracle = route_oracle(TINY_MOE)
    for record in run.records.values():
        assert record.token_ids is not None
        wanted = oracle(record.token_ids.tolist())[:-1]
        assert record.valid.all()
        different = np.argwhere((record.routes != wanted).any(axis=2))
        assert not len(different), f"{record.id}: {len(different)} of {wanted[..., 0].size}, first {different[0]}"


def test_records_carry_labels_groups_and_the_version_of_the_weights(run: Run) -> None:
    samples = [run.records[sample["meta_info"]["id"]] for sample in run.samples]
    assert {(record.task, record.weights_version) for record in samples} == {("math", "3")}
    (group,) = {record.group for record in samples}
    assert all(record.id.startswith(f"{group}_") for record in samples)
    for answer, version in ((run.answers[0], "default"), (run.updated, "9")):
        record = run.records[answer["meta_info"]["id"]]
        assert (record.group, record.task, record.weights_version) == (record.id, "", version)


def test_the_window_seals(run: Run) -> None:
    assert len(seal(run.store, "all", weights_versions=("default", "3", "9"))) == len(run.records)
