"""What the options leave open, settled: the executor that ``auto`` means, and the rows of the largest batch.

Decides from the server's flags, the model's configuration and the machine, which are the same for all ranks, so that
the launcher and every scheduler come to the same answer.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from typing import Any

from megaflux_kernels import language

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError
from megaflux_serve.executors.automatic import automatic_executor, require_megakernel
from megaflux_serve.executors.limits import check_options, layer_shape
from megaflux_serve.planning.calibration import costs_here
from megaflux_serve.planning.gate import GateCosts
from megaflux_sglang.versions import num_attention_groups

LOGGER = logging.getLogger("sglang.megaflux")
MAX_RUNNING_REQUESTS = 4096
"""SGLang's own limit where ``--max-running-requests`` is not given."""


def settle(server_args: Any, options: MegaFluxConfig) -> MegaFluxConfig:
    """The options with ``executor``, ``max_tokens``, ``min_tokens`` and, for the megakernel, ``gate`` filled in.

    Args:
        server_args: of a server with this backend.
        options: as given.

    Raises:
        ConfigError: a ``max_tokens`` below what SGLang may schedule on a rank; a ``min_tokens`` above 0; an option or
            dtype that the megakernel, asked for by name, does not serve.
        UnsupportedError: a machine or a shape that the megakernel, asked for by name, does not serve.
    """
    rows = rows_a_rank(server_args)
    if options.max_tokens is not None and options.max_tokens < rows:
        allowed = f"null, or at least {rows}, the rows that SGLang may schedule on a rank"
        raise ConfigError("max_tokens", options.max_tokens, allowed)
    if options.min_tokens:
        raise ConfigError("min_tokens", options.min_tokens, "null or 0: in SGLang small batches are not handed over")
    options = options.model_copy(update={"max_tokens": options.max_tokens or rows, "min_tokens": 0})
    if options.executor == "megakernel":
        require_megakernel(partial(obstacle, server_args, options))
    elif options.executor == "auto":
        executor = automatic_executor(partial(obstacle, server_args, options), server_args.tp_size, LOGGER)
        options = options.model_copy(update={"executor": executor})
    if options.executor == "megakernel" and options.gate == "auto" and server_args.tp_size > 1:
        options = options.model_copy(update={"gate": gate_costs(server_args)})
    if options.executor != "megakernel" and uses_graphs(server_args):
        allowed = f"the flag: executor {options.executor!r} reads the routing on the host"
        raise ConfigError("--disable-cuda-graph", False, allowed)
    return options


def rows_a_rank(server_args: Any) -> int:
    """Rows of the largest batch that a rank may be given: a chunk of prompts, or one token of every running request."""
    prompts: int = server_args.chunked_prefill_size or -1
    if prompts < 0:
        prompts = max(server_args.max_prefill_tokens, server_args.get_model_config().context_len)
    requests: int = server_args.max_running_requests or MAX_RUNNING_REQUESTS
    num_ranks: int = server_args.tp_size
    return -(-max(prompts, requests) * num_attention_groups(server_args) // num_ranks)


def gate_costs(server_args: Any) -> GateCosts:
    """Costs of the model's experts on this machine, said in the log."""
    config = server_args.get_model_config().hf_text_config
    costs, source = costs_here(config.hidden_size, expert_size(config))
    LOGGER.info("gate: %s costs %s", source, asdict(costs))
    return costs


def uses_graphs(server_args: Any) -> bool:
    """Whether any batch may be the replay of a captured graph."""
    if server_args.device != "cuda":
        return False
    config = getattr(server_args, "cuda_graph_config", None)  # from 0.5.14
    if config is None:
        return not server_args.disable_cuda_graph
    return any(phase.backend != "disabled" for phase in (config.prefill, config.decode))  # names, not an enumeration


def obstacle(server_args: Any, options: MegaFluxConfig) -> str | None:
    """Why the megakernel cannot run here, None if it can.

    Raises:
        ConfigError, UnsupportedError: what the model or the options set against it.
    """
    check_megakernel(server_args, options)
    return machine_obstacle(server_args)


def machine_obstacle(server_args: Any) -> str | None:
    """Why this machine cannot run the megakernel, None if it can."""
    import torch

    if server_args.device != "cuda" or not torch.cuda.is_available():
        return "this machine has no NVIDIA GPU"
    first, step = server_args.base_gpu_id, server_args.gpu_id_step
    devices = range(first, first + step * server_args.tp_size, step)
    if server_args.nnodes > 1 or devices[-1] >= torch.cuda.device_count():
        return f"its {server_args.tp_size} ranks are not on one node"
    others = [device for device in devices if torch.cuda.get_device_capability(device)[0] != 9]
    if others:
        return f"{torch.cuda.get_device_name(others[0])} is not of the Hopper generation"
    if (reason := language.obstacle(language.installed())) is not None:
        return reason
    if not all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b):
        return "the GPUs cannot all read each other's memory"
    return None


def check_megakernel(server_args: Any, options: MegaFluxConfig) -> None:
    """Refuse what the megakernel cannot serve, whatever the machine.

    Raises:
        ConfigError: naming the flag or option.
        UnsupportedError: naming a size of the model.
    """
    model, num_ranks = server_args.get_model_config(), server_args.tp_size
    check_options(options, model.dtype, "--disable-cuda-graph" if uses_graphs(server_args) else None)
    config = model.hf_text_config
    layer_shape(
        num_ranks,
        num_routed_experts(config),
        options.replica_slots if num_ranks > 1 else 0,
        config.hidden_size,
        expert_size(config),
        config.num_experts_per_tok,
        options.max_tokens or 1,
    )


def num_routed_experts(config: Any) -> int:
    """E of a model's configuration, 0 without routed experts; models have two names for it."""
    return int(getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None) or 0)


def expert_size(config: Any) -> int:
    """I of a model's configuration, whose experts have the size of its layers where they have none of their own."""
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


__all__ = [
    "check_megakernel",
    "expert_size",
    "machine_obstacle",
    "num_routed_experts",
    "obstacle",
    "rows_a_rank",
    "settle",
]
