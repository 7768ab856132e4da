"""What the options leave open, settled in the front end: the executor that ``auto`` means, limits of rows, the gate.

Decides once for all ranks, from the model's configuration and the machine, before an engine process starts; the answer
travels with vLLM's configuration. Touches no device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from megaflux_kernels import language

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError
from megaflux_serve.executors.automatic import automatic_executor, require_megakernel
from megaflux_serve.executors.limits import check_options, layer_shape
from megaflux_serve.planning.calibration import costs_here
from megaflux_serve.planning.gate import GateCosts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOGGER = logging.getLogger("vllm.megaflux")
HANDOVER_ROWS = 256
"""From how many rows of a data-parallel rank on the megakernel computes a batch, where ``min_tokens`` does not say.

On two H200s with data and expert parallelism, decode of Qwen3-30B-A3B's shape in CUDA graphs, vLLM's kernels took 12 to
20 us less a layer than the megakernel at every size that was measured, up to 64 rows a rank; with the thousands of rows
of a prefill the megakernel is 1.2 to 1.5 times as fast. The crossover lies somewhere between.
"""

INTERMEDIATE_SIZES = ("moe_intermediate_size", "intermediate_size")
TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
"""Names that configurations of MoE models have for I and k, in the order in which they are looked for."""


def settle(config: VllmConfig, options: MegaFluxConfig, num_ranks: int) -> MegaFluxConfig:
    """The options with ``executor``, ``max_tokens``, ``min_tokens`` and, for the megakernel, ``gate`` filled in.

    Args:
        config: vLLM's configuration, with routed experts.
        options: as given.
        num_ranks: expert-parallel ranks.

    Raises:
        ConfigError: a ``max_tokens`` below what vLLM may schedule on a rank; a ``min_tokens`` above 0 where vLLM's
            kernels could not take smaller batches; an option or dtype that the megakernel, asked for by name, does not
            serve.
        UnsupportedError: a machine or a shape that the megakernel, asked for by name, does not serve.
    """
    rows = -(-config.scheduler_config.max_num_batched_tokens // config.parallel_config.tensor_parallel_size)
    if options.max_tokens is not None and options.max_tokens < rows:
        allowed = f"null, or at least {rows}, the rows that vLLM may schedule on a rank"
        raise ConfigError("max_tokens", options.max_tokens, allowed)
    options = options.model_copy(update={"max_tokens": options.max_tokens or rows})
    if options.executor == "megakernel":
        require_megakernel(partial(obstacle, config, options, num_ranks))
    elif options.executor == "auto":
        executor = automatic_executor(partial(obstacle, config, options, num_ranks), num_ranks, LOGGER)
        options = options.model_copy(update={"executor": executor})
    options = options.model_copy(update={"min_tokens": handover_rows(config, options)})
    if options.executor == "megakernel" and options.gate == "auto" and num_ranks > 1:
        options = options.model_copy(update={"gate": gate_costs(config)})
    return options


def handover_rows(config: VllmConfig, options: MegaFluxConfig) -> int:
    """``min_tokens`` as given; else ``HANDOVER_ROWS``, or 0 where nothing can be handed over, and the log says why.

    Args:
        config: vLLM's configuration.
        options: with the executor that runs.

    Raises:
        ConfigError: a number above 0 was given, and vLLM's kernels could not take smaller batches.
    """
    if options.min_tokens is not None:
        if options.min_tokens:
            check_handover(config, options.executor, options.min_tokens)
        return options.min_tokens
    if options.executor != "megakernel":
        return 0
    try:
        check_handover(config, options.executor, HANDOVER_ROWS)
    except ConfigError as error:
        LOGGER.info("small batches are not handed over to vLLM's kernels: %s", error)
        return 0
    return HANDOVER_ROWS


def check_handover(config: VllmConfig, executor: str, min_tokens: int) -> None:
    """Refuse to hand small batches over where vLLM's kernels could not take them, or must not.

    Args:
        config: vLLM's configuration.
        executor: that runs.
        min_tokens: above 0.

    Raises:
        ConfigError: naming the option or flag.
    """
    from vllm import envs

    parallel = config.parallel_config
    if executor != "megakernel":
        raise ConfigError("min_tokens", min_tokens, f"0 with executor {executor!r}")
    if parallel.data_parallel_size > 1 and parallel.all2all_backend != "allgather_reducescatter":
        raise ConfigError("--all2all-backend", parallel.all2all_backend, "allgather_reducescatter with min_tokens")
    if envs.VLLM_BATCH_INVARIANT:
        raise ConfigError("min_tokens", min_tokens, "0 with VLLM_BATCH_INVARIANT: two kernels would not sum alike")


def gate_costs(config: VllmConfig) -> GateCosts | None:
    """Costs of the model's experts on this machine, said in the log; None if their size is not known yet."""
    intermediate = size_of(config, INTERMEDIATE_SIZES)
    if intermediate is None:
        LOGGER.warning("the gate is open: the configuration does not say how large an expert is")
        return None
    costs, source = costs_here(config.model_config.get_hidden_size(), intermediate)
    LOGGER.info("gate: %s costs %s", source, asdict(costs))
    return costs


def size_of(config: VllmConfig, names: Sequence[str]) -> int | None:
    """The first of these numbers that the model's configuration has; None if it has none, or not one for all layers.

    Some configurations have a list, of a number for each layer.
    """
    sizes = vars(config.model_config.hf_text_config)
    given = next((sizes[name] for name in names if sizes.get(name)), None)
    different = set(given) if isinstance(given, (list, tuple)) else {given}
    (size,) = different if len(different) == 1 else (None,)
    return None if size is None else int(size)


def obstacle(config: VllmConfig, options: MegaFluxConfig, num_ranks: int) -> str | None:
    """Why the megakernel cannot run here, None if it can.

    Raises:
        ConfigError, UnsupportedError: what the model or the options set against it.
    """
    check_megakernel(config, options, num_ranks)
    return machine_obstacle(num_ranks, config.parallel_config.assigned_physical_gpu_ids)


def machine_obstacle(num_ranks: int, device_ids: Sequence[int] | None = None) -> str | None:
    """Why this machine cannot run the megakernel, None if it can; asks the driver, starts no context.

    Args:
        num_ranks: expert-parallel ranks.
        device_ids: the node's GPUs that the ranks get (``--device-ids``); None: the first ones that are visible.
    """
    from vllm.platforms import current_platform as platform

    if not platform.is_cuda():
        return "this machine has no NVIDIA GPU"
    if not platform.is_device_capability_family(90):
        return f"{platform.get_device_name()} is not of the Hopper generation"
    if (reason := language.obstacle(language.installed())) is not None:
        return reason
    if num_ranks > platform.device_count():
        return f"{num_ranks} ranks do not fit the {platform.device_count()} GPUs of this node"
    gpus = device_ids or [platform.device_id_to_physical_device_id(index) for index in range(num_ranks)]
    if num_ranks > 1 and not platform.is_fully_connected(list(gpus[:num_ranks])):
        return "the GPUs are not all connected by NVLink"
    return None


def check_megakernel(config: VllmConfig, options: MegaFluxConfig, num_ranks: int) -> None:
    """Refuse what the megakernel cannot serve, whatever the machine.

    Raises:
        ConfigError: naming the flag or option.
        UnsupportedError: naming a size of the model.
    """
    model = config.model_config
    check_options(options, model.dtype, None if model.enforce_eager else "--enforce-eager")
    intermediate, top_k = size_of(config, INTERMEDIATE_SIZES), size_of(config, TOP_KS)
    if intermediate is not None and top_k is not None:  # else the layer is checked when it is built
        slots, tokens = options.replica_slots if num_ranks > 1 else 0, options.max_tokens or 1
        layer_shape(num_ranks, model.get_num_experts(), slots, model.get_hidden_size(), intermediate, top_k, tokens)


__all__ = [
    "HANDOVER_ROWS",
    "check_handover",
    "check_megakernel",
    "gate_costs",
    "handover_rows",
    "machine_obstacle",
    "obstacle",
    "settle",
    "size_of",
]
