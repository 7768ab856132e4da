"""vLLM's scheduler with a budget of tokens a step that comes with the requests.

Decides nothing else. With it one running engine can be measured at several chunk budgets, where vLLM takes one when it
starts (``--max-num-batched-tokens``, which stays the largest).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.serving.backends import BUDGET


class BudgetScheduler(AsyncScheduler):
    """Takes the budget from ``SamplingParams(extra_args={BUDGET: tokens})`` of the request added last."""

    def add_request(self, request: Any) -> None:
        given = request.sampling_params.extra_args or {}
        self.max_num_scheduled_tokens = given.get(BUDGET, self.scheduler_config.max_num_batched_tokens)
        super().add_request(request)


__all__ = ["BudgetScheduler"]
