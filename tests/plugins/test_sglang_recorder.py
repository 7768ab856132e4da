"""What the plugin makes of SGLang's finished requests, without a server: which, with what, and what is refused.

Without SGLang the few names that the functions import stand in for it; with SGLang they are the real ones.
"""

from __future__ import annotations

import json
import sys
from array import array
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megaflux_sglang import capture, versions

from megaflux_serve.capture import ReplayStore
from megaflux_serve.errors import ConfigError, UnsupportedError
from tests.oracles.replay_routes import random_routes
from tests.plugins.sglang_stand_in import FIRST_WITH

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what SGLang says when it is imported on a CPU

REAL = find_spec("sglang") is not None
ROUTES = torch.from_numpy(random_routes(1, 6, 3, 16, 2).astype(np.int32))
SAMPLE_ID = f"outer_{'0a' * 16}"


class FinishAbort:
    """Stands for SGLang's reason of the same name."""


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "STATE", capture.SchedulerState())
    monkeypatch.delenv("MEGAFLUX_OPTIONS", raising=False)
    if REAL:
        return
    contents: dict[str, dict[str, Any]] = {
        "schedule_batch": {"FINISH_ABORT": FinishAbort},
        "utils": {"is_health_check_generate_req": lambda request: request.rid.startswith("HEALTH_CHECK")},
    }
    for package in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for name, content in contents.items():
        module = ModuleType(f"sglang.srt.managers.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(versions, "engine_version", lambda: "0.5.17")


def abort_reason() -> Any:
    """SGLang's reason for a request that was aborted."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return FINISH_ABORT()


def request(**changes: Any) -> Any:
    """A request of four tokens that got three."""
    values = {
        "rid": "a",
        "origin_input_ids": array("q", [0, 1, 2, 3]),
        "output_ids_through_stop": array("q", [100, 101, 102]),
        "sampling_params": SimpleNamespace(max_new_tokens=3, custom_params=None),
        "finished_reason": SimpleNamespace(),
        "input_embeds": None,
        "multimodal_inputs": None,
        "return_routed_experts": False,
        "routed_experts_start_len": 0,
        "routed_experts": None,
    }
    return SimpleNamespace(**values | changes)


def collect(processor: Any, request: Any) -> None:
    """What SGLang does where the hook is: read the routes of a request that asks for them, from where it asks."""
    if request.return_routed_experts:
        request.routed_experts = ROUTES[request.routed_experts_start_len :]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the store that finished requests go to."""
    from megaflux_serve.capture.recorder import Recorder

    capture.STATE.recorder = Recorder(tmp_path / "store", 16, 3, "sglang", "0.5.17", capture.LOGGER)
    capture.STATE.weights_version = "7"
    return tmp_path / "store"


def test_a_request_is_recorded_whole_and_returns_no_routes_that_it_did_not_ask_for(folder: Path) -> None:
    finished = request(rid=SAMPLE_ID)
    capture.record_finished(collect, None, finished)
    (record,) = ReplayStore(folder).records()
    assert np.array_equal(record.routes, ROUTES)
    assert (record.id, record.group, record.engine, record.weights_version) == (SAMPLE_ID, "outer", "sglang", "7")
    assert record.token_ids is not None
    assert record.token_ids.tolist() == [0, 1, 2, 3, 100, 101, 102]
    assert finished.routed_experts is None
    assert not finished.return_routed_experts


@pytest.mark.parametrize(
    ("capture_option", "made", "named"),
    [
        ("replay", "0a" * 16, SAMPLE_ID),
        ("replay", SAMPLE_ID, SAMPLE_ID),  # 0.5.17 names samples by itself
        (None, "0a" * 16, "0a" * 16),
    ],
)
def test_the_id_of_a_sample_begins_with_that_of_its_request(
    monkeypatch: pytest.MonkeyPatch, capture_option: str | None, made: str, named: str
) -> None:
    monkeypatch.setattr(versions, "server_args", lambda: server_args({"capture": capture_option}))
    sample = SimpleNamespace(rid="outer")

    def regenerate(asked: Any) -> str:
        asked.rid = made
        return made

    assert capture.name_sample(regenerate, sample) == named
    assert sample.rid == named


def test_a_request_that_asks_for_routes_gets_those_that_it_asks_for(folder: Path) -> None:
    finished = request(return_routed_experts=True, routed_experts_start_len=4)
    capture.record_finished(collect, None, finished)
    assert torch.equal(finished.routed_experts, ROUTES[4:])
    assert (finished.return_routed_experts, finished.routed_experts_start_len) == (True, 4)
    (record,) = ReplayStore(folder).records()
    assert record.valid.all()


def test_labels_of_the_request_come_before_our_own_and_embeddings_have_no_tokens(folder: Path) -> None:
    labels = {"megaflux_group": "g", "megaflux_task": "math", "megaflux_weights_version": 8, "__req__": object()}
    sampling = SimpleNamespace(max_new_tokens=3, custom_params=labels)
    capture.record_finished(collect, None, request(sampling_params=sampling, input_embeds=[[0.0]]))
    (record,) = ReplayStore(folder).records()
    assert (record.group, record.task, record.weights_version, record.token_ids) == ("g", "math", "8", None)


@pytest.mark.parametrize("which", ["aborted", "a beam search", "for no output", "a health check", "without the option"])
def test_what_is_no_rollout_gets_no_record_and_goes_its_own_way(which: str, folder: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "aborted": {"finished_reason": abort_reason()},
        "a beam search": {"beam_group": object()},
        "for no output": {"sampling_params": SimpleNamespace(max_new_tokens=0, custom_params=None)},
        "a health check": {"rid": "HEALTH_CHECK_1"},
        "without the option": {},
    }
    if which == "without the option":
        capture.STATE.recorder = None
    finished = request(return_routed_experts=True, routed_experts_start_len=2, **changes[which])
    capture.record_finished(collect, None, finished)
    assert torch.equal(finished.routed_experts, ROUTES[2:])
    assert not folder.exists()


def test_an_update_that_names_a_version_and_succeeds_sets_the_version_of_later_records() -> None:
    capture.STATE.weights_version = "1"
    for success, named, wanted in ((False, "2", "1"), (True, None, "1"), (True, "3", "3")):
        answer = SimpleNamespace(success=success)
        update = SimpleNamespace(weight_version=named)
        assert capture.note_version(lambda updater, request, answer=answer: answer, None, update) is answer
        assert wanted == capture.STATE.weights_version


def test_later_records_have_the_version_that_the_scheduler_heard_of() -> None:
    capture.STATE.weights_version = "1"
    capture.note_change(None, "scheduler", new_version=None)
    assert capture.STATE.weights_version == "1"
    capture.note_change(None, "scheduler", new_version="2")
    assert capture.STATE.weights_version == "2"


def test_routes_in_a_buffer_that_is_written_again_are_copied_where_sglang_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer, places = torch.arange(12).view(6, 2), torch.arange(3)
    output = SimpleNamespace(topk=buffer[:3], out_cache_loc=places)
    capture.own_copies(output)
    buffer.zero_()
    assert output.topk.tolist() == [[0, 1], [2, 3], [4, 5]]
    capture.own_copies(None)  # without overlap
    for version, is_hooked in (("0.5.17", True), ("0.5.18", False)):
        monkeypatch.setattr(versions, "engine_version", lambda version=version: version)
        assert (capture.own_copies in [hook for _, hook, _ in capture.hooks()]) is is_hooked


def server_args(options: Any = None, **fields: Any) -> Any:
    given = {} if options is None else {"megaflux": options}
    return SimpleNamespace(json_model_override_args=json.dumps(given), **fields)


def test_the_option_turns_routes_on_with_any_backend_and_is_absent_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for args, wanted in (
        (server_args(), False),
        (server_args({}), False),
        (server_args({"capture": None}), False),
        (server_args({"capture": "replay"}, moe_a2a_backend="deepep"), True),
    ):
        capture.turn_routes_on(args)
        assert getattr(args, "enable_return_routed_experts", False) is wanted
    with pytest.raises(ConfigError, match=r"megaflux.capture"):
        capture.turn_routes_on(server_args({"capture": 3}))
    monkeypatch.setenv("MEGAFLUX_OPTIONS", '{"capture": "replay"}')
    assert capture.capture_folder(server_args()) == Path("replay")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculative_algorithm", "EAGLE"),
        ("pp_size", 2),
        ("enable_two_batch_overlap", True),
        ("disaggregation_mode", "prefill"),
        ("enable_hierarchical_cache", True),
        ("enable_flexkv", True),
        ("radix_cache_backend", "other"),
        ("enable_unified_cache_external_linker", True),
        ("enable_decoder_swa_bounded_replay", True),
        ("prefill_only_disable_kv_cache", True),
        ("moe_a2a_backend", "mooncake"),
    ],
)
def test_flags_under_which_routes_are_not_known_are_refused(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"--{field.replace('_', '-')}"):
        capture.turn_routes_on(server_args({"capture": "replay"}, **{field: value}))


def test_data_parallel_attention_needs_a_backend_that_leaves_each_rank_its_rows() -> None:
    for backend in ("deepep", "megaflux"):
        capture.check_capture(server_args(enable_dp_attention=True, moe_a2a_backend=backend))
    with pytest.raises(UnsupportedError, match="--enable-dp-attention"):
        capture.check_capture(server_args(enable_dp_attention=True, moe_a2a_backend="none"))
    with pytest.raises(UnsupportedError, match="--attn-dp-size"):
        capture.check_capture(server_args(attn_dp_size=2, moe_a2a_backend="none"))


def test_arguments_that_sglang_has_resolved_are_left_as_they_are() -> None:
    args = server_args({"capture": "replay"}, _resolution_finished=True)
    capture.turn_routes_on(args)
    assert not hasattr(args, "enable_return_routed_experts")


@pytest.mark.skipif(not REAL, reason="SGLang is not installed")
def test_flags_that_are_refused_are_flags_of_this_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    fields = {name for name in capture.KNOWN_ROUTES if hasattr(ServerArgs, name) or name in ServerArgs.__annotations__}
    release = versions.release(versions.engine_version())
    assert fields == {name for name in capture.KNOWN_ROUTES if release >= FIRST_WITH.get(name, (0, 5, 14))}


def test_a_release_that_gives_routes_in_another_way_is_refused_with_the_option_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "engine_version", lambda: "0.5.13")
    assert [hook for _, hook, _ in capture.hooks()] == [capture.turn_routes_on]
    capture.turn_routes_on(server_args())
    with pytest.raises(UnsupportedError, match=r"capture on SGLang 0\.5\.13"):
        capture.turn_routes_on(server_args({"capture": "replay"}))
