"""What the backend refuses, as early as SGLang lets it be known: flags and model first, then each layer.

Decides which combinations are not served; each refusal names flag or field, its value and what is allowed. The first
kind is found when the launcher has parsed its flags, before a scheduler process starts; the last when a layer is built,
before its weights load.
"""

from __future__ import annotations

from typing import Any

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_sglang import versions
from megaflux_sglang.backend import FLAGS, NAME
from megaflux_sglang.choice import num_routed_experts, settle
from megaflux_sglang.options import megaflux_config, named_as_written

DTYPES = ("float32", "bfloat16")
# Model classes that, with a backend of DeepEP's kind, hand a rank its own rows and take them back finished: no second
# reduction, shared experts whole and added once, the factor on the routed part applied by the model, idle ranks called.
# A test serves each of them. Others reduce finished rows once more, without an error, or fail in other ways.
ARCHITECTURES = (
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "MiniMaxM2ForCausalLM",
)

OFF = (False, None)
# ServerArgs field: (values that are served, why others are not, what to do instead). A release without a field has not
# the feature.
SERVED_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "enable_two_batch_overlap": (OFF, "the exchanges of two half batches would interleave", "drop it"),
    "enable_single_batch_overlap": (OFF, "its hooks into dispatch and combine are not run", "drop it"),
    "enable_eplb": (OFF, "SGLang would move experts that this backend replicates", "drop it: replicas balance batches"),
    "ep_num_redundant_experts": ((0,), "replicas are this backend's own", "use the option replica_slots"),
    "init_expert_location": (("trivial",), "expert e lives on rank e // (E/P)", "drop it"),
    "elastic_ep_backend": (OFF, "ranks and home experts are fixed when the engine starts", "drop it"),
    "enable_waterfill": (OFF, "shared experts are not computed as routed ones", "drop it"),
    "enforce_shared_experts_fusion": (OFF, "shared experts are not computed as routed ones", "drop it"),
    "dwdp_size": ((1,), "weights would be fetched by another scheme", "drop it"),
    "moe_dp_size": ((1,), "every expert has one home", "drop it"),
    "attn_cp_size": ((1,), "rows split by context are not tested", "use data or tensor parallelism"),
    "dcp_size": ((1,), "rows split by context are not tested", "use data or tensor parallelism"),
    "pp_size": ((1,), "pipeline stages are not tested", "use data or tensor parallelism"),
    "speculative_algorithm": (OFF, "layers of a draft model are not tested", "drop it"),
    "enable_pdmux": (OFF, "two batches would be computed at once in one workspace", "drop it"),
    "enable_torch_compile": (OFF, "a compiled model around the layer is not tested", "drop it"),
    "enable_nvidia_megakernel": (OFF, "it computes steps in its own way, experts and all", "drop it"),
    "enable_amd_monokernel": (OFF, "it computes steps in its own way, experts and all", "drop it"),
    "enable_lora": (OFF, "adapters of routed experts are not computed", "merge the adapter into the checkpoint"),
    "lora_paths": ((None,), "adapters of routed experts are not computed", "merge the adapter into the checkpoint"),
    "quantization": (OFF, f"experts are computed in {' or '.join(DTYPES)}", "serve a checkpoint that is not quantized"),
    "kt_weight_path": (OFF, "experts on the CPU are not served", "drop it"),
    "cpu_offload_gb": ((0,), "expert weights have to stay where peers can read them", "drop it"),
    "offload_group_size": ((-1,), "expert weights have to stay where peers can read them", "drop it"),
    "enable_paged_experts": (OFF, "expert weights have to stay where peers can read them", "drop it"),
    "enable_memory_saver": (OFF, "expert weights have to stay where peers can read them", "drop it"),
    "weight_cache_mode": (("off",), "expert weights would be shared with another process", "drop it"),
    "startup_weight_load_mode": (("serial",), "weights would be written after replicas were made of them", "drop it"),
    "model_impl": (("auto", "sglang"), "other implementations bring experts of their own", "drop it"),
}


def check_server_args(result: None, record: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang has resolved a ``ServerArgs``, in the launcher.

    Raises:
        ConfigError: a value that is not allowed, of a flag or of an option of ours.
        UnsupportedError: a flag or model of SGLang's that the backend does not serve.
    """
    server_args = versions.resolved(record)
    chosen = [server_args.moe_a2a_backend == NAME, server_args.moe_runner_backend == NAME]
    if not any(chosen):
        return
    if not all(chosen):
        flag = "--moe-runner-backend" if chosen[0] else "--moe-a2a-backend"
        value = server_args.moe_runner_backend if chosen[0] else server_args.moe_a2a_backend
        raise ConfigError(flag, value, f"{NAME}: one flag needs the other")
    options = megaflux_config(server_args)
    check_arguments(server_args)
    check_model(server_args, options)
    with named_as_written():
        settle(server_args, options)


def check_arguments(server_args: Any) -> None:
    """Refuse flags by the table above, and ranks over which experts would not be spread.

    Raises:
        ConfigError, UnsupportedError: naming the flag.
    """
    for field, (served, reason, instead) in SERVED_ARGUMENTS.items():
        value = getattr(server_args, field, served[0])
        if value not in served:
            flag = f"--{field.replace('_', '-')}"
            raise UnsupportedError(flag if value is True else f"{flag} {value}", f"with {FLAGS}, {reason}", instead)
    if server_args.tp_size < 2:  # there is no peer to help, and SGLang 0.5.16 and 0.5.17 fail on such a server
        raise ConfigError("--tp-size", server_args.tp_size, f"2 or more with {FLAGS}")
    if server_args.ep_size != server_args.tp_size:
        raise ConfigError("--ep-size", server_args.ep_size, f"{server_args.tp_size}, as --tp-size, with {FLAGS}")


def check_model(server_args: Any, options: MegaFluxConfig) -> None:
    """Refuse what the model's configuration decides.

    Raises:
        ConfigError: a dtype, ranks that do not divide the experts, more replica slots than a rank can use.
        UnsupportedError: a model without routed experts, or of a class that is not known to work.
    """
    model = server_args.get_model_config()
    num_experts = num_routed_experts(model.hf_text_config)
    architecture = model.hf_config.architectures[0]
    if num_experts == 0 or architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{FLAGS}, model class {architecture}",
            "it is not known to leave dispatch, combine and reduction to the backend",
            f"serve one of {', '.join(ARCHITECTURES)}, or use other backends",
        )
    if model.quantization is not None:
        raise UnsupportedError(
            f"quantization {model.quantization}",
            f"with {FLAGS}, experts are computed in {' or '.join(DTYPES)}",
            "serve a checkpoint that is not quantized",
        )
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError("--dtype", dtype, f"{' or '.join(DTYPES)} with {FLAGS}")
    if num_experts % server_args.tp_size:
        raise ConfigError("--tp-size", server_args.tp_size, f"a divisor of the model's {num_experts} experts")
    with named_as_written():
        options.slot_layout(num_experts, server_args.tp_size)


def check_layer(layer: Any) -> None:
    """Refuse a layer, when it is built.

    Args:
        layer: SGLang's layer of routed experts, its parameters made and not yet loaded.

    Raises:
        UnsupportedError: naming the layer and the property.
    """
    config, method = layer.moe_runner_config, type(layer.quant_method).__name__
    properties = {
        f"method {method}": method != "UnquantizedFusedMoEMethod",
        f"activation {config.activation}": config.activation != "silu",
        "experts without a gate": not getattr(config, "is_gated", True),
        "a clamped or scaled SwiGLU": any(
            getattr(config, name, None) is not None
            for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
        ),
        "expert biases": layer.quant_method.with_bias,
        f"dtype {layer.w13_weight.dtype}": str(layer.w13_weight.dtype).removeprefix("torch.") not in DTYPES,
        "router weights on the input": config.apply_router_weight_on_input,
        "results before combine": config.no_combine,
        "fused shared experts": layer.num_fused_shared_experts > 0,
        "tensor-parallel experts": layer.moe_tp_size > 1,
        "a reduction that the layer does itself": layer.reduce_results,
    }
    for what, asked in properties.items():
        if asked:
            raise UnsupportedError(
                f"{FLAGS}, layer {layer.layer_id}", f"{what} is not served", "use other backends for this model"
            )


def hooks() -> tuple[versions.Hook, ...]:
    """The hook, where this release resolves arguments."""
    return ((f"sglang.srt.server_args.ServerArgs.{versions.resolving_method()}", check_server_args, "after"),)


__all__ = ["ARCHITECTURES", "check_arguments", "check_layer", "check_model", "check_server_args", "hooks"]
