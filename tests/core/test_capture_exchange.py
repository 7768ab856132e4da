"""Routes in the forms of training frameworks and back, value by value, and the figures of a window."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflux_serve.capture import ModelShape, ReplayRecord
from megaflux_serve.capture.exchange import (
    decode_response,
    from_verl,
    read_router_trace,
    to_rollout,
    to_router_replay,
    to_verl,
    write_router_trace,
)
from megaflux_serve.capture.files import export_records, import_records
from megaflux_serve.capture.profile import layer_profiles, root_jsd, task_distances
from megaflux_serve.errors import ConfigError, InputError
from tests.oracles.replay_routes import random_routes

MODEL = ModelShape(num_experts=16, top_k=3, num_layers=4, moe_layers=(1, 3))


def record(seed: int, prompt: int, output: int, holes: tuple[int, ...] = ()) -> ReplayRecord:
    routes = random_routes(seed, prompt + output - 1, 2, 16, 3)
    routes[list(holes)] = -1
    return ReplayRecord.of(f"r{seed}", routes, MODEL, prompt_tokens=prompt, output_tokens=output)


def all_layers(record: ReplayRecord) -> np.ndarray:
    """Routes with an entry for every layer, built one entry at a time."""
    out = np.zeros((len(record.routes), 4, 3), dtype=np.int64)
    for row in range(len(record.routes)):
        for place, layer in enumerate((1, 3)):
            out[row, layer] = record.routes[row, place]
        if not record.valid[row]:
            out[row] = -1
    return out


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_slime_and_miles_get_every_layer_as_int32_and_no_row_without_routes(framework: str) -> None:
    found = to_rollout(record(1, 3, 4), framework)
    assert found.dtype == np.int32
    assert np.array_equal(found, all_layers(record(1, 3, 4)))
    with pytest.raises(InputError, match=f"record 'r1': row 2 has no routes; allowed: .*, for {framework}"):
        to_rollout(record(1, 3, 4, holes=(2, 5)), framework)


def test_verl_gets_prompts_on_the_left_and_responses_on_the_right() -> None:
    records = [record(1, 3, 4), record(2, 5, 1), record(3, 1, 0)]
    batch = to_verl(records, prompt_length=6, response_length=5)
    assert batch["routed_experts"].dtype == np.int16
    assert batch["routed_experts"].shape == (3, 11, 4, 3)
    for i, wanted in enumerate(records):
        first, rows = 6 - wanted.prompt_tokens, all_layers(wanted)
        tokens = np.zeros(11, dtype=int)
        tokens[first : first + wanted.num_tokens] = 1
        assert np.array_equal(batch["attention_mask"][i], tokens)
        for place in range(11):
            row = place - first
            has_routes = 0 <= row < len(rows)
            assert batch["routes_mask"][i, place] == has_routes
            assert np.array_equal(batch["routed_experts"][i, place], rows[row] if has_routes else np.zeros((4, 3)))
    with pytest.raises(InputError, match="record 'r2': has 5 and 1 tokens; allowed: 4 of prompt and 5 of response"):
        to_verl(records, prompt_length=4, response_length=5)


def test_verl_gets_no_row_without_routes_since_it_replays_every_row_but_the_last() -> None:
    with pytest.raises(InputError, match="record 'r2': row 1 has no routes; allowed: routes in every row, for verl"):
        to_verl([record(1, 3, 4), record(2, 5, 1, holes=(1,))])


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5), st.booleans())
def test_a_verl_batch_comes_back_as_the_routes_it_was_made_of(lengths: list[tuple[int, int]], masked: bool) -> None:
    records = [record(seed, prompt, output) for seed, (prompt, output) in enumerate(lengths)]
    batch = to_verl(records)
    if not masked:
        del batch["routes_mask"]
    for found, wanted in zip(from_verl(batch), records, strict=True):
        assert np.array_equal(found, all_layers(wanted))


def test_rows_that_a_verl_batch_fills_or_masks_come_back_as_rows_without_routes() -> None:
    own, masked = to_verl([record(1, 3, 4)]), to_verl([record(1, 3, 4)])
    del own["routes_mask"]
    own["routed_experts"][0, 4:] = 0  # text of a tool behind the last turn
    masked["routes_mask"][0, 4:] = False
    wanted = all_layers(record(1, 3, 4, holes=(4, 5)))
    for batch in (own, masked):
        (found,) = from_verl(batch)
        assert np.array_equal(found, wanted)


def test_zeros_in_a_verl_batch_are_routes_where_a_token_has_one_expert() -> None:
    routes, attention = np.zeros((1, 3, 2, 1), dtype=np.int16), np.ones((1, 3), dtype=np.int64)
    (found,) = from_verl({"routed_experts": routes, "attention_mask": attention})
    assert np.array_equal(found, np.zeros((2, 2, 1)))


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("routed_experts", np.zeros((1, 3, 2)), r"routed_experts: is float64 \[1, 3, 2\]"),
        ("routed_experts", np.full((1, 7, 4, 3), "1"), "routed_experts: is <U1"),
        ("attention_mask", np.ones((1, 6), dtype=np.int64), r"attention_mask: is int64 \[1, 6\]; .* \[1, 7\]"),
        ("routes_mask", np.ones((1, 6), dtype=np.bool_), r"routes_mask: is bool \[1, 6\]"),
        ("routes_mask", np.ones((1, 7)), "routes_mask: is float64"),
        ("attention_mask", np.array([[1, 1, 1, 0, 1, 1, 1]]), "attention_mask: row 0 is not one piece"),
    ],
)
def test_an_array_of_a_verl_batch_that_does_not_fit_is_refused_by_name(name: str, array: np.ndarray, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(from_verl(to_verl([record(1, 3, 4)]) | {name: array}))


def test_router_replay_gets_a_row_for_every_token_and_none_goes_to_expert_zero_for_want_of_routes() -> None:
    records = [record(1, 3, 2), record(2, 2, 1)]
    layers = to_router_replay(records)
    first, second = records[0].routes, records[1].routes
    assert len(layers) == 2
    for place, ids in enumerate(layers):
        assert ids.dtype == np.int64
        assert np.array_equal(ids, np.concatenate([first, first[-1:], second, second[-1:]])[:, place])
    with pytest.raises(InputError, match=r"record 'r1': row 1 has no routes; allowed: .*, for RouterReplay"):
        to_router_replay([record(1, 3, 2, holes=(1,))])
    with pytest.raises(InputError, match="record 'r1': has one token and so no routes"):
        to_router_replay([record(1, 1, 0)])


def test_a_router_trace_comes_back_as_it_was_written() -> None:
    records = [record(1, 3, 4), record(2, 5, 1)]
    file = io.StringIO()
    assert write_router_trace(records, file) == 4
    lines = file.getvalue().splitlines()
    assert '"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 1, "rank": 0, "num_tokens": 6' in lines[0]
    lines.insert(1, lines[0].replace('"decoder"', '"mtp"'))
    for (step, found), wanted in zip(read_router_trace(lines, MODEL), records, strict=True):
        assert wanted.id == f"r{step + 1}"
        assert np.array_equal(found, all_layers(wanted)[:, [1, 3]])


def test_a_router_trace_holds_no_row_without_routes_since_its_readers_would_count_minus_one() -> None:
    with pytest.raises(InputError, match=r"record 'r1': row 2 has no routes; allowed: .*, for a router trace"):
        write_router_trace([record(1, 3, 4, holes=(2,))], io.StringIO())


def test_a_router_trace_of_inference_numbers_layers_from_one() -> None:
    wanted = record(1, 3, 4)
    file = io.StringIO()
    write_router_trace([wanted], file)
    lines = [line.replace('"layer": 3', '"layer": 4') for line in file.getvalue().splitlines()]
    with pytest.raises(InputError, match=r"step 0: has layers \[1, 4\]"):
        list(read_router_trace(lines, MODEL))
    lines = [line.replace('"layer": 1', '"layer": 2') for line in lines]
    ((_, found),) = read_router_trace(lines, MODEL)
    assert np.array_equal(found, wanted.routes)
    with pytest.raises(InputError, match="line 3: layer 5 again or unknown"):
        list(read_router_trace([*lines, lines[1].replace('"layer": 4', '"layer": 5')], MODEL))


def test_a_broken_router_trace_is_refused_by_line_or_step() -> None:
    file = io.StringIO()
    write_router_trace([record(1, 3, 4)], file)
    first, second = file.getvalue().splitlines()
    with pytest.raises(InputError, match="line 2: layer 1 again"):
        list(read_router_trace([first, first], MODEL))
    with pytest.raises(InputError, match=r"step 0: has layers \[1\]"):
        list(read_router_trace([first], MODEL))
    with pytest.raises(InputError, match="line 2: cannot be read"):
        list(read_router_trace([first, second[:-9]], MODEL))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": None}, "step is None, no integer"),
        ({"layer": [1]}, r"layer is \[1\], no integer"),
        ({"num_tokens": -1}, r"top_indices are int64 \[1, 3\], no integers \[-1, 3\]"),
        ({"top_indices": []}, r"top_indices are float64 \[0\]"),
        ({"top_indices": None}, r"top_indices are object \[\]"),
        ({"top_indices": [[1.5, 2, 3]]}, "top_indices are float64"),
        ({"top_indices": [[True, False, True]]}, "top_indices are bool"),
        ({"top_indices": [["1", 2, 3]]}, "top_indices are <U21"),
        ({"top_indices": [[2**70, 2, 3]]}, "top_indices are object"),
    ],
)
def test_a_value_of_a_router_trace_that_is_no_integer_is_refused(change: dict[str, object], said: str) -> None:
    line = {"step": 0, "block": "decoder", "layer": 1, "num_tokens": 1, "topk": 3, "top_indices": [[1, 2, 3]]}
    with pytest.raises(InputError, match=f"line 1: cannot be read .{said}"):
        list(read_router_trace([json.dumps(line | change)], MODEL))


def test_a_step_of_a_router_trace_may_be_empty() -> None:
    line = {"step": 0, "block": "decoder", "num_tokens": 0, "topk": 3, "top_indices": []}
    ((_, found),) = read_router_trace([json.dumps(line | {"layer": layer}) for layer in (1, 3)], MODEL)
    assert found.shape == (0, 2, 3)


def test_responses_of_both_engines_are_decoded() -> None:
    routes = all_layers(record(1, 3, 4))
    npy = io.BytesIO()
    np.save(npy, routes.astype(np.uint8))
    assert np.array_equal(decode_response(base64.b64encode(npy.getvalue()).decode(), MODEL), routes)
    assert np.array_equal(decode_response(npy.getvalue(), MODEL), routes)
    sglang = base64.b64encode(routes.astype("<i4").tobytes()).decode()
    assert np.array_equal(decode_response(sglang, MODEL), routes)
    open_brace = npy.getvalue().replace(b"}", b" ")
    for payload in ("not base64!", base64.b64encode(b"12345").decode(), npy.getvalue()[:20], open_brace):
        with pytest.raises(InputError, match="response: cannot be decoded"):
            decode_response(payload, MODEL)


def test_layer_figures_of_a_small_window() -> None:
    counts = np.array([[[3, 1, 0, 0]], [[3, 1, 0, 0]]], dtype=np.int32)
    (layer,) = layer_profiles(counts, num_ranks=2)
    assert (layer.rows, layer.hottest, layer.idle) == (8, 0, 2)
    assert layer.kappa == pytest.approx(4 * (0.75**2 + 0.25**2))
    assert layer.hottest_over_uniform == pytest.approx(3.0)
    assert layer.rank_max_over_mean == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="ranks = 3"):
        layer_profiles(counts, num_ranks=3)


def test_the_distance_of_two_distributions_is_that_of_their_definition() -> None:
    p, q = np.array([6, 2, 0, 2]), np.array([1, 1, 4, 2])
    mixture = (p / 10 + q / 8) / 2

    def entropy(shares: np.ndarray) -> float:
        return -sum(share * np.log2(share) for share in shares if share)

    wanted = np.sqrt(entropy(mixture) - (entropy(p / 10) + entropy(q / 8)) / 2)
    assert root_jsd(p, q) == pytest.approx(wanted, abs=1e-12)
    assert root_jsd(p, 3 * p) == pytest.approx(0, abs=1e-7)
    assert root_jsd(np.array([1, 0]), np.array([0, 5])) == pytest.approx(1.0)


def test_tasks_are_compared_with_each_other_and_with_themselves() -> None:
    counts = np.array([[[4, 0]], [[0, 4]], [[4, 0]], [[0, 4]], [[2, 2]]], dtype=np.int32)
    labels, distances = task_distances(counts, ["math", "code", "math", "code", "logic"], num_ranks=2)
    assert labels == ["code", "logic", "math"]
    assert distances[0, 2] == distances[2, 0] == pytest.approx(1.0)
    assert distances[0, 0] == distances[2, 2] == 0
    assert np.isnan(distances[1, 1])
    assert 0 < distances[0, 1] < 1


@pytest.mark.parametrize("form", ["verl", "slime", "miles", "router-trace"])
def test_a_file_of_another_form_comes_back_as_the_records_it_was_made_of(form: str, tmp_path: Path) -> None:
    records = [record(1, 3, 4), record(2, 3, 0), record(3, 3, 9)]
    export_records(records, form, tmp_path / "routes")
    again = list(import_records(tmp_path / "routes", form, MODEL, prompt_tokens=3))
    assert [found.id for found in again] == (
        ["r1", "r2", "r3"] if form != "router-trace" else [f"routes-{i}" for i in range(3)]
    )
    for found, wanted in zip(again, records, strict=True):
        assert (found.prompt_tokens, found.output_tokens) == (wanted.prompt_tokens, wanted.output_tokens)
        assert np.array_equal(found.expert_ids(), wanted.expert_ids())


def test_a_batch_of_verls_own_says_how_long_each_prompt_is(tmp_path: Path) -> None:
    records = [record(1, 3, 4), record(2, 5, 1), record(3, 1, 0)]
    batch = to_verl(records, prompt_length=6, response_length=5)
    del batch["routes_mask"]
    np.savez(tmp_path / "batch.npz", prompts=np.zeros((3, 6), dtype=np.int64), **batch)
    again = list(import_records(tmp_path / "batch.npz", "verl", MODEL))
    assert [(found.prompt_tokens, found.output_tokens) for found in again] == [(3, 4), (5, 1), (1, 0)]
    for found, wanted in zip(again, records, strict=True):
        assert np.array_equal(found.routes, wanted.routes)
    for shape, said in (
        ((2, 6), r"prompts: is \[2, 6\]; allowed: \[N, P\] of an attention_mask \[3, 11\]"),
        ((3, 7), "attention_mask: row 2 has no token in column 6; allowed: prompts padded on the left"),
    ):
        np.savez(tmp_path / "batch.npz", prompts=np.zeros(shape, dtype=np.int64), **batch)
        with pytest.raises(InputError, match=said):
            list(import_records(tmp_path / "batch.npz", "verl", MODEL))


def test_replay_tensors_of_all_layers_lie_in_one_file(tmp_path: Path) -> None:
    records = [record(1, 3, 4), record(2, 5, 1)]
    export_records(records, "router-replay", tmp_path / "routes.npz")
    with np.load(tmp_path / "routes.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["topk_indices"], np.stack(to_router_replay(records)))
        assert arrays["offsets"].tolist() == [0, 7, 13]
        assert arrays["ids"].tolist() == ["r1", "r2"]


def test_a_folder_of_responses_is_read_in_order_of_name(tmp_path: Path) -> None:
    for seed in (2, 1):
        np.save(tmp_path / f"r{seed}.npy", record(seed, 3, seed).routes)
    with pytest.raises(ConfigError, match="prompt_tokens = None"):
        list(import_records(tmp_path, "npy", MODEL))
    found = list(import_records(tmp_path, "npy", MODEL, prompt_tokens=3, task="math"))
    assert [(record.id, record.output_tokens, record.task) for record in found] == [
        ("r1", 1, "math"),
        ("r2", 2, "math"),
    ]


def test_files_that_hold_no_routes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"nothing of the kind")
    for form in ("verl", "slime", "npy", "router-trace"):
        with pytest.raises(InputError):
            list(import_records(tmp_path / "a", form, MODEL, prompt_tokens=1))
    with pytest.raises(InputError, match="cannot be read"):
        list(import_records(tmp_path / "absent", "verl", MODEL))
    with pytest.raises(ConfigError, match="form = 'csv'"):
        export_records([record(1, 3, 4)], "csv", tmp_path / "b")
