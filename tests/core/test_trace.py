"""Routing traces: every format gives back the counts that were written, and every broken file is refused by name."""

import io
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megaflux_serve.errors import InputError
from megaflux_serve.trace import Trace, read_trace

FIXED = settings(derandomize=True, max_examples=40, deadline=None)
COUNT_TABLES = hnp.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=st.integers(0, 2**31 - 1))


@st.composite
def routed_ids(draw: st.DrawFn) -> np.ndarray:
    """[tokens, layers, k] with k distinct experts of at most 8 a token."""
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4)))
    order = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).random((*shape[:2], 8)).argsort(axis=2)
    return order[:, :, : shape[2]].astype(draw(st.sampled_from(["uint8", "uint16", "int16", "int32"])))


def counts_of(trace: Trace) -> list[list[int]]:
    return [layer.counts.tolist() for layer in trace.layers]


def file_bytes(save: Callable[..., None], *arrays: object, **named: object) -> bytes:
    """What numpy writes to a file."""
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@FIXED
@given(table=COUNT_TABLES)
def test_count_files_give_back_what_was_written(table: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, rows = tmp_path_factory.mktemp("counts"), table.tolist()
    num_experts = table.shape[1]
    long = "".join(f"{i},{e},{n}\n" for i, row in enumerate(rows) for e, n in enumerate(row) if n)
    wide = "".join(f"{i},{','.join(map(str, row))}\n" for i, row in enumerate(rows))
    header = ",".join(str(e) for e in range(num_experts))
    named = {str(i): {str(e): n for e, n in enumerate(row)} for i, row in enumerate(rows)}
    files = [
        write(folder / "wide.csv", f"layer,{header}\n{wide}"),
        write(folder / "list.json", json.dumps(rows)),
        write(folder / "named.json", json.dumps(named)),
        write(folder / "nested.json", json.dumps({"model/domain": list(named.values())})),
    ]
    if (table > 0).any(axis=1).all():  # the long form has no line for a layer of zeros
        files.append(write(folder / "long.csv", f"layer,expert,count\n{long}"))
    for file in files:
        assert counts_of(read_trace(file, num_experts)) == rows, file.name


@FIXED
@given(ids=routed_ids(), cut=st.integers(0, 9))
def test_arrays_give_back_ids_and_counts_from_one_file_or_several(
    ids: np.ndarray, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    parts = [part for part in (ids[:cut], ids[cut:]) if len(part)]
    for i, part in enumerate(parts):
        np.save(folder / f"{i}.npy", part)
    np.savez(folder.parent / "all.npz", experts=ids, offsets=[0, len(ids)], task=["code"])
    expected = [np.bincount(ids[:, i].ravel(), minlength=8).tolist() for i in range(ids.shape[1])]
    for source in (folder, folder.parent / "all.npz"):
        trace = read_trace(source, 8)
        assert counts_of(trace) == expected
        assert trace.num_tokens == len(ids)
        assert all((layer.topk_ids == ids[:, i]).all() for i, layer in enumerate(trace.layers))


def test_experts_are_inferred_from_the_largest_id_of_the_same_model(tmp_path: Path) -> None:
    models = {"small": [{"1": 5}, {"0": 2, "3": 1}], "large": [{"5": 1}]}
    trace = read_trace(write(tmp_path / "models.json", json.dumps(models)))
    assert [layer.num_experts for layer in trace.layers] == [4, 4, 6]
    assert [layer.name for layer in trace.layers] == ["small/0", "small/1", "large/0"]
    assert trace.experts_inferred
    assert not read_trace(write(tmp_path / "full.json", "[[1, 2]]")).experts_inferred


def test_layers_are_chosen_by_name_or_pattern(tmp_path: Path) -> None:
    file = write(tmp_path / "models.json", json.dumps({"a": [[1], [2]], "b": [[3, 4]]}))
    assert [layer.name for layer in read_trace(file, layers=["b/0", "a/1"]).layers] == ["a/1", "b/0"]
    assert counts_of(read_trace(file, layers=["a/*"])) == [[1], [2]]
    with pytest.raises(InputError, match=r"layer: none is called 'c'; allowed: a/0, a/1, b/0"):
        read_trace(file, layers=["c"])


def test_batches_hold_consecutive_tokens_and_leave_out_a_partial_last_one(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([[[0]], [[0]], [[1]], [[2]], [[2]]], dtype=np.uint8))
    (layer,) = read_trace(tmp_path / "ids.npy").layers
    assert [counts.tolist() for counts in layer.batches(2)] == [[2, 0, 0], [0, 1, 1]]
    assert [counts.tolist() for counts in layer.batches()] == [[2, 1, 2]]
    with pytest.raises(InputError, match=r"layer 0: batches of 6 tokens; allowed: 1 to 5 tokens"):
        layer.num_batches(6)


def test_totals_cannot_be_cut_into_batches(tmp_path: Path) -> None:
    (layer,) = read_trace(write(tmp_path / "totals.json", "[[1, 2]]")).layers
    with pytest.raises(InputError, match=r"layer 0: holds totals, not tokens"):
        layer.num_batches(1)


BAD_TEXT = {
    "empty.csv": ("", "is empty; allowed: a file with at least one layer"),
    "header.csv": ("layer,expert,count\n", "holds a header and no rows; allowed: at least one row"),
    "column.csv": ("layer,expert,weight\n0,0,1\n", "header: is 'layer,expert,weight'; allowed: 'layer,expert,count'"),
    "order.csv": ("layer,1,0\n0,3,4\n", "header: is 'layer,1,0'; allowed"),
    "short.csv": ("layer,expert,count\n0,0,3\n0,1\n", "line 3: has 2 fields; allowed: 3 fields"),
    "negative.csv": ("layer,expert,count\n0,0,-3\n", "line 2: count is -3; allowed: whole numbers from 0"),
    "fraction.csv": ("layer,0,1\n0,3,1.5\n", "line 2: count is '1.5'; allowed: whole numbers from 0"),
    "twice.csv": ("layer,expert,count\n0,0,3\n0,0,4\n", "line 3: repeats layer 0, expert 0; allowed: every pair once"),
    "id.csv": ("layer,expert,count\n0,-1,3\n", "line 2: expert is '-1'; allowed: ids 0 to 65535"),
    "range.csv": ("layer,expert,count\n0,8,3\n", "layer 0: holds expert id 8; allowed: ids 0 to 7"),
    "wide.csv": ("layer,0,1\n0,3,4\n", "layer 0: lists 2 experts; allowed: 8 experts"),
    "quote.csv": ('layer,expert,count\n0,0,"3\n', "is not a CSV file"),
    "empty.json": ("", "is empty"),
    "none.json": ("[]", "is empty; allowed: at least one layer or expert"),
    "layer.json": ("[[]]", "0: is empty; allowed: at least one layer or expert"),
    "cut.json": ('{"0": [1, 2', "is not a complete JSON file"),
    "deep.json": ("[" * 100_000, "is not a complete JSON file"),
    "digits.json": ("[[" + "1" * 5000 + "]]", "is not a complete JSON file"),
    "scalar.json": ("7", "is '7'; allowed: a list of counts, or an object expert -> count"),
    "negative.json": ('{"0": {"3": -1}}', "0: expert 3: count is -1; allowed: whole numbers from 0 to 2147483647"),
    "large.json": ("[[2147483648]]", "count is 2147483648; allowed: whole numbers from 0 to 2147483647"),
    "bool.json": ("[[true]]", "count is True; allowed: whole numbers"),
    "nan.json": ("[[NaN]]", "count is nan; allowed: whole numbers"),
    "key.json": ('{"0": {"hot": 1}}', "0: expert is 'hot'; allowed: ids 0 to 65535"),
    "same.json": ('{"0": [1], "0": [2]}', "key '0' appears twice"),
    "alias.json": ('{"0": {"1": 1, "01": 2}}', "0: names an expert twice; allowed: every expert once"),
    "paths.json": ('{"a/b": {"c": [1]}, "a": {"b/c": [2]}}', "layer a/b/c: is there 2 times; allowed: every name once"),
    "unnamed.json": ('{"": [1], "0": [2]}', "layer 0: is there 2 times; allowed: every name once"),
    "mixed.json": ("[[1], 2]", "1: is '2'; allowed: a list of counts"),
    "notes.txt": ("0,0,1", "has the suffix '.txt'; allowed: a .csv, .json, .npy or .npz file, or a folder"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_a_broken_count_file_is_refused_with_its_name_and_what_is_allowed(name: str, tmp_path: Path) -> None:
    text, message = BAD_TEXT[name]
    with pytest.raises(InputError) as caught:
        read_trace(write(tmp_path / name, text), 8)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


IDS = np.array([[[0, 1]], [[2, 7]]], dtype=np.int32)
BAD_ARRAYS = {
    "range.npy": (IDS + 1, "layer 0: holds expert id 8; allowed: ids 0 to 7"),
    "negative.npy": (IDS - 1, "holds expert id -1; allowed: ids 0 to 65535"),
    "twice.npy": (IDS // 2, "layer 0: token 0 names an expert twice: [0, 0]; allowed: k distinct ids"),
    "flat.npy": (IDS[0], "has shape [1, 2]; allowed: [tokens, layers, top_k]"),
    "float.npy": (IDS.astype(np.float32), "has dtype float32; allowed: an integer dtype"),
    "none.npy": (IDS[:0], "is empty, shape [0, 1, 2]; allowed: at least one token, layer and expert"),
    "cut.npz": ({"experts": IDS, "offsets": [0, 3]}, "offsets: end at token 3; allowed: 2, the tokens of the array"),
    "order.npz": ({"experts": IDS, "offsets": [0, 3, 2]}, "offsets: are not the ascending first tokens of requests"),
    "keys.npz": ({"tokens": IDS}, "keys: are ['tokens']; allowed: one of experts and routed_experts"),
    "slime.npz": (
        {"rollout_routed_experts": IDS, "offsets": np.array([0, 2])},
        "keys: are ['rollout_routed_experts', 'offsets']; allowed: one of experts and routed_experts",
    ),
    "both.npz": ({"experts": IDS, "routed_experts": IDS}, "keys: are ['experts', 'routed_experts']; allowed: one of"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_a_broken_array_is_refused_with_its_name_and_what_is_allowed(name: str, tmp_path: Path) -> None:
    content, message = BAD_ARRAYS[name]
    file = tmp_path / name
    if isinstance(content, dict):
        np.savez(file, **content)
    else:
        np.save(file, content)
    with pytest.raises(InputError) as caught:
        read_trace(file, 8)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


@FIXED
@given(fraction=st.floats(0, 0.999), compress=st.booleans(), suffix=st.sampled_from([".npy", ".npz"]))
def test_a_truncated_array_is_refused_wherever_it_is_cut(
    fraction: float, compress: bool, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("cut") / f"ids{suffix}"
    if suffix == ".npy":
        np.save(file, np.tile(IDS, (40, 1, 1)))
    else:
        (np.savez_compressed if compress else np.savez)(file, experts=np.tile(IDS, (40, 1, 1)), offsets=[0, 80])
    whole = file.read_bytes()
    file.write_bytes(whole[: int(fraction * len(whole))])
    with pytest.raises(InputError, match=r"ids\.np[yz]: is (empty|damaged or truncated)"):
        read_trace(file)


VALID = {
    ".csv": b"layer,expert,count\n0,0,3\n1,2,4\n",
    ".json": b'{"a": [{"0": 3, "1": 4}], "b": [[1, 2]]}',
    ".npy": file_bytes(np.save, np.arange(24, dtype=np.uint8).reshape(4, 3, 2)),
    ".npz": file_bytes(np.savez_compressed, experts=np.arange(24).reshape(4, 3, 2), offsets=[0, 4]),
}


@settings(FIXED, max_examples=400)
@given(suffix=st.sampled_from(sorted(VALID)), places=st.lists(st.integers(0, 10**6), max_size=4), values=st.randoms())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    suffix: str, places: list[int], values: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(VALID[suffix])
    for place in places:
        damaged[place % len(damaged)] = values.randrange(256)
    file = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    file.write_bytes(damaged)
    try:
        trace = read_trace(file)
    except InputError as error:
        refusal = str(error)
    else:
        assert all(layer.counts.min() >= 0 for layer in trace.layers)
        return
    assert refusal.startswith(str(file))
    assert places


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("the pickle was opened",))

    np.save(tmp_path / "object.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Trap()))
    for name in ("object.npy", "raw.npy"):
        with pytest.raises(InputError, match=r"is damaged or truncated .* allowed: a complete array file, no pickles"):
            read_trace(tmp_path / name)


def test_missing_paths_empty_folders_and_mixed_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.csv: is not a file or folder"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(InputError, match=r"holds no \.npy or \.npz file"):
        read_trace(tmp_path)
    np.save(tmp_path / "a.npy", IDS)
    np.save(tmp_path / "b.npy", np.concatenate([IDS, IDS], axis=1))
    with pytest.raises(InputError, match=r"different layers or top_k: \[2, 1, 2\], \[2, 2, 2\]; allowed: one model"):
        read_trace(tmp_path)
