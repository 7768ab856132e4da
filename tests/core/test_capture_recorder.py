"""What becomes of an engine's finished requests: labels, left-out prompts, refusals, faults, and order in a thread."""

from __future__ import annotations

import logging
import threading
import time
import tracemalloc
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megaflux_serve.capture import ReplayStore
from megaflux_serve.capture.background import MAX_WAITING, CallThread
from megaflux_serve.capture.recorder import FinishedRequest, Recorder, labels_of
from tests.oracles.replay_routes import random_routes

LOGGER = logging.getLogger("megaflux.tests")


def recorder(folder: Path) -> Recorder:
    return Recorder(folder, 16, 3, "vllm", "0.27.1", LOGGER)


def routes(num_rows: int) -> np.ndarray:
    """What an engine returns for a model whose first layer is dense."""
    out = np.zeros((num_rows, 3, 2), dtype=np.uint8)
    out[:, 1:] = random_routes(1, num_rows, 2, 16, 2)
    return out


def test_a_finished_request_becomes_a_record_without_dense_layers(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.record(FinishedRequest("a", 4, 3, routes(6), token_ids=range(7), labels={"task": "math", "group": "g"}))
    store = ReplayStore(tmp_path)
    (record,) = store.records()
    assert store.model.moe_layers == (1, 2)
    assert np.array_equal(record.routes, routes(6)[:, 1:])
    assert (record.id, record.group, record.task, record.engine) == ("a", "g", "math", "vllm")
    assert record.token_ids is not None
    assert record.token_ids.tolist() == list(range(7))


def test_prompt_rows_that_were_left_out_are_rows_without_routes(tmp_path: Path) -> None:
    recorder(tmp_path).record(FinishedRequest("a", 4, 3, routes(4), skipped=2))
    (record,) = ReplayStore(tmp_path).records()
    assert record.valid.tolist() == [False, False, True, True, True, True]
    assert np.array_equal(record.expert_ids(all_layers=True)[2:], routes(4))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "request bad: finished without routes"),
        (routes(5), "record 'bad': has 5 rows of routes"),
        (np.zeros((6, 3, 2), dtype=np.uint8), "routed experts: are 0 in every layer"),
        (routes(6)[:, :, :1], "routed experts: have one expert a token"),
        (routes(6)[:, :, 0], "routed experts: are [6, 3]"),
        (routes(6)[:, :2], "routed experts: are [6, 2, 2]; allowed: [rows, 3 layers, k]"),
    ],
)
def test_routes_that_cannot_be_right_are_logged_with_the_request_and_not_stored(
    found: np.ndarray | None, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = recorder(tmp_path / "store")
    made.record(FinishedRequest("bad", 4, 3, found))
    made.record(FinishedRequest("good", 4, 3, routes(6)))
    assert f"routes of request bad are not recorded: {message}" in caplog.text
    assert [entry.id for entry in ReplayStore(tmp_path / "store").scan()[0]] == ["good"]


def test_a_label_that_cannot_be_written_costs_that_record_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = recorder(tmp_path)
    made.record(FinishedRequest("bad", 4, 3, routes(6), labels=labels_of({"megaflux_task": "\ud800"})))
    made.record(FinishedRequest("good", 4, 3, routes(6)))
    assert "routes of request bad are not recorded: record 'bad': task is" in caplog.text
    assert [entry.id for entry in ReplayStore(tmp_path).scan()[0]] == ["good"]


def test_an_observer_is_told_what_became_of_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    observer = SimpleNamespace(
        stored=lambda tokens, num_bytes: told.append((tokens, num_bytes)), dropped=lambda reason: told.append((reason,))
    )
    made = recorder(tmp_path)
    made.observer = observer
    made.record(FinishedRequest("a", 4, 3, routes(6)))
    made.record(FinishedRequest("b", 4, 3, routes(5)))

    def full(record: object) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(made._writer, "append", full)
    made.record(FinishedRequest("c", 4, 3, routes(6)))
    num_bytes = next((tmp_path / "shards").iterdir()).stat().st_size
    assert told == [(7, num_bytes), ("refused",), ("storage",)]


def test_memory_does_not_grow_with_the_requests_that_were_recorded(tmp_path: Path) -> None:
    recorded, num_rows = recorder(tmp_path), 1000
    array = routes(num_rows)

    def record(first: int, last: int) -> None:
        for number in range(first, last):
            recorded.record(FinishedRequest(f"r{number}", 1, num_rows, array))

    record(0, 20)  # what is made once
    tracemalloc.start()
    record(20, 300)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < array.nbytes  # of 280 such arrays
    assert len(list(ReplayStore(tmp_path).records())) == 300


def test_a_caller_that_is_faster_than_the_disk_is_held_up() -> None:
    thread, gate = CallThread("test", LOGGER), threading.Event()
    thread.submit(gate.wait, 10)

    def submit_many() -> None:
        for number in range(MAX_WAITING + 2):
            thread.submit(int, number)

    caller = threading.Thread(target=submit_many)
    caller.start()
    caller.join(0.3)
    assert caller.is_alive()
    gate.set()
    caller.join(10)
    thread.wait()
    assert not caller.is_alive()


def test_the_thread_ends_with_its_process_and_keeps_nothing_of_a_call_that_is_done() -> None:
    class Routes:
        pass

    routes = Routes()
    kept, thread = weakref.ref(routes), CallThread("a thread of its own", LOGGER)
    thread.submit(id, routes)
    del routes
    thread.wait()
    (started,) = (each for each in threading.enumerate() if each.name == "a thread of its own")
    assert started.daemon
    end = time.monotonic() + 10
    while kept() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert kept() is None


def test_labels_are_the_parameters_with_our_prefix() -> None:
    assert labels_of(None) == {}
    assert labels_of({"megaflux_task": "math", "megaflux_weights_version": 3, "other": 1, "megaflux_other": 2}) == {
        "task": "math",
        "weights_version": "3",
    }


def test_calls_run_in_order_behind_a_slow_one_and_a_failed_one(caplog: pytest.LogCaptureFixture) -> None:
    thread, gate, done = CallThread("test", LOGGER), threading.Event(), []
    thread.wait()  # nothing was submitted
    thread.submit(gate.wait, 10)
    thread.submit(done.append, 1)
    thread.submit(int, "no number")
    thread.submit(done.append, 2)
    assert done == []
    gate.set()
    thread.wait()
    assert done == [1, 2]
    assert "a call of the thread test failed" in caplog.text
