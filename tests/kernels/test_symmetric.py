"""How ranks are dealt to processes, and where each rank's slice of an allocation is; needs no GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from megaflux_kernels import symmetric  # noqa: E402
from megaflux_kernels.layout import ShapeError  # noqa: E402
from megaflux_kernels.symmetric import SLICE_ALIGNMENT, SymmetricMemory, local_ranks  # noqa: E402

GROUP = object()
BASES = (7 << 40, 3 << 40)
"""Where process 1 of two maps the allocations of both."""


@pytest.fixture
def second_of_two(monkeypatch):
    """This process is the second of two; what it allocates is on the CPU."""
    monkeypatch.setattr(symmetric.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(symmetric.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(
        symmetric, "_rendezvous", lambda size, group: (torch.zeros(size, dtype=torch.uint8), list(BASES))
    )


def test_all_ranks_are_slices_of_one_allocation_without_a_group():
    memories = SymmetricMemory.allocate(1500, 4, device="cpu")
    assert [memory.rank for memory in memories] == [0, 1, 2, 3]
    for memory in memories:
        assert memory.num_ranks == 4
        assert memory.addresses == memories[0].addresses
        assert memory.buffer.data_ptr() == memory.addresses[memory.rank]
        assert memory.buffer.numel() == 1500
        assert not memory.buffer.any()
    assert memories[1].addresses[1] - memories[0].addresses[0] == 2 * SLICE_ALIGNMENT


@pytest.mark.parametrize(("num_ranks", "mine"), [(2, [1]), (8, [4, 5, 6, 7])])
def test_a_process_of_two_holds_the_second_half_and_maps_every_rank_in_order(second_of_two, num_ranks, mine):
    memories = SymmetricMemory.allocate(1025, num_ranks, GROUP)
    assert [memory.rank for memory in memories] == list(local_ranks(num_ranks, GROUP)) == mine
    stride = memories[-1].buffer.data_ptr() - memories[0].buffer.data_ptr()
    assert stride == (len(mine) - 1) * 2 * SLICE_ALIGNMENT
    slices = [base + index * 2 * SLICE_ALIGNMENT for base in BASES for index in range(len(mine))]
    assert all(memory.addresses == slices for memory in memories)


def test_numbers_of_ranks_that_cannot_be_dealt_evenly_are_refused(second_of_two):
    with pytest.raises(ShapeError, match="num_ranks = 7 is not allowed; allowed: a multiple of the 2 processes"):
        local_ranks(7, GROUP)
    for number in (0, 128):
        with pytest.raises(ShapeError, match="allowed: 1 to 127"):
            local_ranks(number)
