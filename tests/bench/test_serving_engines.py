"""The serving benchmark on the CPU: real engines route exactly by the table, keep budgets and agree with stock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.cases import GPT_OSS
from benchmarks.serving import agreement
from benchmarks.serving.backends import Sizes, engine_spec
from benchmarks.serving.fleet import EngineError, Fleet, running
from benchmarks.serving.models import MODELS
from benchmarks.serving.routes import expected_counts, route_table, trace_prompts

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TINY = MODELS["tiny"]
SIZES = Sizes(max_batch_tokens=128, max_requests=8, is_cpu=True)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("serving")
    checkpoint = TINY.write(folder)
    with running([engine_spec(name, TINY, checkpoint, folder, SIZES) for name in ("stock", "sticky")]) as engines:
        assert set(engines.members) == {"stock", "sticky"}
        yield engines


@pytest.mark.skipif(not GPT_OSS.is_file(), reason=f"no {GPT_OSS} (set MEGAFLUX_TRACES)")
@pytest.mark.parametrize("chunk", [32, 128])
def test_an_engine_routes_exactly_what_the_table_says(fleet: Fleet, tmp_path, chunk: int) -> None:
    table, prompts = route_table(TINY, "real-hot-rank"), trace_prompts(TINY, 7, 50)
    np.save(tmp_path / "routes.npy", table)
    sticky = fleet.members["sticky"]
    sticky.call("call_workers", "benchmark_force_routes", str(tmp_path / "routes.npy"), True)
    sticky.call("batch_seconds", prompts, 1, chunk)
    by_rank = np.array(sticky.call("call_workers", "benchmark_counts"))
    sticky.call("call_workers", "benchmark_force_routes", None)
    assert np.array_equal(by_rank.sum(axis=0), expected_counts(table, prompts, TINY.experts))
    assert np.array_equal(by_rank[1], expected_counts(table, prompts[1::2], TINY.experts))  # dealt in turn


def test_the_budget_of_a_step_comes_with_the_requests(fleet: Fleet) -> None:
    prompts = trace_prompts(TINY, 4, 64)  # 128 tokens a rank
    stock, taken = fleet.members["stock"], {}
    for chunk in (32, 128):
        before = stock.call("count_steps")
        stock.call("batch_seconds", prompts, 1, chunk)
        taken[chunk] = stock.call("count_steps") - before
    assert taken[32] >= 8  # 256 tokens on the one rank of stock vLLM here
    assert taken[128] < taken[32]


def test_a_batch_of_rollouts_takes_as_many_steps_as_the_longest(fleet: Fleet) -> None:
    prompts, stock = trace_prompts(TINY, 4, 16), fleet.members["stock"]
    before = stock.call("count_steps")
    assert stock.call("rollout_seconds", prompts, [12, 3, 20, 7], 128) > 0
    assert 20 <= stock.call("count_steps") - before < 20 + 7  # one after the other they would take 42


def test_answers_are_those_of_stock_vllm_in_float32(fleet: Fleet) -> None:
    answers = agreement.measure(fleet, TINY, num_prompts=12, lengths=(4, 16), output_tokens=8, batch=8)
    metrics = {name: value for name, (value, _) in agreement.compare(answers["stock"], answers["sticky"]).items()}
    assert metrics["answers_equal_pct"] == 100
    assert metrics["logprob_difference_max"] < 1e-5


def test_a_load_with_aborted_requests_leaves_the_engine_as_it_was(fleet: Fleet) -> None:
    sticky, prompts = fleet.members["sticky"], trace_prompts(TINY, 4, 40)
    before = sticky.call("complete", prompts, 6, 128, True)
    counted = sticky.call("soak", 6.0, 12, (4, 100), 16, 128, 0)
    assert counted["finished"] > 0
    assert counted["aborted"] > 0
    assert sticky.call("complete", prompts, 6, 128, True) == before


def test_a_call_that_fails_says_what_and_leaves_the_engine_running(fleet: Fleet) -> None:
    with pytest.raises(EngineError, match="failed to batch_seconds"):
        fleet.members["stock"].call("batch_seconds", [[0] * 1000], 1, 128)
    assert fleet.members["stock"].call("count_steps") > 0


def test_an_engine_that_does_not_start_is_left_out_with_the_reason(tmp_path, capfd: pytest.CaptureFixture) -> None:
    spec = engine_spec("sticky", TINY, TINY.write(tmp_path), tmp_path, SIZES)
    wrong = dataclasses.replace(spec, arguments=spec.arguments | {"enable_eplb": True})
    with running([wrong]) as engines:
        assert engines.members == {}
    assert "LEFT OUT from here: sticky" in (said := capfd.readouterr().out)
    assert "--enable-eplb" in said
