"""What rollout capture costs: the throughput of stock vLLM with and without it.

Decides the engines and the requests. Beside ``stock`` stand two engines that differ from it in one thing:
``stock-routes`` has vLLM's own flag, which returns routed experts and keeps nothing; ``stock-capture`` has the plugin's
option, which turns the flag on, appends every request to a store and hands the response on behind it. The part between
the two is ours.

A round is the same requests for each engine, in turns: short prompts and outputs of very different lengths, asked by as
many clients as the engine runs at a time, each one after the other. The first round warms up. An overhead is the time
that an engine took more than another in the same round, its median; ``rollout_noise_pct`` is how far the seconds of
``stock`` lie apart, (largest - smallest) / median.
"""

from __future__ import annotations

import dataclasses
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
MIN_ROUNDS = 2


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


@dataclass
class RolloutSamples:
    """Seconds of every round by engine, of one model.

    Attributes:
        model: served.
        num_clients: requests at a time, over all ranks.
        prompt_tokens: of every request.
        output_tokens: least and most, drawn evenly.
        seconds: a list by engine; the warm-up is left out.
    """

    model: ServedModel
    num_clients: int
    prompt_tokens: int
    output_tokens: tuple[int, int]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = random.Random(0)
        count, vocabulary = 2 * self.num_clients, self.model.vocabulary
        self.prompts = [[draw.randrange(vocabulary) for _ in range(self.prompt_tokens)] for _ in range(count)]
        self.lengths = [draw.randint(*self.output_tokens) for _ in range(count)]

    def measure(self, fleet: Fleet, seconds: float, store: Path) -> None:
        """Ask the engines of a fleet for about so many seconds, after a round that warms up.

        Args:
            fleet: with ``stock`` and those of ``engines``, as far as they started.
            seconds: of rounds.
            store: where the second of ``engines`` captures to; what has gone there is checked at the end.

        Raises:
            ValueError: requests are missing.
        """
        self.seconds = {name: [] for name in fleet.members}
        recorded = len(ReplayStore(store).scan()[0]) if store.exists() else 0  # requests that warmed up
        end, number = None, 0
        while end is None or number <= MIN_ROUNDS or time.monotonic() < end:
            spent = self._round(fleet, number)
            shown = " ".join(f"{name} {value:.3f}" for name, value in spent.items())
            print(f"  {self.model.name} rollout, round {number}: seconds {shown}", flush=True)
            if number:
                for name, value in spent.items():
                    self.seconds[name].append(value)
            end = end or time.monotonic() + seconds
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
        """Throughput of each engine, overhead of each pair, and how much rounds differ."""
        case = {
            "model": self.model.name,
            "layers": self.model.layers,
            "clients": self.num_clients,
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
                value = median(more)
                yield ResultRow(BENCH, _case(case, f"{name} over {other}", more), "rollout_overhead_pct", value, "%")
        if seconds := self.seconds.get(STOCK):
            value = 100 * (max(seconds) - min(seconds)) / median(seconds)
            yield ResultRow(BENCH, _case(case, STOCK, seconds), "rollout_noise_pct", value, "%")

    def _round(self, fleet: Fleet, number: int) -> dict[str, float]:
        """Seconds by engine; who begins changes from round to round."""
        names = list(self.seconds)
        first = number % len(names)
        spent: dict[str, float] = {}
        for name in names[first:] + names[:first]:
            spent |= fleet.each("rollouts", self.prompts, self.lengths, self.num_clients, only=[name])
        for name in self.seconds.keys() - spent.keys():  # it failed, and the fleet has said so
            del self.seconds[name]
        return spent


def _case(case: Mapping[str, Any], variant: str, samples: Sequence[float]) -> dict[str, Any]:
    return {**case, "variant": variant, "rounds": len(samples)}


__all__ = ["CAPTURE", "ROUTES", "RolloutSamples", "engines"]
