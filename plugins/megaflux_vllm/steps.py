"""What the host looks at around every step of a worker whose batches may be replays of captured graphs.

A replay runs none of the layers' Python. So weights that somebody has written in place are noticed before the step,
and a failed wait, whose kernels run to their end, is raised before the step's tokens leave the worker. Decides when the
host looks; both cost reads of host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megaflux_serve.executors import DeviceExecutor


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

        def __init__(self, output: AsyncModelRunnerOutput) -> None:
            self.output = output

        def get_output(self) -> Any:
            result = self.output.get_output()
            executor.raise_failure()
            return result

    def watched(step: Any, is_begin: bool) -> Any:
        @functools.wraps(step)
        def run(self: Worker, *args: Any, **kwargs: Any) -> Any:
            if is_begin:
                notice_writes()
            result = step(self, *args, **kwargs)
            if is_begin:
                executor.note_failures()
            if isinstance(result, AsyncModelRunnerOutput):
                return CheckedOutput(result)
            executor.raise_failure()
            return result

        return run

    executor.notes_batches = False
    for name, is_begin in (("execute_model", True), ("execute_dummy_batch", True), ("sample_tokens", False)):
        setattr(Worker, name, watched(getattr(Worker, name), is_begin))


__all__ = ["watch_steps"]
