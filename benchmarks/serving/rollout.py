"""What rollout capture costs: the throughput of stock vLLM with and without it.

Decides the engines and the requests. Beside ``stock`` stand two engines that differ from it in one thing:
``stock-routes`` has vLLM's own flag, which returns routed experts and keeps nothing; ``stock-capture`` has the plugin's
option, which turns the flag on, appends every request to a store and hands the response on behind it. The part between
the two is ours.

A round is one batch of rollouts, as synchronous RL asks for it, the same for each engine, in turns: short prompts and
outputs of very different lengths, all submitted before the first step. It is timed until the last response is handed
on, which with capture is behind its record. So all prompts are computed in the first step, and every later one is of
decode, in a CUDA graph: with requests that come one after the other, chance decides which steps mix the two, and rounds
differ by far more than capture costs. Requests end in the order of their lengths and are recorded while others run.

The first round warms up. An overhead is the time that an engine took more than another in the same round, its median
over rounds; beside it stands an interval of 95 % (``median_interval``).
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import ResultRow
from benchmarks.serving.backends import EngineSpec
from benchmarks.serving.fleet import Fleet
from benchmarks.serving.models import ServedModel
from megaflux_serve.capture import ReplayStore, seal

BENCH = "capture"
STOCK, ROUTES, CAPTURE = "stock", "stock-routes", "stock-capture"
PAIRS = ((ROUTES, STOCK), (CAPTURE, STOCK), (CAPTURE, ROUTES))


def engines(stock: EngineSpec, store: Path) -> list[EngineSpec]:
    """The two engines beside ``stock``.

    Args:
        stock: an engine without capture, of any backend.
        store: where the second captures to.
    """
    options = stock.arguments.get("additional_config", {}).get("megaflux", {})
    added: dict[str, dict[str, Any]] = {
        ROUTES: {"enable_return_routed_experts": True},
        CAPTURE: {"additional_config": {"megaflux": options | {"capture": str(store)}}},
    }
    return [
        dataclasses.replace(
            stock,
            name=name,
            arguments=stock.arguments | more,
            log=stock.log.with_name(stock.log.name.replace(stock.name, name)),
        )
        for name, more in added.items()
    ]


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Two samples that enclose the median of whatever distribution they are drawn from, with at least 95 % certainty.

    They are the k-th smallest and the k-th largest, with the largest k that is as certain. The median is outside when
    fewer than k samples are on one side of it; each is there with probability 1/2, independently of the others. With
    fewer than six samples there is no such k.
    """
    count, k, outside = len(samples), 0, 2 / 2 ** len(samples)
    while outside <= 0.05:
        k += 1
        outside += 2 * math.comb(count, k) / 2**count
    return (sorted(samples)[k - 1], sorted(samples)[-k]) if k else None


@dataclass
class RolloutSamples:
    """Seconds of every round by engine, of one model.

    Attributes:
        model: served.
        num_requests: of a round; an engine runs all of them at the same time.
        prompt_tokens: of every request.
        output_tokens: least and most, drawn evenly.
        seconds: a list by engine; the warm-up is left out.
    """

    model: ServedModel
    num_requests: int
    prompt_tokens: int
    output_tokens: tuple[int, int]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = random.Random(0)
        each, vocabulary = range(self.num_requests), self.model.vocabulary
        self.prompts = [[draw.randrange(vocabulary) for _ in range(self.prompt_tokens)] for _ in each]
        self.lengths = [draw.randint(*self.output_tokens) for _ in each]

    def measure(self, fleet: Fleet, seconds: float, chunk: int, store: Path) -> None:
        """Ask the engines of a fleet for about so many seconds, after a round that warms up; at least one round counts.

        Args:
            fleet: with ``stock`` and those of ``engines``, as far as they started.
            seconds: of rounds.
            chunk: budget of a step.
            store: where the second of ``engines`` captures to; what has gone there is checked at the end.

        Raises:
            ValueError: requests are missing.
        """
        self.seconds = {name: [] for name in fleet.members}
        recorded = len(ReplayStore(store).scan()[0]) if store.exists() else 0  # requests that warmed up
        self._round(fleet, chunk, 0)
        end, number = time.monotonic() + seconds, 1
        while number == 1 or time.monotonic() < end:
            for name, value in self._round(fleet, chunk, number).items():
                self.seconds[name].append(value)
            number += 1
        if CAPTURE in self.seconds:
            self._check_store(store, recorded + number * len(self.prompts))

    def _check_store(self, store: Path, wanted: int) -> None:
        """Seal what was captured, which reads and checks every record."""
        window = seal(ReplayStore(store), "all")
        if len(window) != wanted:
            raise ValueError(f"{len(window)} of {wanted} requests were recorded")
        print(f"  captured: {len(window)} records of {int(window.lengths.sum()):,} tokens, all sound", flush=True)

    def rows(self) -> Iterator[ResultRow]:
        """Throughput of each engine, and overhead of each pair with its interval, from six rounds on."""
        case = {
            "model": self.model.name,
            "layers": self.model.layers,
            "requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": sum(self.lengths) // len(self.lengths),
        }
        for name, seconds in self.seconds.items():
            value = sum(self.lengths) / median(seconds)
            yield ResultRow(BENCH, _case(case, name, seconds), "rollout_tokens_per_s", value, "1/s")
        for name, other in PAIRS:
            if name in self.seconds and other in self.seconds:
                pairs = zip(self.seconds[name], self.seconds[other], strict=True)
                more = [100 * (mine / theirs - 1) for mine, theirs in pairs]
                compared = _case(case, f"{name} over {other}", more)
                yield ResultRow(BENCH, compared, "rollout_overhead_pct", median(more), "%")
                for bound, value in zip(("low", "high"), median_interval(more) or (), strict=False):
                    yield ResultRow(BENCH, compared, f"rollout_overhead_{bound}_pct", value, "%")

    def _round(self, fleet: Fleet, chunk: int, number: int) -> dict[str, float]:
        """Seconds by engine; who begins changes from round to round."""
        names = list(self.seconds)
        first = number % len(names)
        spent: dict[str, float] = {}
        for name in names[first:] + names[:first]:
            spent |= fleet.each("rollout_seconds", self.prompts, self.lengths, chunk, only=[name])
        for name in self.seconds.keys() - spent.keys():  # it failed, and the fleet has said so
            del self.seconds[name]
        shown = " ".join(f"{name} {value:.3f}" for name, value in spent.items())
        print(f"  {self.model.name} rollout, round {number}: seconds {shown}", flush=True)
        return spent


def _case(case: Mapping[str, Any], variant: str, samples: Sequence[float]) -> dict[str, Any]:
    return {**case, "variant": variant, "rounds": len(samples)}


__all__ = ["CAPTURE", "ROUTES", "RolloutSamples", "engines", "median_interval"]
