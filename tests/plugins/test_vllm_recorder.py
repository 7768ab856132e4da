"""What the plugin makes of finished requests, without an engine: labels, left-out prompts, refusals, faults."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from megaflux_vllm.capture import Recorder, _recording, capture_folder, check_capture

from megaflux_serve.capture import ReplayStore
from megaflux_serve.errors import ConfigError, UnsupportedError
from tests.oracles.replay_routes import random_routes


def recorder(folder: Path) -> Recorder:
    return Recorder(folder, num_experts=16, num_layers=3, engine_version="0.27.1")


def request(id: str = "a", prompt: int = 4, output: int = 3) -> Any:
    detokenizer = SimpleNamespace(output_token_ids=list(range(100, 100 + output)))
    tokens = list(range(prompt))
    return SimpleNamespace(
        request_id=id, external_req_id="outer", prompt_len=prompt, prompt_token_ids=tokens, detokenizer=detokenizer
    )


def routes(num_rows: int) -> np.ndarray:
    """What vLLM returns for a model whose first layer is dense."""
    out = np.zeros((num_rows, 3, 2), dtype=np.uint8)
    out[:, 1:] = random_routes(1, num_rows, 2, 16, 2)
    return out


def test_a_finished_request_becomes_a_record_without_dense_layers(tmp_path: Path) -> None:
    recorder(tmp_path).record(request(), routes(6), 0, {"task": "math"})
    store = ReplayStore(tmp_path)
    (record,) = store.records()
    assert store.model.moe_layers == (1, 2)
    assert np.array_equal(record.routes, routes(6)[:, 1:])
    assert (record.id, record.group, record.task, record.engine) == ("a", "outer", "math", "vllm")
    assert record.token_ids is not None
    assert record.token_ids.tolist() == [0, 1, 2, 3, 100, 101, 102]


def test_prompt_rows_that_were_not_asked_for_are_rows_without_routes(tmp_path: Path) -> None:
    recorder(tmp_path).record(request(), routes(4), 2, {})
    (record,) = ReplayStore(tmp_path).records()
    assert record.valid.tolist() == [False, False, True, True, True, True]
    assert np.array_equal(record.expert_ids(all_layers=True)[2:], routes(4))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "finished without routes"),
        (routes(5), "has 5 rows of routes"),
        (np.zeros((6, 3, 2), dtype=np.uint8), "are 0 in every layer"),
        (routes(6)[:, :, :1], "have one expert a token"),
    ],
)
def test_routes_that_cannot_be_right_are_logged_with_the_request_and_not_stored(
    found: np.ndarray | None, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("vllm.megaflux")
    logger.addHandler(caplog.handler)
    made = recorder(tmp_path / "store")
    made.record(request("bad"), found, 0, {})
    made.record(request("good"), routes(6), 0, {})
    logger.removeHandler(caplog.handler)
    assert f"routes of request bad are not recorded: {message}" in caplog.text.replace("routed_experts: ", "").replace(
        "request bad: ", ""
    ).replace("record 'bad': ", "")
    assert [entry.id for entry in ReplayStore(tmp_path / "store").scan()[0]] == ["good"]


@pytest.mark.parametrize(("reason", "is_recorded"), [("stop", True), ("length", True), ("abort", False), (None, False)])
def test_only_a_request_that_came_to_its_end_is_recorded(reason: str | None, is_recorded: bool, tmp_path: Path) -> None:
    output = SimpleNamespace(finish_reason=reason, routed_experts=routes(6))
    state = request()
    state.streaming_input = False
    state.megaflux_capture = recorder(tmp_path / "store"), 0, {}
    assert _recording(lambda self: output)(state) is output
    assert (tmp_path / "store").exists() == is_recorded


def test_the_option_is_a_folder_and_absent_by_default() -> None:
    assert capture_folder({"megaflux": {"capture": "replay"}}) == Path("replay")
    assert capture_folder({"megaflux": {}}) is None
    assert capture_folder({}) is None
    with pytest.raises(ConfigError, match=r"--additional-config megaflux.capture"):
        capture_folder({"megaflux": {"capture": 3}})


@pytest.mark.parametrize(
    "change",
    [{"speculative_config": {"method": "ngram"}}, {"pipeline_parallel_size": 2}, {"kv_transfer_config": object()}],
)
def test_flags_under_which_routes_are_not_known_are_refused(change: dict[str, Any]) -> None:
    flags = {"speculative_config": None, "pipeline_parallel_size": 1, "kv_transfer_config": None}
    check_capture(SimpleNamespace(**flags))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=f"--{next(iter(change)).replace('_', '-')}"):
        check_capture(SimpleNamespace(**flags | change))  # type: ignore[arg-type]
