"""What the plugin makes of vLLM's finished requests, without an engine: which, with what, and in which order."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from megaflux_vllm.capture import (
    Capture,
    OutputsBehindRecords,
    _behind_records,
    _recording,
    _with_capture,
    _with_labels,
    _with_routes_returned,
    capture_folder,
    check_capture,
    finished_request,
)

from megaflux_serve.capture import ReplayStore
from megaflux_serve.capture.recorder import Recorder
from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.metrics.events import CaptureEvents
from tests.oracles.replay_routes import random_routes

ROUTES = random_routes(1, 6, 3, 16, 2).astype(np.uint8)
LOGGER = logging.getLogger("vllm.megaflux")
FLAGS = {
    "speculative_config": None,
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
    "pipeline_parallel_size": 1,
    "kv_transfer_config": None,
    "kv_offloading_size": None,
    "enable_dbo": False,
    "ubatch_size": 0,
}


def capture(folder: Path, returns_routes: bool = True) -> Capture:
    return Capture(Recorder(folder, 16, 3, "vllm", "0.27.1", LOGGER), returns_routes)


def request() -> Any:
    detokenizer = SimpleNamespace(output_token_ids=[100, 101, 102])
    prompt = [0, 1, 2, 3]
    return SimpleNamespace(
        request_id="a",
        external_req_id="outer",
        prompt_len=4,
        prompt_token_ids=prompt,
        detokenizer=detokenizer,
        streaming_input=False,
        queue=None,
    )


def test_a_request_is_recorded_with_its_tokens_and_labels() -> None:
    found = finished_request(request(), ROUTES, 0, {"task": "math"})
    assert (found.id, found.prompt_tokens, found.output_tokens) == ("a", 4, 3)
    assert found.token_ids == [0, 1, 2, 3, 100, 101, 102]
    assert found.labels == {"group": "outer", "task": "math"}
    embeddings = request()
    embeddings.prompt_token_ids = None
    assert finished_request(embeddings, ROUTES, 0, {"group": "g"}).token_ids is None


@pytest.mark.parametrize(("reason", "is_recorded"), [("stop", True), ("length", True), ("abort", False), (None, False)])
def test_only_a_request_that_came_to_its_end_is_recorded(reason: str | None, is_recorded: bool, tmp_path: Path) -> None:
    output = SimpleNamespace(finish_reason=reason, routed_experts=ROUTES)
    state, made = request(), capture(tmp_path / "store")
    state.megaflux_capture = made, 0, {}
    assert _recording(lambda self: output)(state) is output
    made.thread.wait()
    assert (tmp_path / "store").exists() == is_recorded
    assert output.routed_experts is ROUTES


def test_routes_that_nobody_asked_for_are_in_the_store_and_not_in_the_response(tmp_path: Path) -> None:
    output = SimpleNamespace(finish_reason="stop", routed_experts=ROUTES)
    state, made = request(), capture(tmp_path, returns_routes=False)
    state.megaflux_capture = made, 0, {}
    _recording(lambda self: output)(state)
    made.thread.wait()
    assert output.routed_experts is None
    (record,) = ReplayStore(tmp_path).records()
    assert np.array_equal(record.routes, ROUTES)


def test_the_last_output_waits_for_the_record_and_others_do_not(tmp_path: Path) -> None:
    async def run() -> None:
        made, given, gate = capture(tmp_path), [], threading.Event()
        outputs = OutputsBehindRecords(SimpleNamespace(put=given.append), made)
        made.thread.submit(gate.wait, 10)
        first, last = SimpleNamespace(finished=False), SimpleNamespace(finished=True)
        outputs.put(last)
        outputs.put(first)
        await asyncio.sleep(0.05)
        assert given == [first]
        gate.set()
        await asyncio.to_thread(made.thread.wait)
        await asyncio.sleep(0)
        assert given == [first, last]

    asyncio.run(run())


def test_offline_a_step_that_ends_a_request_waits_for_its_record(tmp_path: Path) -> None:
    made, gate, done = capture(tmp_path), threading.Event(), []
    engine = SimpleNamespace(output_processor=SimpleNamespace(megaflux_capture=made))
    made.thread.submit(gate.wait, 10)
    made.thread.submit(done.append, True)
    _behind_records(lambda self: [SimpleNamespace(finished=False)])(engine)
    assert not done
    gate.set()
    _behind_records(lambda self: [SimpleNamespace(finished=True)])(engine)
    assert done


def test_a_new_request_gets_its_labels_and_a_queue_behind_records(tmp_path: Path) -> None:
    made, state = capture(tmp_path), request()
    state.queue = queue = object()
    processor = SimpleNamespace(megaflux_capture=made, request_states={})
    sampling = SimpleNamespace(extra_args={"megaflux_task": "math"}, routed_experts_prompt_start=2)

    def add(self: Any, request: Any) -> None:
        self.request_states[request.request_id] = state

    _with_labels(add)(processor, SimpleNamespace(request_id="a", sampling_params=sampling))
    assert state.megaflux_capture == (made, 2, {"task": "math"})
    assert isinstance(state.queue, OutputsBehindRecords)
    assert state.queue.queue is queue


def test_requests_that_sample_nothing_or_are_gone_are_left_alone(tmp_path: Path) -> None:
    state, add = request(), _with_labels(lambda self, request: None)
    processor = SimpleNamespace(megaflux_capture=capture(tmp_path), request_states={"a": state})
    add(processor, SimpleNamespace(request_id="a", sampling_params=None))  # as for embeddings
    add(processor, SimpleNamespace(request_id="gone", sampling_params=SimpleNamespace(extra_args=None)))
    assert not hasattr(state, "megaflux_capture")


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_front_end_captures_with_the_option_only_and_returns_routes_that_were_asked_for(
    tmp_path: Path, asked_for: bool
) -> None:
    sizes = SimpleNamespace(num_hidden_layers=3)
    model = SimpleNamespace(hf_text_config=sizes, get_num_experts=lambda: 16, served_model_name="tiny")

    def started(**options: Any) -> Capture | None:
        engine = SimpleNamespace(output_processor=SimpleNamespace(megaflux_capture=None))
        config = SimpleNamespace(additional_config={"megaflux": options}, model_config=model)
        config.megaflux_routes_not_asked_for = not asked_for
        _with_capture(lambda self, vllm_config: None)(engine, config)
        return engine.output_processor.megaflux_capture

    assert started() is None
    made, unwatched = started(capture=str(tmp_path)), started(capture=str(tmp_path), metrics=False)
    assert made is not None
    assert unwatched is not None
    assert made.returns_routes is asked_for
    assert (made.recorder.folder, made.recorder.num_experts, made.recorder.num_layers) == (tmp_path, 16, 3)
    assert isinstance(made.recorder.observer, CaptureEvents)
    assert unwatched.recorder.observer is None


def test_a_prompt_that_streams_in_has_one_queue_behind_records_whatever_the_number_of_its_parts(tmp_path: Path) -> None:
    state, queue = request(), object()
    state.queue = queue
    processor = SimpleNamespace(megaflux_capture=capture(tmp_path), request_states={"a": state})
    sampling = SimpleNamespace(extra_args=None, routed_experts_prompt_start=None)
    for _ in range(3):
        _with_labels(lambda self, request: None)(processor, SimpleNamespace(request_id="a", sampling_params=sampling))
    assert state.queue.queue is queue


@pytest.mark.parametrize("asked_for", [False, True])
def test_the_option_turns_routes_on_and_leaves_the_arguments_as_they_were(asked_for: bool) -> None:
    def create(self: Any) -> Any:
        return SimpleNamespace(routes=self.enable_return_routed_experts, speculative_config=None)

    options = {"megaflux": {"capture": "replay"}}
    args = SimpleNamespace(additional_config=options, enable_return_routed_experts=asked_for, **FLAGS)
    for _ in range(2):
        config = _with_routes_returned(create)(args)
        assert config.routes
        assert config.megaflux_routes_not_asked_for is not asked_for
        assert args.enable_return_routed_experts is asked_for


def test_the_option_is_a_folder_and_absent_by_default() -> None:
    assert capture_folder({"megaflux": {"capture": "replay"}}) == Path("replay")
    assert capture_folder({"megaflux": {}}) is None
    assert capture_folder({}) is None
    with pytest.raises(ConfigError, match=r"--additional-config megaflux.capture"):
        capture_folder({"megaflux": {"capture": 3}})


@pytest.mark.parametrize(
    "change",
    [
        {"speculative_config": {"method": "ngram"}},
        {"spec_method": "ngram"},
        {"spec_model": "draft"},
        {"spec_tokens": 2},
        {"pipeline_parallel_size": 2},
        {"kv_transfer_config": object()},
        {"kv_offloading_size": 1.0},
        {"enable_dbo": True},
        {"ubatch_size": 2},
    ],
)
def test_flags_under_which_routes_are_not_known_are_refused(change: dict[str, Any]) -> None:
    check_capture(SimpleNamespace(**FLAGS))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=f"--{next(iter(change)).replace('_', '-')}"):
        check_capture(SimpleNamespace(**FLAGS | change))  # type: ignore[arg-type]


def test_a_front_end_that_no_hook_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(UnsupportedError, match="VLLM_USE_RUST_FRONTEND: with the option capture"):
        check_capture(SimpleNamespace(**FLAGS))  # type: ignore[arg-type]


def test_a_checkpoint_that_brings_a_draft_model_is_refused() -> None:
    options = {"megaflux": {"capture": "replay"}}
    args = SimpleNamespace(additional_config=options, enable_return_routed_experts=False, **FLAGS)
    with pytest.raises(UnsupportedError, match="a checkpoint with a draft model: with the option capture"):
        _with_routes_returned(lambda self: SimpleNamespace(speculative_config=object()))(args)
    assert args.enable_return_routed_experts is False
