"""What the engine core does with routes under capture, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megaflux_vllm.capture import ROUTES_NOT_ASKED_FOR
from megaflux_vllm.engine_routes import HeldRoutes, install, is_installed

from tests.oracles.replay_routes import random_routes

ROUTES = random_routes(1, 12, 3, 16, 2).astype(np.uint16)


def output(request: str, rows: Any, is_last: bool = False) -> Any:
    """A step's output of a request; ``rows`` is None where it has no routes."""
    return SimpleNamespace(request_id=request, routed_experts=rows, finish_reason="stop" if is_last else None)


def running(*requests: str, stop: tuple[str, ...] = ()) -> dict[str, Any]:
    """Requests that have not ended."""
    return {request: SimpleNamespace(sampling_params=SimpleNamespace(stop=list(stop))) for request in requests}


@given(st.lists(st.sampled_from("abc"), min_size=3, max_size=40), st.randoms(use_true_random=False))
def test_the_last_output_of_every_request_brings_all_its_rows_and_no_other_brings_any(steps, draw):
    held, sent, alive = HeldRoutes(), {name: [] for name in "abc"}, running(*"abc")
    for request in steps:
        begin = draw.randrange(len(ROUTES))
        rows = ROUTES[begin : begin + draw.choice((1, 1, 1, 5))]
        sent[request].append(rows)
        step = output(request, rows)
        held.pass_on([step, output("d", None)], alive)
        assert step.routed_experts is None
    for request, rows in sent.items():
        last = output(request, ROUTES[:1], is_last=True)
        held.pass_on([last], running())
        assert last.routed_experts.dtype == ROUTES.dtype
        assert np.array_equal(last.routed_experts, np.concatenate([*rows, ROUTES[:1]]))
    assert not held.rows


def test_rows_of_a_request_that_may_end_in_the_front_end_do_not_wait():
    held, step = HeldRoutes(), output("a", ROUTES[:1])
    held.pass_on([step], running("a", stop=("\n",)))
    assert step.routed_experts is not None
    assert not held.rows
    last = output("a", ROUTES[1:2], is_last=True)
    held.pass_on([last], running())
    assert np.array_equal(last.routed_experts, ROUTES[1:2])


def test_rows_of_an_aborted_request_are_dropped():
    held = HeldRoutes()
    held.pass_on([output("a", ROUTES[:1]), output("b", ROUTES[:2])], running("a", "b"))
    held.forget_all_but(running("b", "c"))
    assert list(held.rows) == ["b"]


class Scheduler:
    """What the hooks need of vLLM's: routes of every running request, whose blocks it lists in every step."""

    def __init__(self, **config: bool) -> None:
        self.vllm_config = SimpleNamespace(**config)
        self.enable_return_routed_experts = True
        self.routed_experts_mgr = SimpleNamespace(attn_gid=1)
        self.requests = running("prompt", "decode")
        for name, request in self.requests.items():
            request.num_output_tokens = int(name == "decode")
        blocks = {"prompt": ([], [7, 8]), "decode": ([], [9])}
        self.kv_cache_manager = SimpleNamespace(get_block_ids=blocks.__getitem__)
        self._re_block_ids: dict[str, list[int]] = {}

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self.enable_return_routed_experts:
            ids = self.kv_cache_manager.get_block_ids
            self._re_block_ids.update({name: ids(name)[1] for name in scheduler_output.num_scheduled_tokens})

    def update_from_output(self, rows: Any) -> Any:
        return {0: SimpleNamespace(outputs=[output("decode", rows)])}


@pytest.mark.parametrize(
    ("config", "blocks", "waits"),
    [
        ({}, {"prompt": [7, 8], "decode": [9]}, False),
        ({ROUTES_NOT_ASKED_FOR: False}, {"prompt": [7, 8]}, False),
        ({ROUTES_NOT_ASKED_FOR: True}, {"prompt": [7, 8]}, True),
    ],
    ids=["no capture", "responses carry routes", "capture alone"],
)
def test_the_scheduler_does_less_with_capture_and_holds_rows_that_nobody_asked_for(config, blocks, waits):
    module = SimpleNamespace(Scheduler=type("Hooked", (Scheduler,), {}))
    assert not is_installed(module)
    install(module)
    assert is_installed(module)
    scheduler = module.Scheduler(**config)
    scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens={"prompt": 5, "decode": 1}))
    assert scheduler._re_block_ids == blocks
    assert scheduler.enable_return_routed_experts
    (step,) = scheduler.update_from_output(ROUTES[:1])[0].outputs
    assert (step.routed_experts is None) == waits
