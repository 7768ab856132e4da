"""Limits, maps, records and the cache of the planner's kernels: what needs no GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megaflux_kernels.layout import MAX_BLOCKS, Header, SearchShape, ShapeError, Wait
from megaflux_kernels.planner_map import ALIGNMENT, PASS_CHOICES, WARPS, PlannerMap, PlannerShape
from megaflux_kernels.sync.record import RECORD_WORDS, failed_wait


@st.composite
def shapes(draw):
    ranks = draw(st.integers(1, 72))
    own = draw(st.integers(1, 512 // ranks))
    slots = draw(st.integers(0, 16)) if own <= 256 else 0
    search = SearchShape(ranks * own, ranks, slots, draw(st.sampled_from([16, 128])))
    top_k = draw(st.integers(1, min(16, ranks * own)))
    return PlannerShape(search, top_k, draw(st.integers(1, 20_000)), draw(st.integers(1, 131)))


@given(shapes())
def test_regions_of_a_rank_are_aligned_and_do_not_overlap(shape):
    layout = PlannerMap(shape)
    end = 0
    for name, region in layout.regions.items():
        assert layout.offsets[name] % ALIGNMENT == 0
        assert layout.offsets[name] >= end
        end = layout.offsets[name] + region.num_bytes
    assert end <= layout.num_bytes < end + ALIGNMENT


@given(shapes())
def test_regions_of_a_plan_do_not_overlap_and_split_into_their_shapes(shape):
    plan = shape.search.plan
    numbered = np.arange(plan.num_words, dtype=np.int32)
    pieces = plan.split(numbered)
    words = np.concatenate([piece.reshape(-1) for piece in pieces.values()])
    assert np.unique(words).size == words.size
    assert pieces["header"].size == Header.SIZE
    assert pieces["slot_blocks"].shape == (shape.search.num_ranks, shape.search.slots_per_rank)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_ranks", (256, 128, 2)),
        ("num_experts", (30, 4, 2)),
        ("num_experts", (1024, 8, 2)),
        ("num_experts", (512, 1, 2)),
        ("num_replica_slots", (64, 8, 33)),
        ("num_replica_slots", (504, 72, 30)),
        ("block_rows", (64, 8, 2, 0)),
    ],
)
def test_a_shape_beyond_the_packed_keys_is_refused_by_name(field, values):
    with pytest.raises(ShapeError, match=f"{field} = .* is not allowed; allowed: "):
        SearchShape(*values)


@pytest.mark.parametrize(
    ("field", "top_k", "tokens", "chunks"),
    [("top_k", 17, 8, 1), ("max_tokens", 8, 1 << 21, 1), ("max_tokens", 8, 0, 1), ("num_chunks", 8, 8, 0)],
)
def test_a_batch_beyond_the_planner_is_refused_by_name(field, top_k, tokens, chunks):
    with pytest.raises(ShapeError, match=f"{field} = .* is not allowed; allowed: "):
        PlannerShape(SearchShape(64, 8, 2), top_k, tokens, chunks)


def test_more_blocks_than_a_load_holds_are_refused():
    with pytest.raises(ShapeError, match=f"at most {MAX_BLOCKS} token blocks"):
        PlannerShape(SearchShape(64, 8, 2, block_rows=1), 8, 1 << 20, 1)


@pytest.mark.parametrize(("top_k", "tokens", "chunks"), [(8, 131072, 131), (8, 64, 131), (6, 9000, 1), (16, 1, 4)])
def test_a_pass_is_whole_steps_of_all_warps_and_no_larger_than_a_chunk_needs(top_k, tokens, chunks):
    shape = PlannerShape(SearchShape(64, 8, 2), top_k, tokens, chunks)
    unit = WARPS * shape.tokens_per_step
    assert shape.pass_tokens % unit == 0
    assert 0 < shape.pass_tokens * top_k <= PASS_CHOICES
    assert shape.pass_tokens - unit < -(-tokens // chunks)


def test_an_empty_error_record_is_no_failure_and_a_filled_one_says_who_did_not_answer():
    assert failed_wait([0] * RECORD_WORDS) is None
    failure = failed_wait([Wait.COUNTS, 3, 1, 7, 0, 0, 0, 0])
    assert (failure.wait, failure.rank, failure.slot, failure.epoch) == (Wait.COUNTS, 3, 1, 7)
    assert str(failure) == "rank 3 did not answer: phase counts, slot 1, launch 7"


def test_every_wait_has_a_code_of_its_own_that_is_never_zero():
    codes = [int(wait) for wait in Wait]
    assert len(set(codes)) == len(Wait.__members__)
    assert 0 not in codes


def test_homes_are_listed_by_rank_then_by_expert():
    pytest.importorskip("torch")
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from megaflux_kernels.planner_buffers import home_table

    table = home_table(6, 2, np.array([1, 0, 0, 1, 1, 0]))
    assert table.tolist() == [[1, 2, 5, 0, 3, 4], [3, 0, 1, 4, 5, 2]]
    with pytest.raises(ShapeError, match=r"home_rank = .*3 of 6 experts"):
        home_table(6, 2, np.array([0, 0, 0, 0, 1, 1]))


class TestCompileCache:
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path, monkeypatch):
        from megaflux_kernels import compile_cache

        monkeypatch.setenv(compile_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
        monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
        pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
        return compile_cache

    def test_a_kernel_is_compiled_once_and_stored_whole(self, directory):
        class Compiled:
            def dump_to_object(self, name):
                return b"object of " + name.encode()

        compiled = []

        def compile_kernel():
            compiled.append(1)
            return Compiled()

        shape = SearchShape(8, 2, 1)
        first = directory.cached(compile_kernel, "stored_whole", shape)
        assert directory.cached(compile_kernel, "stored_whole", shape) is first
        assert compiled == [1]
        files = list(directory.cache_directory().iterdir())
        assert [file.read_bytes() for file in files] == [b"object of stored_whole"]

    def test_choices_targets_and_kernels_have_keys_of_their_own(self, directory, monkeypatch):
        shapes = [SearchShape(8, 2, 1), SearchShape(8, 2, 2), SearchShape(8, 2, 1, 64)]
        keys = {directory.key_of(name, shape) for name in ("a", "b") for shape in shapes}
        monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
        keys.add(directory.key_of("a", shapes[0]))
        assert len(keys) == 7

    def test_a_directory_that_others_can_write_is_refused(self, directory):
        os.chmod(directory.cache_directory(), 0o777)
        with pytest.raises(ShapeError, match="a directory that only this user can write"):
            directory.cache_directory()
