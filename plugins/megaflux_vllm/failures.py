"""Failed waits of a device executor, raised before the outputs of their step leave the worker.

Decides when the host looks: a step that replays a captured graph runs none of our Python, and the kernels of a failed
wait run to their end, so its tokens would be returned as if nothing had happened. Looking costs a read of host memory.
"""

from __future__ import annotations

import functools
from typing import Any

from megaflux_serve.executors import DeviceExecutor


def watch_failures(executor: DeviceExecutor) -> None:
    """Have vLLM's GPU worker look at ``executor`` after every step of this process; the error ends the engine."""
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

    def checked(step: Any) -> Any:
        @functools.wraps(step)
        def run(self: Worker, *args: Any, **kwargs: Any) -> Any:
            result = step(self, *args, **kwargs)
            if isinstance(result, AsyncModelRunnerOutput):
                return CheckedOutput(result)
            executor.raise_failure()
            return result

        return run

    for name in ("execute_model", "sample_tokens"):
        setattr(Worker, name, checked(getattr(Worker, name)))


__all__ = ["watch_failures"]
