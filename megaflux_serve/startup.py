"""What the backend takes on this rank, as one line of the log when all layers are built.

Decides the wording and the moment: the first batch, which an engine makes up itself. Knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors import DeviceExecutor, Executor
from megaflux_serve.layer import ReplicatedMoE

GIB = 1 << 30


class Startup:
    """Collects the layers of a rank until the first batch.

    Args:
        options: of the server.
        executor: of the rank.
        logger: gets the line; None on ranks that do not say it, since all take the same.
    """

    def __init__(
        self, options: MegaFluxConfig, executor: Executor | DeviceExecutor, logger: logging.Logger | None
    ) -> None:
        self.options, self.executor, self.logger = options, executor, logger
        self.layers: list[ReplicatedMoE] = []

    def add(self, layer: ReplicatedMoE) -> None:
        """One more layer has been built."""
        self.layers.append(layer)

    def tell(self) -> None:
        """Say the line, once."""
        if self.logger is not None:
            self.logger.info("%s", startup_line(self.options, self.executor, self.layers))
        self.logger = None


def startup_line(options: MegaFluxConfig, executor: Executor | DeviceExecutor, layers: Sequence[ReplicatedMoE]) -> str:
    """Executor, ranks, layers and slots; on a device also memory and how kernels got ready.

    Args:
        options: of the server.
        executor: of the rank.
        layers: of the rank, at least one.
    """
    layout = layers[0].layout
    holders = "rank and layer" if options.sticky else "rank, shared by its layers"
    line = (
        f"megaflux: executor {executor.kind}, {layout.num_ranks} ranks, {len(layers)} layers of "
        f"{layout.num_experts} experts, {layout.experts_per_rank} home and {layout.num_replica_slots} replica slots "
        f"a {holders}"
    )
    if options.handover_rows:
        line += f", the engine's own kernels for batches of less than {options.handover_rows} rows"
    if not isinstance(executor, DeviceExecutor):
        return line
    from megaflux_kernels.compile_cache import cache_use

    use = executor.memory_use()
    weights, replicas, workspace = (
        f"{size / GIB:.2f} GiB" for size in (use.weight_bytes, use.replica_bytes, use.workspace_bytes)
    )
    return (
        f"{line}; a rank takes {weights} for home weights, {replicas} for replica slots and {workspace} for batches of "
        f"up to {options.max_tokens} rows; kernels ready in {cache_use.seconds:.1f} s ({cache_use.compiled} compiled, "
        f"{cache_use.loaded} from the cache)"
    )


__all__ = ["Startup", "startup_line"]
