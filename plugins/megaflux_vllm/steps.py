"""What is done around the calls of vLLM's worker, whose batches may be replays of captured graphs.

A replay runs none of the layers' Python. So weights that somebody has written in place are noticed before the step,
and a failed wait, whose kernels run to their end, is raised before the step's tokens leave the worker. Decides when the
host looks; both cost reads of host memory. And a trainer may write weights in ways that nobody can notice, so that
replicas are forgotten after each of its updates.

The worker's class outlives an engine that ends in its process; what is watched is not kept alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, ref

from megaflux_serve.executors import DeviceExecutor

UPDATES = ("update_weights", "reset_weights")
"""Methods of vLLM's worker that may write through ``param.data`` and call no loader; 0.32 adds the second."""


def watch_steps(executor: DeviceExecutor, notice_writes: Callable[[], None]) -> None:
    """Have vLLM's GPU worker look before and after every step of this process.

    Args:
        executor: whose failures end the step, and with it the engine.
        notice_writes: called before every step, an idle rank's dummy step too, so that all ranks forget stale replicas
            before the same batch.
    """
    from vllm.v1.outputs import AsyncModelRunnerOutput
    from vllm.v1.worker.gpu_worker import Worker

    class CheckedOutput(AsyncModelRunnerOutput):
        """An output that is still being copied to the host; the error records are there when it is."""

        def __init__(self, output: AsyncModelRunnerOutput, executor: DeviceExecutor) -> None:
            self.output, self.executor = output, executor

        def get_output(self) -> Any:
            result = self.output.get_output()
            self.executor.raise_failure()
            return result

        def get_kv_connector_output(self) -> Any:  # what 0.33 asks of every output when a step has failed
            return self.output.get_kv_connector_output()

    found = ref(executor)

    def watched(step: Any, is_begin: bool) -> Any:
        @functools.wraps(step)
        def run(self: Worker, *args: Any, **kwargs: Any) -> Any:
            executor = found()
            if executor is None:  # this is another engine's step
                return step(self, *args, **kwargs)
            if is_begin:
                notice_writes()
            result = step(self, *args, **kwargs)
            if is_begin:
                executor.note_failures()
            if isinstance(result, AsyncModelRunnerOutput):
                return CheckedOutput(result, executor)
            executor.raise_failure()
            return result

        return run

    executor.notes_batches = False
    for name, is_begin in (("execute_model", True), ("execute_dummy_batch", True), ("sample_tokens", False)):
        setattr(Worker, name, watched(getattr(Worker, name), is_begin))


def watch_updates(forget: Callable[[], None]) -> None:
    """Have vLLM's worker call a function after every update of weights, one that failed half way too.

    Args:
        forget: has every rank forget its replicas before the next batch.
    """
    from vllm.v1.worker.gpu_worker import Worker  # the worker for CPUs is a subclass

    def watched(update: Any) -> Any:
        @functools.wraps(update)
        def run(self: Worker, *args: Any, **kwargs: Any) -> Any:
            try:
                return update(self, *args, **kwargs)
            finally:
                forget()

        return run

    for name in UPDATES:
        if hasattr(Worker, name):
            setattr(Worker, name, watched(getattr(Worker, name)))


def while_alive(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls the bound method, and does nothing once its object has ended; does not keep it alive."""
    found = WeakMethod(method)

    def call() -> None:
        bound = found()
        if bound is not None:
            bound()

    return call


__all__ = ["watch_steps", "watch_updates", "while_alive"]
