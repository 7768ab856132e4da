"""Rows of routes that wait in the engine for the end of their request, to travel to the front end once.

vLLM's scheduler sends a token's routes with the token, each as an array of its own. With hundreds of running requests
that is most of what the engine and the front end have to pack and unpack in a step, and the GPU waits for it. Nobody
reads routes before the request ends, so here they are put together first.

Decides whose rows wait. A stop string is found in the front end, which ends the request then with the rows that it has:
those of a request with stop strings do not wait. Rows of a request that is aborted are dropped with it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np


class HeldRoutes:
    """Rows of the requests of one scheduler that have not ended.

    A request has one growing buffer, and not parts of the arrays in which they came: those hold all requests of a step,
    and one long request would keep them all.
    """

    def __init__(self) -> None:
        self.rows: dict[str, bytearray] = {}

    def forget_all_but(self, requests: Container[str]) -> None:
        """Drop rows of requests that ended without an output."""
        for ended in [request for request in self.rows if request not in requests]:
            del self.rows[ended]

    def pass_on(self, outputs: Iterable[Any], requests: Mapping[str, Any]) -> None:
        """Take the rows out of the outputs of a step, and put all of them into the last one of a request.

        Args:
            outputs: vLLM's ``EngineCoreOutput``, changed in place; ``routed_experts`` is unsigned [new, layers, k].
            requests: vLLM's requests that have not ended, by id.
        """
        for output in outputs:
            new, rows = output.routed_experts, self.rows.get(output.request_id)
            if new is None:
                continue
            if output.finish_reason is None:
                if rows is None:
                    request = requests.get(output.request_id)
                    if request is None or request.sampling_params.stop:
                        continue
                    rows = self.rows[output.request_id] = bytearray()
                rows += new.tobytes()
                output.routed_experts = None
            elif rows is not None:
                rows += new.tobytes()
                output.routed_experts = np.frombuffer(rows, new.dtype).reshape(-1, *new.shape[1:])
                del self.rows[output.request_id]


__all__ = ["HeldRoutes"]
