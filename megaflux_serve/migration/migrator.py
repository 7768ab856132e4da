"""Carry a transfer plan out between the ranks of an expert-parallel group, over torch.distributed.

A step receives beside the slots; all ranks say whether they have everything; then each writes its own. So a rank that
fails leaves every layer of the others whole, in its old slots or in its new ones, and an error that says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megaflux_serve.errors import InputError, MegafluxError, PeerTimeoutError
from megaflux_serve.messages import Message, exchange
from megaflux_serve.migration.state import ExpertState
from megaflux_serve.routepack.placement import Placement
from megaflux_serve.routepack.transfers import Moves, TransferPlan

Staged = list[tuple[Tensor, Tensor]]
"""What came, and the slot's tensor that it belongs in."""


@dataclass(frozen=True)
class MigrationReport:
    """What a migration did.

    Attributes:
        num_moved: experts that changed their slot, on all ranks.
        sent_bytes, received_bytes: of this rank, to and from others.
        num_steps: steps, each with one exchange.
        seconds: from the first check to the last write.
    """

    num_moved: int
    sent_bytes: int
    received_bytes: int
    num_steps: int
    seconds: float


class MigrationError(MegafluxError):
    """A migration ended before its last step.

    Args:
        placement: what this rank's slots hold now: layers of finished steps as planned, the others as before. Migrate
            from it, in a group that works, or reload.
        reason: what went wrong.
    """

    def __init__(self, placement: Placement, reason: str) -> None:
        super().__init__(f"experts were not all moved: {reason}")
        self.placement = placement


def migrate(
    state: ExpertState,
    plan: TransferPlan,
    group: dist.ProcessGroup,
    staging_bytes: int | None = None,
    timeout_s: float = 300.0,
    progress: Callable[[float], None] | None = None,
) -> MigrationReport:
    """Move experts until the slots hold ``plan.after``; collective, every rank of the group with the same plan.

    Args:
        state: of this rank, on a device that the group's backend sends from. Written in place: addresses stay.
        plan: the moves.
        group: P ranks, in the order of the placement's.
        staging_bytes: the most that this may allocate on a rank at a time; None for what the largest layer needs.
        timeout_s: the longest wait for a step's messages.
        progress: called with the share of the moves that are done, 0 to 1.

    Raises:
        InputError: a state that does not fit the plan or another rank's, before anything moves.
        CapacityError: ``staging_bytes`` is less than one layer needs, before anything moves.
        MigrationError: a rank was lost; says what the slots hold.
    """
    begin, rank = time.perf_counter(), dist.get_rank(group)
    _check(state, plan, staging_bytes, group)
    steps = plan.steps(state.expert_bytes, staging_bytes)
    slots, sent, received, done = plan.before.slots.copy(), 0, 0, 0
    device = state.slot(0, 0)[0].device
    for step in steps:
        outgoing, incoming, staged = _messages(state, plan, step, rank)
        try:
            exchange(group, "migration", outgoing, incoming, timeout_s)
            _agree(group, device, timeout_s)
        except (PeerTimeoutError, RuntimeError) as error:
            raise MigrationError(Placement(slots, plan.before.num_ranks), str(error)) from error
        for came, slot in staged:
            slot.copy_(came)
        layers = np.unique(step[:, 0])
        slots[layers] = plan.after.slots[layers]
        sent += sum(tensor.nbytes for _, tensor in outgoing)
        received += sum(tensor.nbytes for _, tensor in incoming)
        done += len(step)
        if progress is not None:
            progress(done / len(plan.moves))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return MigrationReport(len(plan.moves), sent, received, len(steps), time.perf_counter() - begin)


def _check(state: ExpertState, plan: TransferPlan, staging_bytes: int | None, group: dist.ProcessGroup) -> None:
    """Every rank raises if one has a reason to, so that none waits for another that has left."""
    placement, num_ranks = plan.before, dist.get_world_size(group)
    found = (state.num_layers, state.num_slots * num_ranks, num_ranks)
    expected = (*placement.slots.shape, placement.num_ranks)
    facts: list[tuple[object, ...]] = [()] * num_ranks
    slots = (plan.before.slots.tobytes(), plan.after.slots.tobytes())
    dist.all_gather_object(facts, (found, state.signature(), slots, staging_bytes), group=group)
    for rank, (sizes, signature, planned, staging) in enumerate(facts):
        if sizes != expected:
            raise InputError(
                "state", f"of rank {rank} has layers, experts and ranks {sizes}", f"{expected}, as the plan"
            )
        if signature != facts[0][1]:
            raise InputError("state", f"of rank {rank} has other tensors than rank 0's", f"{facts[0][1]}")
        if planned != facts[0][2]:
            raise InputError("plan", f"of rank {rank} differs from rank 0's", "the same on every rank")
        if staging != facts[0][3]:
            raise InputError("staging_bytes", f"of rank {rank} is {staging}", f"{facts[0][3]}, as on rank 0")


def _messages(
    state: ExpertState, plan: TransferPlan, step: Moves, rank: int
) -> tuple[list[Message], list[Message], Staged]:
    """What this rank sends and receives in a step, and where all that it stages belongs."""
    per_rank, outgoing, incoming, staged = plan.before.experts_per_rank, list[Message](), list[Message](), Staged()
    for (layer, _, old, new), source, destination in zip(step.tolist(), *plan.ranks(step), strict=True):
        if source == rank and destination != rank:
            outgoing += [(int(destination), tensor) for tensor in state.slot(layer, old % per_rank)]
        if destination == rank:
            for index, slot in enumerate(state.slot(layer, new % per_rank)):
                if source == rank:
                    came = state.slot(layer, old % per_rank)[index].clone()
                else:
                    came = torch.empty_like(slot)
                    incoming.append((int(source), came))
                staged.append((came, slot))
    return outgoing, incoming, staged


def _agree(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
    """Wait until every rank has what it was sent: nobody writes while another may still fail to receive.

    Raises:
        PeerTimeoutError: a rank said nothing in time.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    peers = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
    words = torch.ones(1 + len(peers), dtype=torch.uint8, device=device)
    heard = [(rank, words[1 + i : 2 + i]) for i, rank in enumerate(peers)]
    exchange(group, "migration_agreement", [(rank, words[:1]) for rank in peers], heard, timeout_s)


__all__ = ["MigrationError", "MigrationReport", "migrate"]
