"""The replay record: what is valid, what is refused and how, and its bytes against an independent reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflux_serve.capture import ModelShape, ReplayRecord, ReplayStore
from megaflux_serve.capture.frame import decode, encode
from megaflux_serve.errors import ConfigError, InputError
from tests.oracles.replay_reader import count, read_store
from tests.oracles.replay_routes import random_routes

MODEL = ModelShape(num_experts=16, top_k=3, num_layers=5, moe_layers=(1, 2, 4))


def record(id: str = "a", prompt: int = 4, output: int = 3, model: ModelShape = MODEL, seed: int = 0) -> ReplayRecord:
    routes = random_routes(seed, prompt + output - 1, *model.row_shape[:1], model.num_experts, model.top_k)
    return ReplayRecord.of(id, routes, model, prompt_tokens=prompt, output_tokens=output)


@st.composite
def records(draw: st.DrawFn) -> ReplayRecord:
    """Records of small and of wide models, with and without token ids, labels and rows that hold no routes."""
    num_layers = draw(st.integers(1, 6))
    moe_layers = tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1))))
    num_experts = draw(st.sampled_from([1, 2, 8, 256, 257, 512]))
    model = ModelShape(num_experts, draw(st.integers(1, min(num_experts, 8))), num_layers, moe_layers)
    prompt, output = draw(st.integers(1, 12)), draw(st.integers(0, 12))
    tokens = prompt + output
    routes = random_routes(draw(st.integers(0, 99)), tokens - 1, len(moe_layers), num_experts, model.top_k)
    routes[[row for row in range(tokens - 1) if draw(st.booleans())]] = -1
    token_ids = draw(st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens))
    text = st.text(st.characters(codec="utf-8"), max_size=20)
    labels = {name: draw(text) for name in ("group", "task", "weights_version", "engine", "engine_version")}
    id = draw(text.filter(bool))
    return ReplayRecord.of(id, routes, model, prompt_tokens=prompt, output_tokens=output, token_ids=token_ids, **labels)


def assert_equal(found: ReplayRecord, wanted: ReplayRecord) -> None:
    for name in ("id", "model", "prompt_tokens", "output_tokens", "group", "task", "weights_version", "engine"):
        assert getattr(found, name) == getattr(wanted, name)
    assert found.routes.dtype == wanted.routes.dtype
    assert np.array_equal(found.routes, wanted.routes)
    assert np.array_equal(found.valid, wanted.valid)
    assert (found.token_ids is None) == (wanted.token_ids is None)
    assert found.token_ids is None or np.array_equal(found.token_ids, wanted.token_ids)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(records())
def test_a_record_comes_back_from_its_bytes_as_it_was(wanted: ReplayRecord) -> None:
    assert_equal(decode(b"".join(encode(wanted)), wanted.model, "shard", 0), wanted)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(wanted=records())
def test_a_reader_written_from_the_specification_finds_the_same(
    wanted: ReplayRecord, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("store")
    with ReplayStore.create(folder, wanted.model).writer() as writer:
        writer.append(wanted)
    store, found = read_store(folder)
    assert store["format"] == "megaflux-replay"
    assert store["model"]["num_experts"] == wanted.model.num_experts
    raw = found[wanted.id]
    assert (raw["group"], raw["task"], raw["prompt_tokens"]) == (wanted.group, wanted.task, wanted.prompt_tokens)
    assert np.array_equal(raw["counts"], count(wanted.routes, wanted.valid, wanted.model.num_experts))
    if wanted.num_tokens > 1:
        assert np.array_equal(raw["routes"], wanted.routes)
        assert np.array_equal(np.unpackbits(raw["valid"], count=wanted.num_tokens - 1), wanted.valid)
    assert raw["num_valid"] == wanted.valid.sum()


def test_ids_are_kept_in_the_narrowest_unsigned_type() -> None:
    assert record(model=ModelShape(256, 2, 2)).routes.dtype == np.uint8
    assert record(model=ModelShape(257, 2, 2)).routes.dtype == np.uint16


def test_dense_layers_of_an_engine_array_are_left_out() -> None:
    routes = random_routes(1, 6, 3, 16, 3)
    every = np.zeros((6, 5, 3), dtype=np.int32)
    every[:, [1, 2, 4]] = routes
    found = ReplayRecord.of("a", every, MODEL, prompt_tokens=4, output_tokens=3)
    assert np.array_equal(found.routes, routes)
    assert np.array_equal(found.expert_ids(np.int32, all_layers=True), every)


@pytest.mark.parametrize("layers", [(0, 1, 2), (3,), (1, 2, 3, 4), (0, 2, 4), (1, 4), (0, 1, 3), (0, 1, 2, 3, 4)])
def test_wherever_the_moe_layers_stand_each_keeps_its_routes(layers: tuple[int, ...]) -> None:
    model = ModelShape(16, 3, 5, layers)
    every = np.zeros((6, 5, 3), dtype=np.int32)
    for layer in layers:
        every[:, layer] = random_routes(layer, 6, 1, 16, 3)[:, 0]
    found = ReplayRecord.of("a", every, model, prompt_tokens=4, output_tokens=3)
    for position, layer in enumerate(layers):
        assert np.array_equal(found.routes[:, position], every[:, layer])
    assert found.routes.flags.c_contiguous
    assert np.array_equal(found.expert_ids(np.int32, all_layers=True), every)


def test_rows_of_minus_one_are_marked_and_not_counted() -> None:
    routes = random_routes(1, 6, 3, 16, 3)
    routes[[0, 4]] = -1
    found = ReplayRecord.of("a", routes, MODEL, prompt_tokens=4, output_tokens=3)
    assert found.valid.tolist() == [False, True, True, True, False, True]
    assert found.counts.sum() == 4 * 3 * 3
    assert not found.routes[[0, 4]].any()
    assert np.array_equal(found.expert_ids(np.int16), routes)


def test_routes_short_by_a_row_are_refused() -> None:
    with pytest.raises(InputError, match=r"record 'a': has 5 rows of routes; allowed: 6: one for each of its 7 tokens"):
        ReplayRecord.of("a", random_routes(1, 5, 3, 16, 3), MODEL, prompt_tokens=4, output_tokens=3)


def test_filler_of_zeros_is_refused_and_named() -> None:
    routes = random_routes(1, 6, 3, 16, 3)
    routes[3] = 0
    with pytest.raises(InputError, match=r"row 3, layer 1 is \[0, 0, 0\]; allowed: distinct experts"):
        ReplayRecord.of("a", routes, MODEL, prompt_tokens=4, output_tokens=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((2, 1, 0, 16), r"row 2, layer 2 is \[16, .*experts 0 to 15"),
        ((2, 1, 0, -1), r"row 2 holds ids and negative numbers"),
        ((2, 1, 0, -7), r"row 2 holds ids and negative numbers"),
    ],
)
def test_an_id_that_is_no_expert_is_refused_and_named(change: tuple[int, int, int, int], message: str) -> None:
    routes = random_routes(1, 6, 3, 16, 3)
    routes[change[:3]] = change[3]
    with pytest.raises(InputError, match=message):
        ReplayRecord.of("a", routes, MODEL, prompt_tokens=4, output_tokens=3)


def test_arrays_of_another_shape_are_refused() -> None:
    with pytest.raises(InputError, match=r"routes have 4 layers; allowed: the 3 MoE layers or all 5 layers"):
        ReplayRecord.of("a", random_routes(1, 6, 4, 16, 3), MODEL, prompt_tokens=4, output_tokens=3)
    with pytest.raises(InputError, match=r"integers \[rows, layers, 3\]"):
        ReplayRecord.of("a", random_routes(1, 6, 3, 16, 3).astype(float), MODEL, prompt_tokens=4, output_tokens=3)
    routes = random_routes(1, 6, 3, 16, 3)
    with pytest.raises(InputError, match=r"token ids are int64 \[6\]; allowed: integers \[7\]"):
        ReplayRecord.of("a", routes, MODEL, prompt_tokens=4, output_tokens=3, token_ids=np.arange(6))
    with pytest.raises(InputError, match="id has 0 bytes"):
        record("")


def test_a_text_that_is_none_or_cannot_be_written_is_refused() -> None:
    routes = random_routes(1, 6, 3, 16, 3)
    with pytest.raises(InputError, match=r"record 'a': task is 'x\\ud800', which UTF-8 cannot hold"):
        ReplayRecord.of("a", routes, MODEL, prompt_tokens=4, output_tokens=3, task="x\ud800")
    with pytest.raises(InputError, match=r"record 'a': weights_version is 12; allowed: a text"):
        ReplayRecord.of("a", routes, MODEL, prompt_tokens=4, output_tokens=3, weights_version=12)  # type: ignore[arg-type]


def test_lengths_are_any_integers_and_nothing_else() -> None:
    routes = random_routes(1, 6, 3, 16, 3)
    found = ReplayRecord.of("a", routes, MODEL, prompt_tokens=np.int64(4), output_tokens=np.uint8(3))
    assert_equal(decode(b"".join(encode(found)), MODEL, "shard", 0), found)
    with pytest.raises(InputError, match=r"4.0 prompt and 3 output tokens; allowed: integers"):
        ReplayRecord.of("a", routes, MODEL, prompt_tokens=4.0, output_tokens=3)  # type: ignore[arg-type]
    assert record(prompt=1, output=0).num_tokens == 1
    for prompt, output in ((0, 7), (8, -1)):
        with pytest.raises(InputError, match=f"{prompt} prompt and {output} output tokens; allowed: at least 1 and 0"):
            ReplayRecord.of("a", routes, MODEL, prompt_tokens=prompt, output_tokens=output)


def test_labels_and_token_ids_are_refused_from_their_limits_on() -> None:
    routes = random_routes(1, 6, 3, 16, 3)
    longest, ids = 256 * "\u00e4", [0, 1, 2, 3, 4, 5, 2**31 - 1]
    found = ReplayRecord.of(
        longest, routes, MODEL, prompt_tokens=4, output_tokens=3, token_ids=np.array(ids, dtype=np.uint64), task=longest
    )
    assert found.token_ids is not None
    assert found.token_ids.tolist() == ids
    with pytest.raises(InputError, match="task has 513 bytes; allowed: 0 to 512"):
        ReplayRecord.of("a", routes, MODEL, prompt_tokens=4, output_tokens=3, task=longest + "b")
    for wrong in (-1, 2**31):
        with pytest.raises(InputError, match=f"token ids go from .*{wrong}"):
            ReplayRecord.of("a", routes, MODEL, prompt_tokens=4, output_tokens=3, token_ids=[*ids[:4], wrong, 0, 0])


def test_a_model_shape_that_cannot_be_is_refused() -> None:
    assert ModelShape(2**16, 2**16, 1).moe_layers == (0,)
    wrong_numbers = ((0, 1, 1, ()), (2**16 + 1, 1, 1, ()), (8, 0, 1, ()), (8, 9, 1, ()), (8, 2, 0, ()))
    wrong_layers = ((8, 2, 2, (2,)), (8, 2, 3, (1, 0)), (8, 2, 3, (1, 1)), (8, 2, 3, (-1, 0)))
    for shape in wrong_numbers + wrong_layers:
        with pytest.raises(ConfigError):
            ModelShape(*shape)


def test_ids_are_not_narrowed_into_a_type_that_cannot_hold_them() -> None:
    assert record(model=ModelShape(128, 2, 2)).expert_ids(np.int8).dtype == np.int8
    assert record().expert_ids(np.uint8, filler=255).dtype == np.uint8
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        record(model=ModelShape(129, 2, 2)).expert_ids(np.int8)
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        record(model=ModelShape(256, 2, 2)).expert_ids(np.int8)
    with pytest.raises(ConfigError, match="dtype = 'uint8'"):
        record().expert_ids(np.uint8)
