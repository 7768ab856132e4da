"""What the host notices around steps that replay captured graphs: failed waits and weights written in place."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from megaflux_vllm import steps
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from megaflux_serve.errors import PeerTimeoutError

STEPS = ("execute_model", "execute_dummy_batch", "sample_tokens")


class Executor:
    """A device executor, as far as its failures."""

    has_failed, notes_batches = False, True

    def __init__(self) -> None:
        self.looks: list[str] = []

    def note_failures(self) -> None:
        self.looks.append("note")

    def raise_failure(self) -> None:
        if self.has_failed:
            raise PeerTimeoutError(1, "rows", 3, 60.0)


class Copied(AsyncModelRunnerOutput):
    """An output whose copy ends with a failure on record."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def get_output(self) -> Any:
        self.executor.has_failed = True
        return "tokens"

    def get_kv_connector_output(self) -> Any:
        return "blocks"


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Executor:
    """Watched by a worker whose steps return what they are given."""
    for name in STEPS:
        monkeypatch.setattr(Worker, name, lambda self, output: output)
    watched = Executor()
    steps.watch_steps(watched, lambda: watched.looks.append("look"))  # type: ignore[arg-type]
    return watched


@pytest.mark.parametrize("step", STEPS)
def test_a_step_raises_what_its_batch_has_reported(executor: Executor, step: str) -> None:
    worker = object.__new__(Worker)
    assert getattr(worker, step)("tokens") == "tokens"
    executor.has_failed = True
    with pytest.raises(PeerTimeoutError, match="rank 1 did not answer within 60 s: phase rows, slot 3"):
        getattr(worker, step)("tokens")


def test_an_output_that_is_still_being_copied_raises_when_it_is_there(executor: Executor) -> None:
    output = object.__new__(Worker).sample_tokens(Copied(executor))
    assert isinstance(output, AsyncModelRunnerOutput)
    with pytest.raises(PeerTimeoutError):
        output.get_output()
    assert output.get_kv_connector_output() == "blocks"  # 0.33 saves them when the step has failed


def test_weights_are_looked_at_before_every_step_of_an_idle_rank_too(executor: Executor) -> None:
    worker = object.__new__(Worker)
    worker.execute_model("scheduled")
    worker.sample_tokens("sampled")
    worker.execute_dummy_batch("idle")
    assert executor.looks == ["look", "note", "look", "note"]  # records are copied once a step, not once a layer
    assert not executor.notes_batches


class Replicas:
    """What a rank forgets."""

    forgotten = 0

    def forget(self) -> None:
        self.forgotten += 1


@pytest.mark.parametrize("update", steps.UPDATES)
def test_replicas_are_forgotten_after_every_update_of_a_trainer_whole_or_not(
    monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    replicas = Replicas()

    def write(self: Worker, forgotten_before: int, fails: bool = False) -> str:
        assert replicas.forgotten == forgotten_before
        if fails:
            raise ConnectionError("the trainer is gone")
        return "done"

    monkeypatch.setattr(Worker, update, write, raising=False)
    steps.watch_updates(steps.while_alive(replicas.forget))
    worker = object.__new__(Worker)
    assert getattr(worker, update)(0) == "done"
    assert replicas.forgotten == 1
    with pytest.raises(ConnectionError):
        getattr(worker, update)(1, fails=True)
    assert replicas.forgotten == 2


def test_an_engine_that_has_ended_is_freed_and_does_not_fail_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*STEPS, *steps.UPDATES):
        monkeypatch.setattr(Worker, name, lambda self, output: output, raising=False)
    executor, replicas = Executor(), Replicas()
    executor.has_failed = True
    steps.watch_steps(executor, steps.while_alive(replicas.forget))  # type: ignore[arg-type]
    steps.watch_updates(steps.while_alive(replicas.forget))
    worker, watched = object.__new__(Worker), (ref(executor), ref(replicas))
    with pytest.raises(PeerTimeoutError):
        worker.execute_model("tokens")
    del executor, replicas
    gc.collect()
    assert [found() for found in watched] == [None, None]
    for name in (*STEPS, *steps.UPDATES):
        assert getattr(worker, name)("output") == "output"
