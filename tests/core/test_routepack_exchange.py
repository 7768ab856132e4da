from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflux_serve.errors import InputError
from megaflux_serve.routepack import Demand, Layout, Topology, micro_batches
from megaflux_serve.routepack.baselines import global_ffd
from megaflux_serve.routepack.rows import choose_rows
from tests.core.routepack_cases import windows


@settings(derandomize=True, deadline=None, max_examples=25)
@given(windows(), st.randoms(use_true_random=False))
def test_micro_batches_are_the_cells_of_the_schedule(case: tuple[Demand, Topology], random: object) -> None:
    demand, topology = case
    layout = global_ffd(demand.lengths, topology, choose_rows(demand.lengths, topology))
    samples = np.arange(2 * layout.cell.size)
    random.shuffle(samples)  # type: ignore[attr-defined]
    steps = [(layout, samples[: layout.cell.size]), (layout, samples[layout.cell.size :])]
    batches = micro_batches(steps)
    assert batches.num_microbatches == [layout.num_rows] * 2
    assert sorted(chain.from_iterable(batches.partitions)) == list(range(2 * layout.cell.size))
    for rank, (partition, indices) in enumerate(zip(batches.partitions, batches.micro_batch_indices, strict=True)):
        assert list(chain.from_iterable(indices)) == list(range(len(partition)))
        trained = [[partition[index] for index in micro_batch] for micro_batch in indices]
        cells = [[int(own[t]) for t in row[rank]] for _, own in steps for row in layout.rows()]
        assert trained == cells


def layout(cells: list[int], num_slots: int) -> Layout:
    return Layout(np.array(cells, dtype=np.int32), (max(cells) + 1) // num_slots, num_slots)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "steps: are none"),
        ([(layout([0, 1], 2), [0, 1]), (layout([0, 1, 2], 3), [2, 3, 4])], "step 1: has 3 slots"),
        ([(layout([0, 1], 2), [0, 1, 2])], r"samples of step 0: are int64 \[3\]"),
        ([(layout([0, 1], 2), [0.0, 1.0])], "samples of step 0: are float64"),
        ([(layout([0, 1], 2), [0, -1])], "samples of step 0"),
        ([(layout([0, 1], 2), [0, 1]), (layout([0, 1], 2), [2, 1])], "sample 1 is trained twice"),
    ],
)
def test_steps_that_are_no_schedule_are_refused(steps: list[tuple[Layout, list[int]]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        micro_batches(steps)
