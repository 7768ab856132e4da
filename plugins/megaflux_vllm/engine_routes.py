"""Rollout capture in the engine core: what vLLM's scheduler does for routes in every step, cut down to what is needed.

With routes returned, vLLM's scheduler sends every token's with the token, an array each, and lists all cache blocks of
every running request, of which it reads those of prompts that were just computed. With hundreds of running requests, or
long ones, that is most of the processor time of a step, and the GPU waits for it. Nobody reads routes before a request
ends, so with capture they travel with its last output, and blocks are listed for prompts only.

Decides whose rows wait: not those that the user asked for in responses, and not those of a request with stop strings.
These are found in the front end, which ends the request with the rows that it has. Rows of a request that is aborted
are dropped with it, since it is not recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from megaflux_vllm.capture import ROUTES_NOT_ASKED_FOR


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


def install(module: ModuleType) -> None:
    """Hook vLLM's scheduler; without the option ``capture`` it does what it did."""
    for name, wrapper in WRAPPERS.items():
        method = wrapper(getattr(module.Scheduler, name))
        method.captured_by_megaflux = True
        setattr(module.Scheduler, name, method)


def is_installed(module: ModuleType) -> bool:
    """Whether the scheduler's methods are ours."""
    return all(hasattr(getattr(module.Scheduler, name), "captured_by_megaflux") for name in WRAPPERS)


def _with_rows_at_the_end(update: Any) -> Any:
    @functools.wraps(update)
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self.vllm_config, ROUTES_NOT_ASKED_FOR, False):
            return update(self, *args, **kwargs)
        if not hasattr(self, "megaflux_held_routes"):
            self.megaflux_held_routes = HeldRoutes()
        self.megaflux_held_routes.forget_all_but(self.requests)
        outputs = update(self, *args, **kwargs)
        for of_client in outputs.values():
            self.megaflux_held_routes.pass_on(of_client.outputs, self.requests)
        return outputs

    return update_from_output


def _with_blocks_of_prompts(update: Any) -> Any:
    @functools.wraps(update)
    def _update_after_schedule(self: Any, scheduler_output: Any) -> None:
        lists_blocks = hasattr(self, "_re_block_ids") and hasattr(self.vllm_config, ROUTES_NOT_ASKED_FOR)
        if not lists_blocks:  # no capture, or a release (0.31 and later) that does not list them
            update(self, scheduler_output)
            return
        self.enable_return_routed_experts = False  # read by what is called now for nothing but the list
        try:
            update(self, scheduler_output)
        finally:
            self.enable_return_routed_experts = True
        group = self.routed_experts_mgr.attn_gid
        for request in scheduler_output.num_scheduled_tokens:
            if self.requests[request].num_output_tokens == 0:
                self._re_block_ids[request] = self.kv_cache_manager.get_block_ids(request)[group]

    return _update_after_schedule


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "update_from_output": _with_rows_at_the_end,
    "_update_after_schedule": _with_blocks_of_prompts,
}
"""By the method of ``Scheduler`` that is wrapped."""

__all__ = ["HeldRoutes", "install", "is_installed"]
