"""A schedule in the form that a training framework takes: micro-batches as lists of indices, a data-parallel rank.

Decides how cells become micro-batches: slot d is data-parallel rank d, and row r its r-th micro-batch of the optimizer
step. Knows no framework's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megaflux_serve.errors import InputError
from megaflux_serve.routepack.layout import Layout


@dataclass(frozen=True)
class MicroBatches:
    """Which samples each data-parallel rank trains on, and in which micro-batches.

    The names and meanings are those of the first three values that slime's ``build_dp_schedule`` returns. Ranks run
    equally many micro-batches in every step, which pipeline and expert parallelism need.

    Attributes:
        partitions: a rank, the samples of all its steps in the order in which they are trained.
        micro_batch_indices: a rank, a micro-batch over all steps, places in the rank's partition; together they count
            through it.
        num_microbatches: a step, the micro-batches of every rank.
    """

    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]


def micro_batches(steps: Sequence[tuple[Layout, ArrayLike]]) -> MicroBatches:
    """Micro-batches of the optimizer steps of one rollout.

    Args:
        steps: for each, in order, the schedule of its window and the sample that each of its N trajectories is:
            integers [N] of 0 or more, places in the rollout's list of samples.

    Raises:
        InputError: no steps, steps with other numbers of slots, samples that are no integers or not one a trajectory,
            or a sample that is trained twice.
    """
    if not steps:
        raise InputError("steps", "are none", "at least one")
    num_slots = steps[0][0].num_slots
    partitions: list[list[int]] = [[] for _ in range(num_slots)]
    indices: list[list[list[int]]] = [[] for _ in range(num_slots)]
    for number, (layout, samples) in enumerate(steps):
        if layout.num_slots != num_slots:
            raise InputError(f"step {number}", f"has {layout.num_slots} slots", f"the {num_slots} of step 0")
        positions = _checked(samples, layout.cell.size, number)
        for row in layout.rows():
            for slot, trajectories in enumerate(row):
                start = len(partitions[slot])
                partitions[slot] += [positions[trajectory] for trajectory in trajectories]
                indices[slot].append(list(range(start, len(partitions[slot]))))
    trained = np.concatenate([np.asarray(partition, dtype=np.int64) for partition in partitions])
    values, counts = np.unique(trained, return_counts=True)
    if (counts > 1).any():
        raise InputError("samples", f"sample {int(values[counts.argmax()])} is trained twice", "each once")
    return MicroBatches(partitions, indices, [layout.num_rows for layout, _ in steps])


def _checked(samples: ArrayLike, num_trajectories: int, step: int) -> list[int]:
    positions = np.asarray(samples)
    if positions.shape != (num_trajectories,) or positions.dtype.kind not in "iu" or positions.min() < 0:
        came = f"are {positions.dtype} {list(positions.shape)}"
        raise InputError(f"samples of step {step}", came, f"integers [{num_trajectories}] of 0 or more")
    return [int(position) for position in positions]


__all__ = ["MicroBatches", "micro_batches"]
