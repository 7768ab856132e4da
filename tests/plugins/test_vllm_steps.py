"""What the host notices around steps that replay captured graphs: failed waits and weights written in place."""

from __future__ import annotations

from typing import Any

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


def test_weights_are_looked_at_before_every_step_of_an_idle_rank_too(executor: Executor) -> None:
    worker = object.__new__(Worker)
    worker.execute_model("scheduled")
    worker.sample_tokens("sampled")
    worker.execute_dummy_batch("idle")
    assert executor.looks == ["look", "note", "look", "note"]  # records are copied once a step, not once a layer
    assert not executor.notes_batches
