"""The staged executor in three real processes over gloo: bit for bit what the reference executor computes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, PeerTimeoutError
from megaflux_serve.executors import StagedExecutor, select_executor
from megaflux_serve.layer import ReplicatedMoE
from megaflux_serve.planning.plan import fixed_plan
from megaflux_serve.workspace import Workspace
from tests.core.moe_cases import MoECase, make_case
from tests.core.process_checks import Checks, run_in_processes

CONFIG = MegaFluxConfig(block_rows=4)
NUM_PROCESSES = 3


def staged_layer(case: MoECase, executor: StagedExecutor) -> ReplicatedMoE:
    workspace = Workspace(case.layout.num_replica_slots)
    return ReplicatedMoE("moe", case.layout, CONFIG, executor, workspace, [case.home(executor.rank)])


def equals_reference(group: dist.ProcessGroup, dtype: torch.dtype, batches: Sequence[list[int]]) -> None:
    """Serve batches of the given rows a rank; compare with all ranks in one process, replicated and fixed."""
    executor = select_executor(CONFIG, dist.get_world_size(group), group)
    assert isinstance(executor, StagedExecutor)
    rank, transfers = executor.rank, []
    first = make_case(batches[0], dtype=dtype, top_k=3, shuffled_homes=True)
    staged = staged_layer(first, executor)
    staged.observers.append(lambda report: transfers.append(len(report.plan.transfers)))
    reference = first.reference_layer(CONFIG)
    fixed = first.without_replicas().reference_layer(CONFIG)
    for tokens in batches:
        case = make_case(tokens, dtype=dtype, top_k=3, shuffled_homes=True)
        output = staged.forward_rank(case.batches[rank])
        assert torch.equal(output, reference.forward(case.batches)[rank]), f"{tokens}: differs from the reference"
        assert torch.equal(output, fixed.forward(case.batches)[rank]), f"{tokens}: replication changed the result"
    assert transfers[0] > 0, "the first batch opened no replica: nothing was tested"


def one_rank_updates_its_weights(group: dist.ProcessGroup) -> None:
    """Rank 0 alone learns of new weights, between two batches of the same rows; every rank has to copy them again."""
    executor = select_executor(CONFIG, dist.get_world_size(group), group)
    assert isinstance(executor, StagedExecutor)
    case = make_case([40, 0, 9])
    layer, reports = staged_layer(case, executor), []
    layer.observers.append(reports.append)
    for _ in range(2):
        layer.forward_rank(case.batches[executor.rank])
    assert reports[0].plan.num_replicas > 0 == len(reports[1].plan.transfers), "replicas did not stay"
    if executor.rank == 0:
        layer.slots[0].home.w2.mul_(2.0)
        layer.weights_updated()
    output = layer.forward_rank(case.batches[executor.rank])
    assert len(reports[2].plan.transfers) == reports[2].plan.num_replicas > 0
    scale = torch.tensor([2.0 if home == 0 else 1.0 for home in case.layout.home_rank])
    updated = replace(case.without_replicas(), w2=case.w2 * scale[:, None, None])
    assert torch.equal(output, updated.reference_layer(CONFIG).forward(case.batches)[executor.rank])


def names_the_absent_rank(store: dist.Store) -> None:
    """The last rank never comes. It stays alive, so that its peers see silence and no closed connection."""
    rank, absent = dist.get_rank(), NUM_PROCESSES - 1
    if rank != absent:
        case = make_case([3] * NUM_PROCESSES)
        executor = StagedExecutor(dist.group.WORLD, timeout_s=1.0)
        layer = staged_layer(case, executor)
        assert executor.timeouts() == []
        with pytest.raises(PeerTimeoutError, match=rf"rank {absent} did not answer within 1 s: phase counts"):
            layer.forward_rank(case.batches[rank])
        assert executor.timeouts() == ["counts"]
        store.set(f"rank {rank} gave up", "")
    store.wait([f"rank {other} gave up" for other in range(absent)])


def checks_of(rank: int, store: dist.Store) -> Checks:
    """What one process does."""
    # Uneven, repeated (resident replicas), idle ranks, nobody at all, one row in all.
    three = ([40, 0, 9], [40, 0, 9], [0, 0, 50], [0, 0, 0], [5, 61, 1], [0, 1, 0])
    two = ([40, 9], [40, 9], [0, 33], [0, 0], [17, 17])
    pair = dist.new_group([1, 2])  # ranks of the group are not those of the world
    checks: Checks = {}
    for dtype in (torch.float32, torch.bfloat16):
        checks[f"three {dtype}"] = lambda dtype=dtype: equals_reference(dist.group.WORLD, dtype, three)
        if rank in (1, 2):
            checks[f"two {dtype}"] = lambda dtype=dtype: equals_reference(pair, dtype, two)
    checks["update"] = lambda: one_rank_updates_its_weights(dist.group.WORLD)
    checks["absent"] = lambda: names_the_absent_rank(store)  # last: it breaks the group
    return checks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every check left behind, by "check rank"."""
    return run_in_processes(checks_of, NUM_PROCESSES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize(("group", "ranks"), [("two", (1, 2)), ("three", (0, 1, 2))])
def test_processes_compute_what_the_reference_computes(
    outcomes: dict[str, str], group: str, ranks: tuple[int, ...], dtype: str
) -> None:
    for rank in ranks:
        assert outcomes[f"{group} {dtype} {rank}"] == "passed"


def test_an_update_of_one_rank_drops_the_resident_replicas_of_all(outcomes: dict[str, str]) -> None:
    for rank in range(NUM_PROCESSES):
        assert outcomes[f"update {rank}"] == "passed"


def test_a_wait_for_an_absent_rank_ends_and_names_it(outcomes: dict[str, str]) -> None:
    for rank in range(NUM_PROCESSES):
        assert outcomes[f"absent {rank}"] == "passed"


def test_ranks_in_processes_cannot_use_the_reference_executor() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"executor = 'reference'.*staged or auto"):
            select_executor(MegaFluxConfig(executor="reference"), 2, dist.group.WORLD)
        alone = select_executor(MegaFluxConfig(executor="staged"), 1, dist.group.WORLD)
        case = make_case([12])
        counts = alone.gather_counts([case.counts()[0]])
        slots = [Workspace(0).slots(case.home(0), 0)]
        (output,) = alone.execute(case.batches, fixed_plan(counts, case.layout, 4), slots)
        assert torch.equal(output, case.reference_layer(CONFIG).forward(case.batches)[0])
    finally:
        dist.destroy_process_group()
