"""Checks in real processes over gloo, which are started once; each leaves one word or a traceback a rank."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Checks = dict[str, Callable[[], None]]
"""What a rank does, in order; the others do the same checks with it."""


def run_in_processes(
    make_checks: Callable[[int, dist.Store], Checks], num_processes: int, folder: Path
) -> dict[str, str]:
    """By "check rank", "passed" or a traceback; a rank's checks end with the first that fails.

    Args:
        make_checks: a function of a module, given rank and store in a process whose group is initialised.
        num_processes: ranks.
        folder: empty.
    """
    mp.spawn(_run, args=(make_checks, num_processes, str(folder)), nprocs=num_processes)
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != "store"}


def _run(rank: int, make_checks: Callable[[int, dist.Store], Checks], num_processes: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_processes)
    for name, check in make_checks(rank, store).items():
        try:
            check()
            outcome = "passed"
        except BaseException:
            outcome = traceback.format_exc()
        Path(folder, f"{name} {rank}").write_text(outcome)
        if outcome != "passed":
            break
    os._exit(0)  # taking a broken group down in order would wait again
