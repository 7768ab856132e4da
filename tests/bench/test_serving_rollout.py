"""The rollout part of the serving benchmark, without engines: turns, engines that fail, and the figures."""

from __future__ import annotations

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
from benchmarks.serving.rollout import CAPTURE, ROUTES, STOCK, RolloutSamples

TINY = MODELS["tiny"]


class Fleet:
    """Engines that take the seconds that they are told, and fail when they have no more."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.members, self.asked = seconds, list[str]()

    def each(self, method: str, *arguments: Any, only: Sequence[str]) -> dict[str, float]:
        (name,) = only
        self.asked.append(name)
        return {name: self.members[name].pop(0)} if self.members[name] else {}


def samples() -> RolloutSamples:
    return RolloutSamples(TINY, 4, 16, (8, 32))


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A store of three requests that warmed up, and the window that is sealed at the end: its lengths."""
    sealed = SimpleNamespace(lengths=np.full(3 + 3 * 8, 20))
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
    made.measure(fleet, 0, tmp_path)  # type: ignore[arg-type]
    assert made.seconds == {STOCK: [1.0, 2.0], ROUTES: [1.5, 2.0], CAPTURE: [1.1, 2.2]}
    assert fleet.asked == [STOCK, ROUTES, CAPTURE, ROUTES, CAPTURE, STOCK, CAPTURE, STOCK, ROUTES]
    assert len(made.prompts) == len(made.lengths) == 8
    assert all(8 <= length <= 32 for length in made.lengths)


def test_a_request_that_was_not_recorded_is_an_error(tmp_path: Path, window: SimpleNamespace) -> None:
    window.lengths = window.lengths[1:]
    with pytest.raises(ValueError, match="26 of 27 requests were recorded"):
        samples().measure(Fleet({STOCK: [1.0] * 3, CAPTURE: [1.0] * 3}), 0, tmp_path)  # type: ignore[arg-type]


def test_an_engine_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, window: SimpleNamespace) -> None:
    made, fleet = samples(), Fleet({STOCK: [9.0, 1.0, 2.0], CAPTURE: [9.0, 1.1]})
    made.measure(fleet, 0, tmp_path)  # type: ignore[arg-type]
    assert made.seconds == {STOCK: [1.0, 2.0]}
    assert {row.metric for row in made.rows()} == {"rollout_tokens_per_s", "rollout_noise_pct"}


def test_an_overhead_is_the_median_of_rounds_and_compares_within_a_round() -> None:
    made = samples()
    made.seconds = {STOCK: [1.0, 2.0, 4.0], ROUTES: [1.0, 2.0, 4.0], CAPTURE: [1.01, 2.04, 4.4]}
    values = {(row.case["variant"], row.metric): row.value for row in made.rows()}
    assert values[f"{CAPTURE} over {STOCK}", "rollout_overhead_pct"] == pytest.approx(2)
    assert values[f"{ROUTES} over {STOCK}", "rollout_overhead_pct"] == pytest.approx(0)
    assert values[STOCK, "rollout_noise_pct"] == pytest.approx(150)
    assert values[CAPTURE, "rollout_tokens_per_s"] == pytest.approx(sum(made.lengths) / 2.04)


def test_engines_differ_from_stock_in_one_thing_each(tmp_path: Path) -> None:
    stock = engine_spec("sticky", TINY, tmp_path, tmp_path / "logs", Sizes(256, 8, is_cpu=True))
    routes, capture = rollout.engines(stock, tmp_path / "replay")
    assert routes.arguments == stock.arguments | {"enable_return_routed_experts": True}
    options = stock.arguments["additional_config"]["megaflux"]
    assert capture.arguments["additional_config"] == {"megaflux": options | {"capture": str(tmp_path / "replay")}}
    assert len({stock.log, routes.log, capture.log}) == 3
