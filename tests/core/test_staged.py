"""The staged executor in real processes over gloo: bit for bit what the reference executor computes."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, PeerTimeoutError
from megaflux_serve.executors import StagedExecutor, select_executor
from megaflux_serve.layer import ReplicatedMoE
from megaflux_serve.planning.plan import fixed_plan
from megaflux_serve.workspace import Workspace
from tests.core.moe_cases import MoECase, make_case

CONFIG = MegaFluxConfig(block_rows=4)
# Rows of each rank, batch by batch: uneven, idle ranks, one row in all, nobody at all, and repeats (resident replicas).
BATCHES = {
    2: ([40, 9], [40, 9], [0, 33], [1, 0], [0, 0], [17, 17]),
    3: ([40, 0, 9], [40, 0, 9], [0, 0, 50], [0, 0, 0], [5, 61, 1]),
}


def join(rank: int, num_ranks: int, folder: str) -> dist.Store:
    """Make this process one rank of a gloo group on the loopback interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    return store


def staged_layer(case: MoECase, rank: int, executor: StagedExecutor) -> ReplicatedMoE:
    workspace = Workspace(case.layout.num_replica_slots)
    return ReplicatedMoE("moe", case.layout, CONFIG, executor, workspace, [case.home(rank)])


def compare_with_reference(rank: int, num_ranks: int, folder: str) -> None:
    join(rank, num_ranks, folder)
    executor = select_executor(CONFIG, num_ranks, dist.group.WORLD)
    assert isinstance(executor, StagedExecutor)
    for dtype in (torch.float32, torch.bfloat16):
        plans: list[int] = []
        shape = {"dtype": dtype, "top_k": 3, "shuffled_homes": True}
        first = make_case(BATCHES[num_ranks][0], **shape)
        staged = staged_layer(first, rank, executor)
        staged.observers.append(lambda report, plans=plans: plans.append(len(report.plan.transfers)))
        reference = first.reference_layer(CONFIG)
        fixed = first.without_replicas().reference_layer(CONFIG)
        for tokens in BATCHES[num_ranks]:
            batches = make_case(tokens, **shape).batches
            output, wanted = staged.forward_rank(batches[rank]), reference.forward(batches)
            assert torch.equal(output, wanted[rank]), f"{dtype} {tokens}: rank {rank} differs from the reference"
            assert torch.equal(output, fixed.forward(batches)[rank]), (
                f"{dtype} {tokens}: replication changed rank {rank}"
            )
        assert plans[0] > 0, "the first batch opened no replica: nothing was tested"
    dist.destroy_process_group()


def wait_for_an_absent_rank(rank: int, num_ranks: int, folder: str) -> None:
    store = join(rank, num_ranks, folder)
    case = make_case([3] * num_ranks)
    if rank == 1:
        store.wait(["rank 0 gave up"])
    else:
        layer = staged_layer(case, rank, StagedExecutor(dist.group.WORLD, timeout_s=1.0))
        with pytest.raises(PeerTimeoutError, match=r"rank 1 did not answer within 1 s: phase counts"):
            layer.forward_rank(case.batches[rank])
        store.set("rank 0 gave up", "yes")
    os._exit(0)  # the group is broken on purpose; taking it down in order would wait again


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_processes_compute_what_the_reference_computes(num_ranks: int, tmp_path: Path) -> None:
    mp.spawn(compare_with_reference, args=(num_ranks, str(tmp_path)), nprocs=num_ranks)


def test_a_wait_for_an_absent_rank_ends_and_names_it(tmp_path: Path) -> None:
    mp.spawn(wait_for_an_absent_rank, args=(2, str(tmp_path)), nprocs=2)


def test_ranks_in_processes_cannot_use_the_reference_executor(tmp_path: Path) -> None:
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
