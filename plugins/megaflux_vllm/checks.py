"""What the backend refuses, as early as vLLM lets it be known: flags first, then model and ranks, then each layer.

Decides which combinations are not served; each refusal names flag or field, its value and what is allowed. The first
two kinds are found in the front-end process, before an engine process starts; the last when a layer is built, before
its weights load.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megaflux_serve.errors import ConfigError, UnsupportedError, renamed
from megaflux_vllm.backend_name import BACKEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    from megaflux_serve.config import MegaFluxConfig

FLAG = f"--moe-backend {BACKEND}"
DTYPES = ("float32", "bfloat16")

OFF = (False, None)
DRAFT_MODELS = "layers of a draft model are not tested"
FIXED_RANKS = "ranks and home experts are fixed when the engine starts"
NOT_IN_0_26 = ("enable_fault_tolerance",)
# EngineArgs field: (values that are served, why others are not, what to do instead)
SERVED_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "enable_eplb": (
        OFF,
        "vLLM would move experts that this backend replicates",
        "drop it: replicas balance every batch",
    ),
    "enable_elastic_ep": (OFF, FIXED_RANKS, "drop it"),
    "enable_fault_tolerance": (OFF, FIXED_RANKS, "drop it"),
    "enable_dbo": (OFF, "the exchanges of two half batches would interleave", "drop it"),
    "ubatch_size": ((0, 1), "the exchanges of parts of a batch would interleave", "drop it"),
    "enable_lora": (OFF, "adapters of routed experts are not computed", "merge the adapter into the checkpoint"),
    "enable_sleep_mode": (OFF, "weights and replicas lie in memory that other ranks map", "drop it"),
    "cpu_offload_gb": ((0,), "weights lie in memory that other ranks map", "drop it"),
    "offload_group_size": ((0,), "weights lie in memory that other ranks map", "drop it"),
    "quantization": (OFF, f"experts are computed in {' or '.join(DTYPES)}", "serve a checkpoint that is not quantized"),
    "speculative_config": (OFF, DRAFT_MODELS, "drop it"),
    "spec_method": (OFF, DRAFT_MODELS, "drop it"),
    "spec_model": (OFF, DRAFT_MODELS, "drop it"),
    "spec_tokens": (OFF, DRAFT_MODELS, "drop it"),
    "pipeline_parallel_size": ((1,), "pipeline stages are not tested", "use data or tensor parallelism"),
    "prefill_context_parallel_size": ((1,), "rows split by context are not tested", "use data or tensor parallelism"),
}


def install(module: ModuleType) -> None:
    """Run the checks around ``EngineArgs.create_engine_config``, where ``vllm serve`` and ``LLM`` both start."""
    create = module.EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if str(self.moe_backend).lower() == BACKEND or self.kernel_config.moe_backend == BACKEND:
            check_arguments(self)
        config = create(self, *args, **kwargs)
        if config.kernel_config.moe_backend == BACKEND:
            options = check_config(config).model_dump(mode="json", exclude_unset=True)
            config.additional_config = {**config.additional_config, BACKEND: options}
        return config

    create_engine_config.checked_by_megaflux = True  # type: ignore[attr-defined]
    module.EngineArgs.create_engine_config = create_engine_config


def is_installed(module: ModuleType) -> bool:
    """Whether ``create_engine_config`` runs the checks."""
    return hasattr(module.EngineArgs.create_engine_config, "checked_by_megaflux")


def megaflux_config(additional_config: Any) -> MegaFluxConfig:
    """The options under ``megaflux`` in ``--additional-config``; none is all defaults.

    Raises:
        ConfigError: naming the option as the user wrote it.
    """
    from megaflux_serve.config import MegaFluxConfig

    options = additional_config.get(BACKEND, {}) if isinstance(additional_config, dict) else {}
    with named_as_written():
        return MegaFluxConfig.parse(options)


def named_as_written() -> AbstractContextManager[None]:
    """Have a ``ConfigError`` of the core name its option as it stands on vLLM's command line."""
    return renamed(_as_written)


def _as_written(field: str) -> str:
    if field.startswith("--"):
        return field
    path = BACKEND if field == BACKEND else f"{BACKEND}.{field}"
    return f"--additional-config {path}"


def check_arguments(args: EngineArgs) -> None:
    """Refuse flags, before vLLM reads the model.

    Raises:
        ConfigError: an option of ours with a value that is not allowed.
        UnsupportedError: a flag of vLLM that the backend does not serve.
    """
    megaflux_config(args.additional_config)
    for field, (served, reason, instead) in SERVED_ARGUMENTS.items():
        value = getattr(args, field, *([None] if field in NOT_IN_0_26 else []))
        if value not in served:
            flag = f"--{field.replace('_', '-')}"
            raise UnsupportedError(flag if value is True else f"{flag} {value}", f"with {FLAG}, {reason}", instead)


def check_config(config: VllmConfig) -> MegaFluxConfig:
    """Refuse what the model's configuration and the ranks decide, in the front end.

    Returns:
        The options, with what they left open settled for all ranks (``choice.settle``).

    Raises:
        ConfigError: ranks that do not divide the experts, more replica slots than a rank can use.
        UnsupportedError: a dense or quantized model, one that brings a draft model, a dtype, experts that are not
            spread by expert parallelism.
    """
    from megaflux_vllm.choice import settle

    model, parallel = config.model_config, config.parallel_config
    options = megaflux_config(config.additional_config)
    num_experts = model.get_num_experts()
    if not num_experts:
        raise UnsupportedError(FLAG, f"model {model.model} has no routed experts", "drop the flag")
    if config.quant_config is not None:
        method = config.quant_config.get_name()
        raise UnsupportedError(
            f"quantization {method}",
            f"with {FLAG}, experts are computed in {' or '.join(DTYPES)}",
            "serve a checkpoint that is not quantized",
        )
    if config.speculative_config is not None:  # the flags are off, but a checkpoint may turn it on
        raise UnsupportedError("a checkpoint with a draft model", f"with {FLAG}, {DRAFT_MODELS}", "serve its target")
    if str(model.dtype).removeprefix("torch.") not in DTYPES:
        raise ConfigError("--dtype", str(model.dtype).removeprefix("torch."), f"{' or '.join(DTYPES)} with {FLAG}")

    num_ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if num_ranks > 1 and not parallel.enable_expert_parallel:
        raise ConfigError("--enable-expert-parallel", False, f"{FLAG} on {num_ranks} ranks needs the flag")
    if num_experts % num_ranks:
        raise ConfigError(
            "--tensor-parallel-size times --data-parallel-size",
            num_ranks,
            f"a divisor of the model's {num_experts} experts",
        )
    with named_as_written():
        options.slot_layout(num_experts, num_ranks)
        options = settle(config, options, num_ranks)
    if options.executor != "megakernel" and not model.enforce_eager:
        raise ConfigError(
            "--enforce-eager",
            False,
            f"executor {options.executor!r} reads the routing on the host, so it needs the flag",
        )
    return options


def check_layer(name: str, moe: FusedMoEConfig, quantized_as: str | None, weights_on_input: bool) -> None:
    """Refuse a layer, when it is built.

    Args:
        name: the layer's name in the model.
        moe: vLLM's description of the layer.
        quantized_as: name of the quantization, None for none.
        weights_on_input: whether router weights multiply an expert's input instead of its output.

    Raises:
        UnsupportedError: naming the layer and the property.
    """
    parallel = moe.moe_parallel_config
    properties = {
        f"quantization {quantized_as}": quantized_as is not None,
        f"activation {moe.activation.value}": moe.activation.value != "silu",
        "a clamped SwiGLU": any(v is not None for v in (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)),
        "expert biases": moe.has_bias,
        "LoRA adapters": moe.is_lora_enabled,
        f"dtype {moe.in_dtype}": str(moe.in_dtype).removeprefix("torch.") not in DTYPES,
        "router weights on the input": weights_on_input,
        "redundant or fused shared experts": moe.num_experts != moe.num_logical_experts,
        "EPLB": parallel.enable_eplb,
        "tensor-parallel experts": parallel.tp_size > 1,
        "prefill context parallelism": parallel.pcp_size > 1,
        "a reduction that the model does itself": moe.skip_final_all_reduce and parallel.ep_size > 1,
    }
    for what, asked in properties.items():
        if asked:
            raise UnsupportedError(
                f"{FLAG}, layer {name}", f"{what} is not served", "use another --moe-backend for this model"
            )


__all__ = [
    "check_arguments",
    "check_config",
    "check_layer",
    "install",
    "is_installed",
    "megaflux_config",
    "named_as_written",
]
