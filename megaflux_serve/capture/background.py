"""One thread that carries out calls in the order of their arrival, so that recording delays nobody who computes.

Decides order and how much may wait. Checking and compressing release Python's lock, so a front end goes on meanwhile;
what has to come after a record, such as its response, is submitted behind it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

MAX_WAITING = 256
"""Calls that may wait. A caller that is faster than the disk is held up, instead of filling the memory with routes."""


class CallThread:
    """Calls in order, in a thread that starts with the first.

    ::

        thread = CallThread("capture", logger)
        thread.submit(recorder.record, request)
        thread.submit(respond, answer)  # after the record
        thread.wait()  # until both are done
    """

    def __init__(self, name: str, logger: logging.Logger) -> None:
        self.name, self.logger = name, logger
        self._calls: queue.Queue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[..., Any], *args: Any) -> None:
        """Have a call carried out after all that were submitted before; an exception is logged and ends no more."""
        if self._thread is None:  # a daemon: a process that ends takes what nobody waits for with it, as a kill does
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._calls.put((call, args))

    def wait(self) -> None:
        """Until every call submitted so far is done."""
        self._calls.join()

    def _run(self) -> None:
        while True:
            call, args = self._calls.get()
            try:
                call(*args)
            except Exception:
                self.logger.exception("a call of the thread %s failed", self.name)
            finally:
                self._calls.task_done()
                del call, args  # routes are not kept until the next call comes


__all__ = ["CallThread"]
