"""Migration in three real processes over gloo: every expert's tensors in its new slot, or an error that says where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megaflux_serve.errors import CapacityError, InputError
from megaflux_serve.migration import ExpertState, MigrationError, TransferPlan, logical_experts, migrate
from megaflux_serve.routepack.placement import Placement
from tests.core.process_checks import Checks, run_in_processes

NUM_PROCESSES, LAYERS, PER_RANK = 3, 5, 4
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w13": ((6, 4), torch.bfloat16),
    "w13.exp_avg": ((6, 4), torch.float32),
    "scale": ((), torch.float32),
    "code": ((3,), torch.uint8),
}
ONES = torch.ones(2, 3)


def contents(name: str, layer: int, expert: int) -> torch.Tensor:
    """What belongs to an expert: other values for every name, layer and expert."""
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(1000 * layer + 10 * expert + list(SHAPES).index(name))
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def filled(placement: Placement, rank: int) -> ExpertState:
    """A rank's state as a placement has it: some tensors stacked, some one a slot."""
    held = placement.experts.reshape(LAYERS, placement.num_ranks, -1)[:, rank]
    tensors: dict[str, Any] = {}
    for name in SHAPES:
        slots = [[contents(name, layer, int(expert)) for expert in row] for layer, row in enumerate(held)]
        tensors[name] = slots if name == "code" else [torch.stack(row) for row in slots]
    return ExpertState.of(tensors)


def holds(state: ExpertState, placement: Placement, rank: int) -> bool:
    expected = filled(placement, rank).rows
    return all(
        torch.equal(state.rows[name][layer][index], expected[name][layer][index])
        for name in SHAPES
        for layer in range(LAYERS)
        for index in range(PER_RANK)
    )


def shuffled(num_ranks: int, seed: int) -> Placement:
    """Random slots; one layer stays as it is."""
    rng = np.random.default_rng(seed)
    slots = np.stack([rng.permutation(num_ranks * PER_RANK) for _ in range(LAYERS)])
    slots[2] = np.arange(num_ranks * PER_RANK)
    return Placement.of(slots, num_ranks)


def moves_there_and_back(group: dist.ProcessGroup) -> None:
    """Through two placements and back; small steps and one large; addresses stay."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    stops = [Placement.identity(LAYERS, num_ranks * PER_RANK, num_ranks), *(shuffled(num_ranks, s) for s in (1, 2))]
    state, shares = filled(stops[0], rank), list[float]()
    addresses = [tensor.data_ptr() for layers in state.rows.values() for slots in layers for tensor in slots]
    for before, after, staging in (
        (stops[0], stops[1], 4 * state.expert_bytes),
        (stops[1], stops[2], None),
        (stops[2], stops[0], 7 * state.expert_bytes),
        (stops[0], stops[0], 0),
    ):
        plan = TransferPlan(before, after)
        report = migrate(state, plan, group, staging, progress=shares.append)
        assert holds(state, after, rank)
        traffic = plan.traffic()
        assert report.received_bytes == traffic.received[rank] * state.expert_bytes
        assert report.sent_bytes == traffic.sent[rank] * state.expert_bytes
        assert report.num_moved == len(plan.moves)
        assert report.num_steps == len(plan.steps(state.expert_bytes, staging))
    assert [tensor.data_ptr() for layers in state.rows.values() for slots in layers for tensor in slots] == addresses
    assert shares.count(1.0) == 3


def refuses_what_does_not_fit(group: dist.ProcessGroup) -> None:
    """All ranks raise, also those that did nothing wrong, and nothing has moved."""
    rank = dist.get_rank(group)
    before, after = Placement.identity(LAYERS, 12, 3), shuffled(3, 1)
    state, plan = filled(before, rank), TransferPlan(before, after)
    less = ExpertState({name: rows for name, rows in state.rows.items() if name != "scale" or rank != 1})
    with pytest.raises(InputError, match="state: of rank 1 has other tensors than rank 0's"):
        migrate(less, plan, group)
    other = TransferPlan(before, shuffled(3, 2)) if rank == 2 else plan
    with pytest.raises(InputError, match="plan: of rank 2 differs from rank 0's"):
        migrate(state, other, group)
    stays = TransferPlan(after, after) if rank == 2 else TransferPlan(before, before)  # no moves, yet not the same
    with pytest.raises(InputError, match="plan: of rank 2 differs from rank 0's"):
        migrate(state, stays, group)
    with pytest.raises(InputError, match="staging_bytes: of rank 1 is 9"):
        migrate(state, plan, group, 9 if rank == 1 else 10)
    with pytest.raises(CapacityError, match="allowed: at least"):
        migrate(state, plan, group, state.expert_bytes)
    wide = Placement.identity(LAYERS, 24, 3)
    with pytest.raises(InputError, match=r"state: of rank 0 has layers, experts and ranks \(5, 12, 3\)"):
        migrate(state, TransferPlan(wide, wide), group)
    assert holds(state, before, rank)


class SumOverRanks(torch.autograd.Function):
    """Partial outputs of all ranks added up; the gradient of the sum is everybody's."""

    @staticmethod
    def forward(context: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def losses(group: dist.ProcessGroup, stops: dict[int, Placement], steps: int = 9) -> list[float]:
    """Train two layers side by side with Adam, one expert a token and layer; migrate before the steps in ``stops``."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    placement, width = Placement.identity(2, num_ranks * PER_RANK, num_ranks), 8
    draw = torch.Generator().manual_seed(5)
    first = torch.randn(2, num_ranks * PER_RANK, width, width, generator=draw)
    weights = [torch.nn.Parameter(layer[rank * PER_RANK :][:PER_RANK].clone()) for layer in first]
    optimizer, found = torch.optim.Adam(weights, lr=0.05), []
    choices = torch.randint(num_ranks * PER_RANK, (2, 40), generator=draw)
    rows, target = torch.randn(2, 40, width, generator=draw)
    for step in range(steps):
        if step in stops:
            state = ExpertState.of_parameters({"weight": weights}, optimizer)
            migrate(state, TransferPlan(placement, stops[step]), group)
            placement = stops[step]
        output = target
        for layer, (weight, choice) in enumerate(zip(weights, choices, strict=True)):
            partial = torch.zeros(40, width)
            for slot, expert in enumerate(placement.experts[layer][rank * PER_RANK :][:PER_RANK]):
                at = choice == int(expert)
                partial = partial.index_put((at,), torch.tanh(rows[at] @ weight[slot]))
            output = output + SumOverRanks.apply(partial, group)
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(float(loss.detach()))
    return found


def training_goes_on_as_if_nothing_had_moved(group: dist.ProcessGroup) -> None:
    """Bit for bit: weights, Adam's moments and logical experts stay together."""
    num_experts = dist.get_world_size(group) * PER_RANK
    rng = np.random.default_rng(3)
    one, other = (Placement.of([rng.permutation(num_experts) for _ in range(2)], 2) for _ in range(2))
    stayed = losses(group, {})
    assert losses(group, {1: one, 4: other, 5: one}) == stayed
    assert stayed[-1] < stayed[0]


def names_what_is_held_when_a_rank_is_lost(group: dist.ProcessGroup, store: dist.Store) -> None:
    """Rank 2 stops after two layers: the others' slots hold what the error says."""
    from megaflux_serve.migration import migrator as module

    rank = dist.get_rank(group)
    before, after = Placement.identity(LAYERS, 12, 3), shuffled(3, 1)
    state, plan = filled(before, rank), TransferPlan(before, after)
    steps = plan.steps(state.expert_bytes, 4 * state.expert_bytes)
    assert len(steps) == LAYERS - 1
    if rank == 2:
        calls, real = [0], module.exchange

        def stops(*arguments: Any) -> None:
            calls[0] += 1
            if calls[0] > 4:  # messages and agreement of each step
                raise KeyboardInterrupt
            real(*arguments)

        module.exchange = stops
        with pytest.raises(KeyboardInterrupt):
            migrate(state, plan, group, 4 * state.expert_bytes, timeout_s=1.0)
        store.wait(["0 gave up", "1 gave up"])
        return
    with pytest.raises(MigrationError, match="experts were not all moved: rank 2 did not answer") as caught:
        migrate(state, plan, group, 4 * state.expert_bytes, timeout_s=1.0)
    now = caught.value.placement
    moved = (now.slots == after.slots).all(axis=1) & (before.slots != after.slots).any(axis=1)
    assert np.flatnonzero(moved).tolist() == [0, 1]
    assert holds(state, now, rank)
    store.set(f"{rank} gave up", "")


def checks_of(rank: int, store: dist.Store) -> Checks:
    """What one process does."""
    pair, world = dist.new_group([1, 2]), dist.group.WORLD  # ranks of the pair are not those of the world
    checks: Checks = {"three": lambda: moves_there_and_back(world)}
    if rank in (1, 2):
        checks["two"] = lambda: moves_there_and_back(pair)
        checks["training"] = lambda: training_goes_on_as_if_nothing_had_moved(pair)
    checks["refused"] = lambda: refuses_what_does_not_fit(world)
    checks["lost"] = lambda: names_what_is_held_when_a_rank_is_lost(world, store)  # last: it breaks the group
    return checks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every check left behind, by "check rank"."""
    return run_in_processes(checks_of, NUM_PROCESSES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("check", "ranks"), [("three", 3), ("two", 2), ("training", 2), ("refused", 3), ("lost", 3)])
def test_migration_between_processes(outcomes: dict[str, str], check: str, ranks: int) -> None:
    for rank in range(NUM_PROCESSES - ranks, NUM_PROCESSES):
        assert outcomes[f"{check} {rank}"] == "passed"


def test_experts_are_saved_and_loaded_by_their_logical_ids() -> None:
    saved_as, loaded_as = shuffled(3, 1), shuffled(3, 2)
    checkpoint = {
        (layer, expert): {name: tensor.clone() for name, tensor in tensors.items()}
        for rank in range(3)
        for layer, expert, tensors in logical_experts(filled(saved_as, rank), saved_as, rank)
    }
    assert len(checkpoint) == LAYERS * 12
    for rank in range(3):
        state = filled(Placement.identity(LAYERS, 12, 3), rank)
        for layer, expert, tensors in logical_experts(state, loaded_as, rank):
            for name, tensor in tensors.items():
                tensor.copy_(checkpoint[layer, expert][name])
        assert holds(state, loaded_as, rank)
    with pytest.raises(InputError, match=r"state: has layers and slots \(5, 4\); allowed: \(5, 6\)"):
        next(logical_experts(state, Placement.identity(LAYERS, 18, 3), 0))


def test_what_an_optimizer_keeps_moves_with_its_parameters() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    sum(p.sum() for p in parameters).backward()
    with pytest.raises(InputError, match=r"w, layer 0: has a gradient; allowed: none: zero_grad"):
        ExpertState.of_parameters({"w": parameters}, optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = ExpertState.of_parameters({"w": parameters}, optimizer)
    assert list(state.rows) == ["w", "w.exp_avg", "w.exp_avg_sq"]  # and not the number of steps
    assert (state.num_layers, state.num_slots, state.expert_bytes) == (2, 4, 3 * 12)
    state.rows["w.exp_avg"][1][2].fill_(7.0)
    assert (optimizer.state[parameters[1]]["exp_avg"][2] == 7.0).all()


def test_what_an_optimizer_keeps_by_rows_and_columns_moves_too() -> None:
    weight, bias = torch.nn.Parameter(torch.ones(4, 6, 5)), torch.nn.Parameter(torch.ones(4, 5))
    optimizer = torch.optim.Adafactor([weight, bias])
    (weight.sum() + bias.sum()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = ExpertState.of_parameters({"w": [weight]}, optimizer)
    assert {name: list(layers[0][0].shape) for name, layers in state.rows.items()} == {
        "w": [6, 5],
        "w.row_var": [6, 1],
        "w.col_var": [1, 5],
    }
    with pytest.raises(InputError, match=r"b.col_var, layer 0: is \[1, 5\] for a parameter \[4, 5\]; allowed: \[4, "):
        ExpertState.of_parameters({"b": [bias]}, optimizer)  # its columns are means over all experts


def test_parameters_of_single_experts_are_written_in_place() -> None:
    experts = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    state = ExpertState.of({"w": [experts]})
    state.slot(0, 1)[0].copy_(torch.zeros(3))
    assert experts[1].sum() == 0
    experts[0].sum().backward()
    with pytest.raises(InputError, match="w, layer 0: has a gradient"):
        ExpertState.of({"w": [experts]})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "a name with at least one layer"),
        ({"w": [torch.ones(2, 3)], "v": []}, "a name with at least one layer"),
        ({"w": [torch.ones(2, 3)] * 2, "v": [torch.ones(2, 3)]}, "v: has 1 layers; allowed: 2"),
        ({"w": [torch.ones(2, 3), torch.ones(3, 3)]}, "w, layer 1: has 3 slots; allowed: 2"),
        ({"w": [[torch.ones(2), torch.ones(3)]]}, r"w, layer 0, slot 1: is torch.float32 \[3\]"),
        ({"w": [[torch.ones(2), torch.ones(2).double()]]}, r"w, layer 0, slot 1: is torch.float64 \[2\]"),
        ({"w": [torch.ones(2, 3, 4).transpose(1, 2)]}, "w, layer 0, slot 0: is not contiguous"),
        ({"w": [torch.ones(1, 3).expand(2, 3)]}, "w, layer 0, slot 1: shares memory with w, layer 0, slot 0"),
        ({"w": [ONES], "v": [ONES]}, "v, layer 0, slot 0: shares memory with w, layer 0, slot 0"),
    ],
)
def test_tensors_that_cannot_move_are_refused(tensors: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExpertState.of(tensors)
