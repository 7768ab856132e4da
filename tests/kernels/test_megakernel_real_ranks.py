"""The whole layer in several processes: float64, fixed placement bit for bit, and a captured graph.

Two ranks are one a process. Eight are dealt to as many processes as there are GPUs, with fewer than eight as *virtual
ranks* beside real ones: ranks of one process share its GPU, those of others are reached over links.

On one GPU two processes take turns on it, each for a slice of a few milliseconds. Their memory and all that they tell
each other is as on two; how long it takes is not.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA GPU of the Hopper generation", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import torch.distributed as dist  # noqa: E402

from megaflux_serve.config import MegaFluxConfig  # noqa: E402
from megaflux_serve.errors import PeerTimeoutError  # noqa: E402
from megaflux_serve.executors import select_executor  # noqa: E402
from megaflux_serve.planning.planner import plan_replicas  # noqa: E402
from megaflux_serve.routing import RoutingBatch  # noqa: E402
from tests.kernels.layer_cases import EIGHT_RANKS, LIMIT, DeviceCase, assert_same_bits  # noqa: E402

pytestmark = pytest.mark.gpu

CASES = {
    "two ranks, top-8": DeviceCase(16, 2, 2, 1024, 768, 8, 1500),
    "two ranks, top-2": DeviceCase(8, 2, 1, 4096, 1024, 2, 700),
    **EIGHT_RANKS,
}
TURNS = 20
FIELDS = ("hidden", "topk_ids", "topk_weights")
TIMEOUT_S, PATIENCE_S = 2, 20
"""Bounds of a wait, where a peer is lost and where none should be."""


def num_processes(case: DeviceCase) -> int:
    """As many as there are GPUs and hold equally many ranks; two on one GPU."""
    return max(n for n in range(1, max(2, torch.cuda.device_count()) + 1) if case.num_ranks % n == 0)


def join(process: int, num: int, port: int) -> None:
    """Make this process one of ``num``."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
    torch.cuda.set_device(process % torch.cuda.device_count())
    dist.init_process_group("gloo", rank=process, world_size=num)  # NCCL refuses two processes on a GPU


def copied(batches: list[RoutingBatch]) -> list[RoutingBatch]:
    """The same batches at addresses of their own."""
    return [replace(batch, **{name: getattr(batch, name).clone() for name in FIELDS}) for batch in batches]


def serve(process: int, case: DeviceCase, num: int, port: int) -> None:
    """One process: many changing batches without a pause, then replays of a captured graph."""
    join(process, num, port)
    config = MegaFluxConfig(
        executor="megakernel", replica_slots=case.num_slots, max_tokens=case.max_tokens, timeout_s=PATIENCE_S
    )
    executor = select_executor(config, case.num_ranks, dist.group.WORLD)
    local = list(executor.local_ranks)
    assert local == [process * len(local) + index for index in range(case.num_ranks // num)]
    fixed, sticky, moving = (
        case.layer(executor, options)
        for options in (
            config.model_copy(update={"replica_slots": 0}),
            config,
            config.model_copy(update={"sticky": False}),
        )
    )
    batches = [[case.batches(turn)[rank] for rank in local] for turn in range(5)]
    expected = [fixed.forward(batch) for batch in batches]
    for batch, outputs in zip(batches[:2], expected[:2], strict=True):
        assert max(case.errors(batch, outputs)) < LIMIT
    served = [(turn % 5, layer.forward(batches[turn % 5])) for turn in range(TURNS) for layer in (sticky, moving)]
    for turn, outputs in served:
        assert_same_bits(outputs, expected[turn])
    plan, reference = moving.on_device.last_plan(), plan_replicas(case.counts(case.batches(4)), moving.layout)
    assert plan.num_replicas > 0
    for field in ("counts", "blocks", "replica_experts", "transfers"):
        assert np.array_equal(getattr(plan, field), getattr(reference, field)), field

    batches = [[case.batch(100 + turn, rank, case.max_tokens - 3 * rank) for rank in local] for turn in range(3)]
    expected = [fixed.forward(batch) for batch in batches]
    live = copied(batches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = moving.forward(live)
    for turn in (1, 0, 2, 1):
        for to, batch in zip(live, batches[turn], strict=True):
            for name in FIELDS:
                getattr(to, name).copy_(getattr(batch, name))
        graph.replay()
        assert_same_bits(outputs, expected[turn])
    moving.on_device.last_plan()  # raises what a wait has left behind
    dist.barrier()
    dist.destroy_process_group()


def lose_a_peer(rank: int, case: DeviceCase, port: int, dies: bool) -> None:
    """Rank 1 comes to the fourth batch too late, or never; every rank that is left must be told in time and can end.

    Four batches are queued, as the layers of a step are: the time of the first failed wait must be the only one.
    """
    join(rank, 2, port)
    config = MegaFluxConfig(
        executor="megakernel", replica_slots=case.num_slots, max_tokens=case.max_tokens, timeout_s=TIMEOUT_S
    )
    layer = case.layer(select_executor(config, 2, dist.group.WORLD), config)
    batches = [case.batches(turn)[rank] for turn in range(3)]
    for batch in batches:
        layer.forward_rank(batch)
    layer.on_device.last_plan()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
    begin = time.monotonic()
    for batch in (*batches, batches[0]):
        layer.forward_rank(batch)
    with pytest.raises(PeerTimeoutError) as caught:
        layer.on_device.last_plan()
    assert time.monotonic() - begin < 3 * TIMEOUT_S  # waits for what this rank has not brought last twice as long
    # Rank 0 has sent its counts and then given up: what the late rank misses is the start of its forward kernel.
    assert (caught.value.rank, caught.value.phase) == (1 - rank, "counts" if rank == 0 else "forward_start")
    assert caught.value.slot >= 0
    assert f"rank {1 - rank} did not answer within {TIMEOUT_S} s: phase {caught.value.phase}" in str(caught.value)
    with pytest.raises(PeerTimeoutError):
        layer.forward_rank(batches[0])


def serve_unequal(process: int, case: DeviceCase, num: int, port: int) -> None:
    """A few rows here beside many there: most CTAs begin with FC2 or with nothing, while the other ranks still plan."""
    join(process, num, port)
    config = MegaFluxConfig(
        executor="megakernel",
        replica_slots=case.num_slots,
        max_tokens=case.max_tokens,
        sticky=False,
        timeout_s=PATIENCE_S,
    )
    executor = select_executor(config, case.num_ranks, dist.group.WORLD)
    fixed, moving = (case.layer(executor, config.model_copy(update={"replica_slots": s})) for s in (0, case.num_slots))
    sizes = ((3, 42), (1, case.max_tokens), (case.max_tokens, 2), (0, 60), (case.max_tokens, 0), (1, 1), (40, 3))
    batches = [
        [case.batch(turn, rank, sizes[turn % len(sizes)][rank % 2]) for rank in executor.local_ranks]
        for turn in range(21)
    ]
    differ = torch.zeros(len(batches), dtype=torch.int64, device="cuda")
    for turn in range(20 * len(batches)):
        batch = batches[turn % len(batches)]
        for expected, output in zip(fixed.forward(batch), moving.forward(batch), strict=True):
            differ[turn % len(batches)] += (expected.view(torch.int16) != output.view(torch.int16)).sum()
    moving.on_device.last_plan()
    assert differ.tolist() == [0] * len(batches)
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize("name", CASES)
def test_processes_serve_changing_batches_as_one_would(name):
    case, num = CASES[name], num_processes(CASES[name])
    torch.multiprocessing.spawn(serve, (case, num, free_port()), nprocs=num)


@pytest.mark.parametrize("name", ["two ranks, top-8", "eight ranks, top-8"])
def test_unequal_and_tiny_batches_in_a_row_equal_fixed_placement(name):
    case, num = CASES[name], num_processes(CASES[name])
    torch.multiprocessing.spawn(serve_unequal, (case, num, free_port()), nprocs=num)


@pytest.mark.parametrize("dies", [False, True], ids=["late", "dead"])
def test_a_lost_peer_ends_every_rank_with_an_error_that_names_it(dies):
    context, port = torch.multiprocessing.get_context("spawn"), free_port()
    case = CASES["two ranks, top-8"]
    processes = [context.Process(target=lose_a_peer, args=(rank, case, port, dies)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, -signal.SIGKILL if dies else 0]
