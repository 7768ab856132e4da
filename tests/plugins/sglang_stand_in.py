"""What the plugin uses of SGLang, for adapter tests where SGLang is not installed.

Each name stands where SGLang 0.5.17 has it and takes what that takes; ``CONTRACT`` lists them, and where SGLang is
installed a test holds the list against the real ones. Nothing of SGLang's behaviour is invented beyond that: what the
plugin does to a real engine is for the tests with servers.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch

CONTRACT = {
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.server_args.ServerArgs.__post_init__": ("self",),
    "sglang.srt.server_args.ServerArgs.get_model_config": ("self",),
    "sglang.srt.layers.moe.utils.get_moe_a2a_backend": (),
    "sglang.srt.layers.moe.ep_moe.layer.get_moe_impl_class": ("quant_config",),
    "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher": ("moe_runner_config",),
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__": (
        *("self", "num_experts", "hidden_size", "intermediate_size", "layer_id", "top_k"),
        *("params_dtype", "prefix", "activation"),
    ),
    "sglang.srt.layers.moe.token_dispatcher.standard.StandardDispatcher.__init__": ("self", "moe_runner_config"),
    "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.create_moe_runner": (
        *("self", "layer", "moe_runner_config"),
    ),
    "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.apply": ("self", "layer", "dispatch_output"),
    "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.process_weights_after_loading": ("self", "layer"),
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk": (
        *("self", "model_path", "load_format"),
    ),
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor": (
        *("self", "named_tensors", "load_format"),
    ),
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_distributed": (
        *("self", "names", "dtypes", "shapes", "group_name", "load_format"),
    ),
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_ipc": (
        *("self", "recv_req"),
    ),
    "sglang.srt.managers.io_struct.GenerateReqInput.regenerate_rid": ("self",),
    "sglang.srt.managers.scheduler.Scheduler.process_batch_result": ("self", "batch", "result"),
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._maybe_collect_routed_experts": ("self", "req"),
    "sglang.srt.model_executor.model_runner.ModelRunner.init_routed_experts_capturer": ("self",),
    "sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end": ("self", "forward_batch"),
    "sglang.srt.utils.common.add_prometheus_middleware": ("app",),
    "sglang.srt.distributed.get_moe_ep_group": (),
    "sglang.srt.runtime_context.get_server_args": (),
    "sglang.srt.model_executor.cuda_graph_config.PhaseConfig": ("backend",),
    "sglang.srt.model_executor.cuda_graph_config.CudaGraphConfig": ("decode", "prefill"),
}

FIRST_WITH: dict[str, tuple[int, int, int]] = {
    "startup_weight_load_mode": (0, 5, 18),
    "enable_unified_cache_external_linker": (0, 5, 20),
    "enable_decoder_swa_bounded_replay": (0, 5, 21),
    "enable_nvidia_megakernel": (0, 5, 23),
    "enable_amd_monokernel": (0, 5, 23),
    "enable_paged_experts": (0, 5, 23),
}
"""Flags that the plugin looks at and that SGLang 0.5.17 has not."""


class HookType(Enum):
    """Kinds of hooks."""

    BEFORE, AFTER, AROUND = "before", "after", "around"


class HookRegistry:
    """Hooks by target, applied once."""

    _hooks: ClassVar[list[tuple[str, Callable[..., Any], HookType]]] = []

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER) -> None:
        cls._hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook, kind in cls._hooks:
            place, _, name = target.rpartition(".")
            try:
                owner = pkgutil.resolve_name(place)
                setattr(owner, name, wrapped(getattr(owner, name), hook, kind))
            except (ImportError, AttributeError):
                continue  # SGLang logs it
        cls._hooks.clear()


def wrapped(original: Callable[..., Any], hook: Callable[..., Any], kind: HookType) -> Callable[..., Any]:
    """``original`` with a hook of this kind."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.BEFORE:
            args, kwargs = hook(*args, **kwargs) or (args, kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        modified = hook(result, *args, **kwargs)
        return result if modified is None else modified

    return wrapper


class A2ABackend(Enum):
    """SGLang's all-to-all backends, some of them."""

    NONE, DEEPEP = "none", "deepep"

    def is_deepep(self) -> bool:
        return self is A2ABackend.DEEPEP


class RunnerBackend(Enum):
    """SGLang's runners, some of them."""

    AUTO, TRITON = "auto", "triton"


@dataclass
class PhaseConfig:
    """How batches of a phase are captured; the name of a way, or ``disabled``."""

    backend: str = "disabled"


@dataclass
class CudaGraphConfig:
    """What is captured, by phase."""

    decode: PhaseConfig
    prefill: PhaseConfig


@dataclass
class ServerArgs:
    """The fields that the plugin reads and that have another default than None or False."""

    model_path: str = ""
    moe_a2a_backend: str = "none"
    moe_runner_backend: str = "auto"
    json_model_override_args: str = "{}"
    tp_size: int = 1
    ep_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False
    device: str = "cpu"
    chunked_prefill_size: int = 2048
    max_prefill_tokens: int = 16384
    max_running_requests: int | None = None
    speculative_algorithm: str | None = None
    served_model_name: str = "tiny"
    enable_metrics: bool = False

    def __post_init__(self) -> None:
        self.model = None

    def get_model_config(self) -> Any:
        return self.model


class UnquantizedFusedMoEMethod:
    """Makes the parameters of a layer and would compute it."""

    with_bias = False

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        self.runner = None

    def process_weights_after_loading(self, layer: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        raise NotImplementedError


class StandardDispatchOutput(NamedTuple):
    """Rows and routes."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any


class StandardCombineInput(NamedTuple):
    """Finished rows."""

    hidden_states: torch.Tensor


class StandardDispatcher:
    """Hands rows on; would translate ids to local ones."""

    def __init__(self, moe_runner_config: Any) -> None:
        self.skip_local_expert_mapping = False

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        if not self.skip_local_expert_mapping:
            raise NotImplementedError
        return StandardDispatchOutput(hidden_states, None, topk_output)

    def combine(self, combine_input: StandardCombineInput) -> torch.Tensor:
        return combine_input.hidden_states


class FusedMoE(torch.nn.Module):
    """Owns the parameters of a layer on one rank of ``get_moe_ep_group``."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        top_k: int | None = None,
        params_dtype: torch.dtype = torch.float32,
        prefix: str = "",
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.layer_name, self.layer_id, self.top_k, self.num_experts = prefix, layer_id, top_k, num_experts
        self.hidden_size, self.intermediate_size_per_partition = hidden_size, intermediate_size
        self.num_fused_shared_experts, self.moe_tp_size, self.reduce_results = 0, 1, False
        self.moe_runner_config = SimpleNamespace(
            activation=activation, is_gated=True, apply_router_weight_on_input=False, no_combine=False
        )
        self.quant_method = UnquantizedFusedMoEMethod()
        own = num_experts // sys.modules["sglang.srt.distributed"].get_moe_ep_group().world_size
        shapes = {
            "w13_weight": (own, 2 * intermediate_size, hidden_size),
            "w2_weight": (own, hidden_size, intermediate_size),
        }
        for name, shape in shapes.items():
            weight = torch.empty(shape, dtype=params_dtype)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        self.quant_method.create_moe_runner(self, self.moe_runner_config)
        create = sys.modules["sglang.srt.layers.moe.fused_moe_triton.layer"].create_moe_dispatcher
        self.dispatcher = create(self.moe_runner_config)

    def forward(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
        dispatched = self.dispatcher.dispatch(hidden_states, topk_output)
        return self.dispatcher.combine(self.quant_method.apply(layer=self, dispatch_output=dispatched))


class WeightUpdater:
    """The four ways of updating weights."""

    def update_weights_from_disk(self, model_path: str, load_format: str) -> tuple[bool, str]:
        return True, model_path

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        raise ValueError("a loader failed")

    def update_weights_from_distributed(
        self, names: Any, dtypes: Any, shapes: Any, group_name: str, load_format: str | None = None
    ) -> tuple[bool, str]:
        return True, group_name

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return True, ""


class GenerateReqInput:
    """A request as the front end has it."""

    def regenerate_rid(self, prefix: str | None = None) -> str:
        return ""


class Scheduler:
    """Gives out results."""

    def process_batch_result(self, batch: Any, result: Any) -> Any:
        return result


class SchedulerWeightUpdaterManager(WeightUpdater):
    """The same, one process-level further up."""


class SchedulerBatchResultProcessor:
    """Collects what a finished request returns."""

    def _maybe_collect_routed_experts(self, req: Any) -> None:
        pass


class ModelRunner:
    """Owns the capturer of routed experts."""

    def init_routed_experts_capturer(self) -> None:
        pass


class BaseTopkCapturer:
    """Captures routed experts."""

    def on_forward_end(self, forward_batch: Any) -> None:
        pass


def add_prometheus_middleware(app: Any) -> None:
    """Answer ``/metrics``."""
    from prometheus_client import CollectorRegistry, make_asgi_app

    app.routes.append(make_asgi_app(registry=CollectorRegistry()))


class Group:
    """An expert-parallel group of one process."""

    world_size, rank_in_group, device_group, cpu_group = 1, 0, None, None


def modules(a2a: Callable[[], Any], server_args: Callable[[], Any], group: Callable[[], Any]) -> dict[str, ModuleType]:
    """The stand-in as modules by name, packages included.

    Args:
        a2a: the backend in use.
        server_args: of the running server.
        group: the expert-parallel group.
    """
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.server_args": {
            "ServerArgs": ServerArgs,
            "MOE_A2A_BACKEND_CHOICES": ["none", "deepep"],
            "MOE_RUNNER_BACKEND_CHOICES": ["auto", "triton"],
        },
        "sglang.srt.layers.moe.utils": {
            "MoeA2ABackend": A2ABackend,
            "MoeRunnerBackend": RunnerBackend,
            "get_moe_a2a_backend": a2a,
        },
        "sglang.srt.layers.moe.ep_moe.layer": {"get_moe_impl_class": lambda quant_config: FusedMoE},
        "sglang.srt.layers.moe.fused_moe_triton.layer": {
            "FusedMoE": FusedMoE,
            "create_moe_dispatcher": lambda moe_runner_config: StandardDispatcher(moe_runner_config),
        },
        "sglang.srt.layers.moe.token_dispatcher.standard": {
            "StandardDispatcher": StandardDispatcher,
            "StandardCombineInput": StandardCombineInput,
            "StandardDispatchOutput": StandardDispatchOutput,
        },
        "sglang.srt.layers.quantization.unquant": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        "sglang.srt.model_executor.model_runner_components.weight_updater": {"WeightUpdater": WeightUpdater},
        "sglang.srt.managers.io_struct": {"GenerateReqInput": GenerateReqInput},
        "sglang.srt.managers.scheduler": {"Scheduler": Scheduler},
        "sglang.srt.managers.scheduler_components.batch_result_processor": {
            "SchedulerBatchResultProcessor": SchedulerBatchResultProcessor
        },
        "sglang.srt.managers.scheduler_components.weight_updater": {
            "SchedulerWeightUpdaterManager": SchedulerWeightUpdaterManager
        },
        "sglang.srt.model_executor.model_runner": {"ModelRunner": ModelRunner},
        "sglang.srt.model_executor.cuda_graph_config": {"CudaGraphConfig": CudaGraphConfig, "PhaseConfig": PhaseConfig},
        "sglang.srt.state_capturer.base": {"BaseTopkCapturer": BaseTopkCapturer},
        "sglang.srt.utils.common": {"add_prometheus_middleware": add_prometheus_middleware},
        "sglang.srt.distributed": {"get_moe_ep_group": group},
        "sglang.srt.runtime_context": {"get_server_args": server_args},
    }
    made: dict[str, ModuleType] = {}
    for name, content in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            module = made.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
            module.__path__ = []  # so that find_spec can look below it
            if depth > 1:
                setattr(made[".".join(parts[: depth - 1])], parts[depth - 1], module)
        vars(made[name]).update(content)
    return made
