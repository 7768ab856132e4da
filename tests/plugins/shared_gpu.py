"""Two ranks of vLLM on one GPU, for tests where there is no second one.

Processes take turns on the GPU, each for a slice of a few milliseconds. All that ranks tell each other is as on two
GPUs; how long it takes is not. vLLM, torch and NCCL refuse two ranks on a GPU unless they are told otherwise: torch by
an environment variable, NCCL by host names that differ, so that ranks reach each other over sockets, and vLLM by this
plugin, which has it take the one GPU for every device that it asks for.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.plugins.processes import PROJECT

NUM_RANKS = 2
ENVIRONMENT = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_SKIP_P2P_CHECK": "1",
}


def environment(folder: Path) -> dict[str, str]:
    """What engines need to share a GPU.

    Args:
        folder: for the entry point by which vLLM finds the plugin.
    """
    from benchmarks.entry_points import write_dist_info

    entry = {"megaflux_shared_gpu": f"{__name__}:register"}
    write_dist_info(folder, "megaflux-shared-gpu", "0", {"vllm.general_plugins": entry})
    paths = [str(folder), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def register() -> None:
    """Called by vLLM in every process before it looks at devices."""
    import torch
    from vllm.platforms import current_platform

    platform = type(current_platform)
    platform.device_count = classmethod(lambda cls: NUM_RANKS)
    platform.device_id_to_physical_device_id = classmethod(lambda cls, device_id: 0)
    platform.logical_device_id_to_visible_device_id = classmethod(lambda cls, device_id: 0)
    platform.is_fully_connected = classmethod(lambda cls, physical_device_ids: True)
    torch.accelerator.device_count = lambda: NUM_RANKS
    _be_a_host()
    os.register_at_fork(after_in_child=_be_a_host)


def _be_a_host() -> None:
    os.environ["NCCL_HOSTID"] = f"host-of-{os.getpid()}"
