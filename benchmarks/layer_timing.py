"""How the layer benchmarks time ranks: one process a GPU, the slowest rank counts. Knows no shape and no variant.

*Burst*: the median of single steps after 50 ms of rest, ranks aligned and links awake. *Sustained*: after 0.5 s of rest
the mean over the second half of steps back to back, where the power limit sets the clock; clock and power are sampled
during that half.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.gpu_meter import GpuMeter
from benchmarks.harness.rows import Plain, ResultRow, RunContext, write_results

REST_S = 0.5
"""Seconds of rest before every sustained run: without it, its speed depended on what had run before."""

PROTOCOLS = ("burst", "sustained")
START = time.monotonic()

Value = TypeVar("Value")


@dataclass(frozen=True)
class Sustained:
    """A sustained run.

    Attributes:
        ms: of a step, the slowest rank.
        states: a rank: mean SM clock in MHz and power in W; empty where NVML does not answer.
    """

    ms: float
    states: tuple[tuple[float, float], ...]

    def rows(self, bench: str, case: Mapping[str, Plain]) -> list[ResultRow]:
        """Clock and power, each the mean over the ranks."""
        if not self.states:
            return []
        clock, power = np.mean(self.states, axis=0)
        return [
            ResultRow(bench, case, "sm_clock_mhz", float(clock), "MHz"),
            ResultRow(bench, case, "power_w", float(power), "W"),
        ]


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def save(path: Path, rows: Sequence[ResultRow]) -> None:
    """Write the rows so far, on rank 0."""
    if dist.get_rank() == 0:
        device = f"{dist.get_world_size()} x {torch.cuda.get_device_name()}"
        write_results(path, rows, RunContext.current(device, "torch", "nvidia-cutlass-dsl"))


def gather(value: Value) -> list[Value]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def align() -> None:
    """All ranks idle and together."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


@cache
def meter() -> GpuMeter | None:
    """The meter of this rank's GPU; None, and a word why, where there is none."""
    try:
        return GpuMeter(str(torch.cuda.get_device_properties().uuid))
    except (ImportError, RuntimeError) as error:
        say(f"clock and power are not recorded: {error}")
        return None


def burst_ms(step: Callable[[], object], stream: torch.cuda.Stream, repeats: int = 5) -> float:
    """Median over repeats of the slowest rank, milliseconds."""
    ballast = torch.zeros(1 << 22, device="cuda")  # 16 MB wake a sleeping link, one element does not
    times = []
    with torch.cuda.stream(stream):
        for _ in range(repeats):
            torch.cuda.synchronize()
            time.sleep(0.05)
            dist.barrier()
            torch.cuda._sleep(1_000_000)
            for _ in range(2):
                dist.all_reduce(ballast)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return float(np.median(np.max(gather(times), axis=0)))


def sustained(step: Callable[[], object], stream: torch.cuda.Stream, estimate_ms: float, span_ms: float) -> Sustained:
    """The second half of steps back to back for about twice ``span_ms``; as many steps on every rank."""
    count = max(10, int(span_ms / max(gather(estimate_ms))))
    watch = meter()
    time.sleep(REST_S)
    align()
    if watch is not None:
        watch.start()
    events = []
    with torch.cuda.stream(stream):
        for i in range(2 * count):
            step()
            if i % 8 == 7 or i + 1 in (count, 2 * count):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                events.append((i + 1, event))
                if len(events) > 4:
                    events[-4][1].synchronize()  # keep the queue short
    torch.cuda.synchronize()
    at = dict(events)
    half_ms = at[count].elapsed_time(at[2 * count])
    state = watch.stop(half_ms / 1000) if watch is not None else None
    clock_and_power = None if state is None else (state.sm_clock_mhz, state.power_w)
    measured = gather((half_ms / count, clock_and_power))
    return Sustained(max(ms for ms, _ in measured), tuple(found for _, found in measured if found is not None))


def hidden_pct(staged: float, pipelined: float, resident: float) -> float | None:
    """The share of the transfer that computing hides (MegaFlux section 4.3); None where it costs less than 2 %: noise.

    One minus the excess of pipelined by that of staged, both over the same plan with its replicas already there.
    """
    if staged - resident <= 0.02 * resident:
        return None
    return 100 * (1 - (pipelined - resident) / (staged - resident))


__all__ = [
    "PROTOCOLS",
    "REST_S",
    "Sustained",
    "align",
    "burst_ms",
    "gather",
    "hidden_pct",
    "meter",
    "save",
    "say",
    "sustained",
]
