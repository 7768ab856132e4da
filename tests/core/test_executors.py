"""The reference executor against float64, and the contract of the whole project: replication does not change a bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflux_serve import executors
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.executors import ReferenceExecutor, select_executor
from megaflux_serve.executors.base import combine
from megaflux_serve.planning.plan import fixed_plan
from megaflux_serve.workspace import ExpertSlots, Workspace
from tests.core.moe_cases import MoECase, make_case, random_plan
from tests.oracles.moe_float64 import moe_float64

# Relative L2 of a whole output: float32 leaves about 2e-7; bfloat16 rounds FC1, SwiGLU, FC2 and the sum, 2^-9 each.
RELATIVE_L2 = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def slots_of(case: MoECase) -> list[ExpertSlots]:
    workspace = Workspace(case.layout.num_replica_slots)
    return [workspace.slots(case.home(rank), rank) for rank in range(case.layout.num_ranks)]


def assert_identical(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Exact equality; says how many values differ and where the first one is."""
    for rank, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert output.dtype == wanted.dtype
        assert output.shape == wanted.shape
        differ = (output != wanted).nonzero()
        if len(differ):
            at = tuple(differ[0].tolist())
            pytest.fail(f"rank {rank}: {len(differ)} values differ, first at {at}: {output[at]} is not {wanted[at]}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_rows", [1, 16, 128])
@pytest.mark.parametrize("tokens", [[40], [33, 0], [0, 5, 64, 1]], ids=["P1", "P2", "P4"])
def test_the_layer_equals_float64(tokens: list[int], block_rows: int, dtype: torch.dtype) -> None:
    case = make_case(tokens, dtype=dtype, top_k=3, shuffled_homes=True)
    layer = case.reference_layer(MegaFluxConfig(block_rows=block_rows))
    for batch, output in zip(case.batches, layer.forward(case.batches), strict=True):
        wanted = moe_float64(batch.hidden, batch.topk_ids, batch.topk_weights, case.w13, case.w2)
        error = torch.linalg.norm(output.double() - wanted) / max(torch.linalg.norm(wanted), 1e-30)
        assert error < RELATIVE_L2[dtype]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    tokens=st.sampled_from([[50], [50, 3], [0, 40], [9, 0, 0, 31], [5, 17, 0, 1, 2, 8, 0, 30]]),
    slots=st.integers(0, 3),
    block_rows=st.sampled_from([1, 2, 4, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_replication_does_not_change_a_bit(
    tokens: list[int], slots: int, block_rows: int, dtype: torch.dtype, seed: int
) -> None:
    case = make_case(tokens, replica_slots=slots, dtype=dtype, seed=seed, shuffled_homes=seed % 2 == 1)
    config = MegaFluxConfig(replica_slots=slots, block_rows=block_rows)
    replicated = case.reference_layer(config)
    fixed = case.without_replicas().reference_layer(config).forward(case.batches)
    assert_identical(replicated.forward(case.batches), fixed)
    assert_identical(replicated.forward(case.batches), fixed)  # now with resident replicas


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(20, 12), (7, 5)]))
def test_any_legal_plan_gives_the_same_bits(seed: int, shape: tuple[int, int]) -> None:
    """Also plans that no planner would make, and sizes whose weights are not aligned to a vector register."""
    hidden, intermediate = shape
    case = make_case([11, 0, 30], hidden=hidden, intermediate=intermediate, seed=seed, replica_slots=3)
    executor, counts = ReferenceExecutor(3), case.counts()
    fixed = executor.execute(case.batches, fixed_plan(counts, case.layout, 2), slots_of(case))
    plan = random_plan(np.random.default_rng(seed), counts, case.layout, 2)
    assert plan.num_replicas > 0
    assert_identical(executor.execute(case.batches, plan, slots_of(case)), fixed)


def test_a_row_does_not_depend_on_the_rows_beside_it_in_its_block() -> None:
    case = make_case([24], top_k=1)
    layer = case.reference_layer(MegaFluxConfig(block_rows=8))
    (before,) = layer.forward(case.batches)
    hidden = case.batches[0].hidden.clone()
    hidden[1::2] = 1e6
    (after,) = layer.forward([replace(case.batches[0], hidden=hidden)])
    assert torch.equal(after[::2], before[::2])


def test_no_rows_anywhere_give_empty_outputs() -> None:
    case = make_case([0, 0])
    outputs = case.reference_layer(MegaFluxConfig()).forward(case.batches)
    assert [tuple(output.shape) for output in outputs] == [(0, 24), (0, 24)]


def test_combine_sums_in_top_k_order_in_float32() -> None:
    results = torch.tensor([[[1e8], [1.0], [-1e8]], [[1.0], [1e8], [-1e8]], [[1e8], [-1e8], [1.0]]])
    assert combine(results, torch.ones(3, 3)).ravel().tolist() == [0.0, 0.0, 1.0]
    # 257 is no bfloat16 value: a sum in bfloat16 would round 256 + 1 and lose the ones.
    halves = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    assert combine(halves, torch.ones(1, 3)).item() == 258.0


def test_auto_means_reference_when_one_process_holds_every_rank() -> None:
    executor = select_executor(MegaFluxConfig(), num_ranks=4)
    assert isinstance(executor, ReferenceExecutor)
    assert list(executor.local_ranks) == [0, 1, 2, 3]


def test_the_megakernel_meets_on_the_host_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_megakernel", lambda config, num_ranks, group: group)
    config, device_group, host_group = MegaFluxConfig(executor="megakernel"), object(), object()
    assert select_executor(config, 2, device_group, "cuda", host_group) is host_group
    assert select_executor(config, 2, device_group, "cuda") is device_group


def test_staged_needs_a_process_group() -> None:
    with pytest.raises(ConfigError, match=r"executor = 'staged'.*reference or auto"):
        select_executor(MegaFluxConfig(executor="staged"), num_ranks=2)


def test_the_megakernel_is_refused_with_what_is_missing() -> None:
    with pytest.raises(UnsupportedError, match=r"megakernel.*no NVIDIA GPU.*staged, reference or auto"):
        select_executor(MegaFluxConfig(executor="megakernel"), num_ranks=1)
