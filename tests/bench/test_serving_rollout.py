"""The rollout part of the serving benchmark, without engines: turns, engines that fail, and the figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from benchmarks.serving import rollout
from benchmarks.serving.backends import Sizes, engine_spec
from benchmarks.serving.models import MODELS
from benchmarks.serving.rollout import CAPTURE, ROUTES, STOCK, RolloutSamples, median_interval

TINY = MODELS["tiny"]


class Fleet:
    """Engines that take the seconds that they are told, and fail when they have no more; a round takes no time."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.members, self.asked = seconds, list[str]()

    def each(self, method: str, *arguments: Any, only: Sequence[str]) -> dict[str, float]:
        (name,) = only
        assert method == "rollout_seconds"
        assert len(arguments[0]) == len(arguments[1]) == 8
        self.asked.append(name)
        return {name: self.members[name].pop(0)} if self.members[name] else {}


def samples() -> RolloutSamples:
    return RolloutSamples(TINY, 8, 16, (8, 32))


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock by which two rounds fit in a second, and three requests that warmed up in a store.

    The window that is sealed at the end has the lengths of those and of three rounds.
    """
    sealed = SimpleNamespace(lengths=np.full(3 + 3 * 8, 20))
    monkeypatch.setattr(rollout.time, "monotonic", itertools.count(step=0.6).__next__)
    monkeypatch.setattr(rollout, "ReplayStore", lambda folder: SimpleNamespace(scan=lambda: ([None] * 3, [])))
    monkeypatch.setattr(rollout, "seal", lambda store, name: Window(sealed.lengths))
    return sealed


class Window:
    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)


def test_every_engine_is_asked_the_same_in_turns_and_the_first_round_warms_up(
    tmp_path: Path, window: SimpleNamespace
) -> None:
    made, fleet = samples(), Fleet({STOCK: [9.0, 1.0, 2.0], ROUTES: [9.0, 1.5, 2.0], CAPTURE: [9.0, 1.1, 2.2]})
    made.measure(fleet, 1, 128, tmp_path)  # type: ignore[arg-type]
    assert made.seconds == {STOCK: [1.0, 2.0], ROUTES: [1.5, 2.0], CAPTURE: [1.1, 2.2]}
    assert fleet.asked == [STOCK, ROUTES, CAPTURE, ROUTES, CAPTURE, STOCK, CAPTURE, STOCK, ROUTES]
    assert all(8 <= length <= 32 for length in made.lengths)


def test_a_request_that_was_not_recorded_is_an_error(tmp_path: Path, window: SimpleNamespace) -> None:
    window.lengths = window.lengths[1:]
    with pytest.raises(ValueError, match="26 of 27 requests were recorded"):
        samples().measure(Fleet({STOCK: [1.0] * 3, CAPTURE: [1.0] * 3}), 1, 128, tmp_path)  # type: ignore[arg-type]


def test_an_engine_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, window: SimpleNamespace) -> None:
    made, fleet = samples(), Fleet({STOCK: [9.0, 1.0, 2.0], CAPTURE: [9.0, 1.1]})
    made.measure(fleet, 1, 128, tmp_path)  # type: ignore[arg-type]
    assert made.seconds == {STOCK: [1.0, 2.0]}
    assert [row.metric for row in made.rows()] == ["rollout_tokens_per_s"]


def test_one_round_counts_however_long_it_takes(tmp_path: Path, window: SimpleNamespace) -> None:
    made = samples()
    made.measure(Fleet({STOCK: [9.0, 1.0, 2.0]}), 0, 128, tmp_path)  # type: ignore[arg-type]
    assert made.seconds == {STOCK: [1.0]}


def test_an_overhead_is_the_median_of_rounds_and_compares_within_a_round() -> None:
    made = samples()
    made.seconds = {STOCK: [1.0, 2.0, 4.0], ROUTES: [1.0, 2.0, 4.0], CAPTURE: [1.01, 2.04, 4.4]}
    values = {(row.case["variant"], row.metric): row.value for row in made.rows()}
    assert values[f"{CAPTURE} over {STOCK}", "rollout_overhead_pct"] == pytest.approx(2)
    assert values[f"{ROUTES} over {STOCK}", "rollout_overhead_pct"] == pytest.approx(0)
    assert values[CAPTURE, "rollout_tokens_per_s"] == pytest.approx(sum(made.lengths) / 2.04)


def test_an_overhead_has_an_interval_from_six_rounds_on() -> None:
    made = samples()
    made.seconds = {STOCK: [1.0] * 6, CAPTURE: [1.01, 1.02, 1.03, 1.04, 1.05, 0.99]}
    values = {row.metric: row.value for row in made.rows()}
    assert values["rollout_overhead_low_pct"] == pytest.approx(-1)
    assert values["rollout_overhead_pct"] == pytest.approx(2.5)
    assert values["rollout_overhead_high_pct"] == pytest.approx(5)
    made.seconds = {STOCK: [1.0] * 5, CAPTURE: [1.01] * 5}
    assert "rollout_overhead_low_pct" not in {row.metric for row in made.rows()}


@pytest.mark.parametrize("count", range(6, 31))
def test_the_median_is_in_the_interval_as_often_as_that_says_and_no_narrower_one_would_do(count: int) -> None:
    """The number of samples below the median is binomial; a sample here is its own rank."""
    low, high = median_interval(range(1, count + 1))

    def certainty(below: int) -> float:
        return sum(math.comb(count, number) for number in range(below, count - below + 1)) / 2**count

    assert high == count + 1 - low
    assert certainty(int(low)) >= 0.95 > certainty(int(low) + 1)


@pytest.mark.parametrize("count", range(6))
def test_few_samples_have_no_interval(count: int) -> None:
    assert median_interval(range(count)) is None


def test_engines_differ_from_stock_in_one_thing_each(tmp_path: Path) -> None:
    stock = engine_spec("sticky", TINY, tmp_path, tmp_path / "logs", Sizes(256, 8, is_cpu=True))
    routes, capture = rollout.engines(stock, tmp_path / "replay")
    assert routes.arguments == stock.arguments | {"enable_return_routed_experts": True}
    options = stock.arguments["additional_config"]["megaflux"]
    assert capture.arguments["additional_config"] == {"megaflux": options | {"capture": str(tmp_path / "replay")}}
    assert len({stock.log, routes.log, capture.log}) == 3
