"""Failed waits of a device executor, raised before the tokens of their batch leave the scheduler.

Decides when the host looks: a batch that replays a captured graph runs none of our Python, and the kernels of a failed
wait run to their end, so its tokens would be returned as if nothing had happened. Looking costs a read of host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megaflux_sglang.versions import Hook


def checked(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler.process_batch_result``; the error ends the server.

    Raises:
        PeerTimeoutError: a wait of this batch or an earlier one has failed.
    """
    if "megaflux_sglang.ranks" in sys.modules:  # else no layer is ours
        from megaflux_sglang.ranks import device_executors

        for executor in device_executors():
            wait_for_batch(result)
            executor.raise_failure()
    return original(scheduler, batch, result, *args, **kwargs)


def wait_for_batch(result: Any) -> None:
    """Wait until the batch is over, as SGLang is about to do itself: error records arrive with its tokens."""
    import torch

    copied = getattr(result, "copy_done", None)  # with overlap scheduling
    if copied is not None:
        copied.synchronize()
    else:
        torch.cuda.current_stream().synchronize()


HOOKS: tuple[Hook, ...] = (("sglang.srt.managers.scheduler.Scheduler.process_batch_result", checked, "around"),)

__all__ = ["HOOKS"]
