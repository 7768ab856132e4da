"""The serving benchmark: tables of routes hold the trace's loads, and metrics say what the samples say."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.bench_serving import prefill_cases
from benchmarks.cases import GPT_OSS
from benchmarks.serving import agreement, fleet
from benchmarks.serving.backends import BACKENDS, Sizes, engine_spec, megaflux_options
from benchmarks.serving.decode import DecodeSamples
from benchmarks.serving.engine import Completion
from benchmarks.serving.fleet import Fleet, Member, TimeLimits
from benchmarks.serving.load import flags
from benchmarks.serving.models import MODELS, NUM_WINDOWS, ServedModel
from benchmarks.serving.pictures import draw_prefill
from benchmarks.serving.prefill import PrefillCase, PrefillSamples
from benchmarks.serving.routes import (
    ROUTINGS,
    expected_counts,
    max_over_mean,
    route_table,
    trace_prompts,
    window_histograms,
)
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError

TINY = MODELS["tiny"]
WIDE = dataclasses.replace(TINY, experts=64, top_k=8, vocabulary=NUM_WINDOWS * 512)
needs_trace = pytest.mark.skipif(not GPT_OSS.is_file(), reason=f"no {GPT_OSS} (set MEGAFLUX_TRACES)")


@pytest.mark.parametrize("routing", [pytest.param(r, marks=() if r == "balanced" else needs_trace) for r in ROUTINGS])
def test_every_token_has_distinct_experts_and_the_table_is_reproducible(routing: str) -> None:
    table = route_table(TINY, routing)
    assert table.shape == (TINY.layers, TINY.vocabulary, TINY.top_k)
    assert (np.diff(np.sort(table, axis=2)) > 0).all()
    assert 0 <= table.min() <= table.max() < TINY.experts
    assert np.array_equal(table, route_table(TINY, routing))


def test_balanced_routes_load_every_expert_alike() -> None:
    counts = expected_counts(route_table(WIDE, "balanced"), trace_prompts(WIDE, NUM_WINDOWS, 512), WIDE.experts)
    assert (counts == NUM_WINDOWS * 512 * WIDE.top_k // WIDE.experts).all()


@needs_trace
def test_a_window_has_the_loads_of_the_trace_resized() -> None:
    table, length = route_table(WIDE, "real-hot-rank"), 512
    for layer, histograms in enumerate(window_histograms(WIDE.layers)):
        order = np.argsort(-histograms.sum(axis=0), kind="stable")
        for window, histogram in enumerate(histograms):
            counts = np.bincount(table[layer, window * length :][:length].ravel(), minlength=WIDE.experts)
            wanted = np.repeat(histogram[order] / 2, 2) / histogram.sum() * length * WIDE.top_k  # 32 experts become 64
            assert np.abs(counts - wanted).max() < 1 or wanted.max() > length  # only a cap changes shares


@needs_trace
def test_hot_experts_on_one_rank_are_the_same_loads_on_other_homes() -> None:
    prompts = trace_prompts(WIDE, NUM_WINDOWS, 512)
    real, hot = route_table(WIDE, "real"), route_table(WIDE, "real-hot-rank")
    for a, b in zip(expected_counts(real, prompts, 64), expected_counts(hot, prompts, 64), strict=True):
        assert np.abs(np.sort(a) - np.sort(b)).max() <= NUM_WINDOWS  # a row a window, by rounding
    assert 1.0 < max_over_mean(real, prompts, 64, 2) < max_over_mean(hot, prompts, 64, 2) < 2.0


def test_prompts_take_the_windows_in_turn_and_fit_them() -> None:
    prompts = trace_prompts(TINY, NUM_WINDOWS + 1, 60)
    assert prompts[1] == list(range(64, 124))
    assert prompts[NUM_WINDOWS] == prompts[0]
    with pytest.raises(ConfigError, match="at most the 64 token ids"):
        trace_prompts(TINY, 1, 65)


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_options_of_every_backend_are_valid_for_every_model(backend: str, model: ServedModel, tmp_path) -> None:
    for is_cpu, num_ranks in ((False, 2), (True, 2), (False, 8)):
        sizes = Sizes(is_cpu=is_cpu, num_ranks=num_ranks)
        spec = engine_spec(backend, model, tmp_path, tmp_path, sizes)
        arguments = spec.arguments
        if not is_cpu:
            assert spec.ranks == (1 if backend == "stock-tp" else num_ranks)
        if backend.startswith("stock"):
            assert "moe_backend" not in arguments
        else:
            options = MegaFluxConfig.parse(arguments["additional_config"]["megaflux"])
            assert options.slot_layout(model.experts, num_ranks).num_replica_slots == options.replica_slots
            assert options.replica_slots == (0 if backend == "fixed" else model.experts // num_ranks // 4)
    staged, pipelined = (megaflux_options(variant, model, 2) for variant in ("staged", "pipelined"))
    assert staged == pipelined | {"transfer": "staged"}


@pytest.mark.parametrize("backend", BACKENDS[2:])
def test_variants_say_who_computes_small_batches_except_where_the_default_is_measured(backend: str, tmp_path) -> None:
    def said(**how: bool) -> int | None:
        spec = engine_spec(backend, MODELS["qwen3-30b-a3b"], tmp_path, tmp_path, Sizes(), **how)
        return spec.arguments["additional_config"]["megaflux"].get("min_tokens")

    assert said() == (256 if backend == "staged" else 0)
    assert said(says_min_tokens=False) is None


def test_a_control_is_measured_in_one_case() -> None:
    cases = prefill_cases([32, 8, 16], [16384, 32768], ["balanced", "real"], ["balanced"])
    assert [case for case in cases if case.routing == "balanced"] == [PrefillCase(16, 16384, "balanced")]
    assert len(cases) == 1 + 6
    assert [case.chunk for case in cases] == sorted(case.chunk for case in cases)


def test_prefill_compares_medians_with_fixed_and_the_faster_stock() -> None:
    samples = PrefillSamples(TINY, prompt_tokens=60)
    case = PrefillCase(8, 128, "real")
    samples.skew[case] = 1.25
    samples.seconds[case] = {"stock": [0.4, 0.6, 9.0], "stock-tp": [0.5], "fixed": [0.3], "sticky": [0.2, 0.25, 0.1]}
    values = {(row.case.get("backend"), row.metric): row.value for row in samples.rows()}
    assert values["stock", "latency_ms"] == 600
    assert values["sticky", "speedup_over_fixed"] == pytest.approx(1.5)
    assert values["sticky", "speedup_over_stock"] == pytest.approx(2.5)
    assert values["fixed", "speedup_over_stock"] == pytest.approx(5 / 3)
    assert ("stock", "speedup_over_stock") not in values
    assert values[None, "fixed_max_over_mean"] == 1.25


def test_decode_leaves_the_first_token_out() -> None:
    samples = DecodeSamples(TINY, prompt_tokens=16, output_tokens=11)
    samples.seconds[4] = {"stock": [(0.1, 0.3)] * 3, "sticky": [(0.2, 0.3), (0.1, 0.2), (0.5, 9.0)]}
    values = {(row.case["backend"], row.metric): row.value for row in samples.rows()}
    assert values["stock", "step_ms"] == pytest.approx(20)
    assert values["stock", "tokens_per_s"] == pytest.approx(200)
    assert values["sticky", "throughput_vs_stock"] == pytest.approx(2)


def test_log_probabilities_are_compared_where_both_saw_the_same_tokens() -> None:
    reference = [Completion((1, 2, 3), (-1.0, -2.0, -3.0)), Completion((4, 5, 6), (-1.0, -1.0, -1.0))]
    other = [Completion((1, 2, 3), (-1.0, -2.0, -3.5)), Completion((4, 9, 6), (-1.25, -7.0, -1.0))]
    metrics = {name: value for name, (value, _) in agreement.compare(reference, other).items()}
    assert metrics["answers_equal_pct"] == 50
    assert metrics["first_token_equal_pct"] == 100
    assert metrics["next_token_equal_pct"] == pytest.approx(100 * 4 / 5)
    assert metrics["logprob_difference_max"] == 0.5
    assert metrics["logprob_difference_median"] == pytest.approx(0.125)


def test_engine_arguments_become_flags_of_the_server() -> None:
    given = {"max_model_len": 256, "enforce_eager": True, "enable_prefix_caching": False, "additional_config": {"a": 1}}
    assert list(flags(given)) == [
        *("--max-model-len", "256", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--additional-config", '{"a": 1}'),
    ]


def test_the_picture_is_drawn_from_the_rows(tmp_path) -> None:
    rows = []
    for batch, backend, value in ((8, "fixed", 2.0), (8, "sticky", 1.0), (16, "fixed", 3.0), (16, "sticky", 2.0)):
        case = {"model": "tiny", "routing": "real", "batch": batch, "chunk": 16384, "backend": backend}
        rows.append({"metric": "latency_ms", "case": case, "value": value})
    draw_prefill(tmp_path / "prefill.png", rows)
    assert (tmp_path / "prefill.png").read_bytes().startswith(b"\x89PNG")
    draw_prefill(tmp_path / "none.png", [])
    assert not (tmp_path / "none.png").exists()


class StubMember(Member):
    """A member whose engine is this test: it says what it is told to."""

    def __init__(self, name: str, *messages: object) -> None:
        self.name, self.spec, self.is_killed = name, SimpleNamespace(log=Path("no.log")), False
        self.connection, self.engine = multiprocessing.Pipe()
        for message in messages:
            self.engine.send(message)

    def kill(self) -> None:
        self.is_killed = True


def test_engines_are_taken_as_they_get_ready_and_the_others_left_out(capsys: pytest.CaptureFixture) -> None:
    good, late, broken = StubMember("good", ("ready", 3.0)), StubMember("late"), StubMember("broken", ("failed", "why"))
    gone = StubMember("gone")
    gone.engine.close()
    warmed = []
    ready = fleet._wait([late, broken, gone, good], TimeLimits(5.0, 0.1), lambda member: warmed.append(member.name))
    assert [member.name for member in ready] == warmed == ["good"]
    assert [member.is_killed for member in (late, broken, gone, good)] == [True, True, True, False]
    said = capsys.readouterr().out
    assert "late: did not start in time" in said
    assert "broken: engine broken failed to start: why" in said
    assert "gone: engine gone ended while it should start" in said


def test_an_engine_that_fails_a_call_is_left_out_and_the_others_answer() -> None:
    good, bad, slow = StubMember("good", ("done", 7)), StubMember("bad", ("failed", "no")), StubMember("slow")
    engines = Fleet({"bad": bad, "slow": slow, "good": good}, call_s=0.1)
    assert engines.each("count_steps") == {"good": 7}
    assert list(engines.members) == ["good"]
    assert bad.is_killed
    assert slow.is_killed
    assert good.engine.recv() == ("count_steps", ())
