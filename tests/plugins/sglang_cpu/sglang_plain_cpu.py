"""SGLang on any CPU: plain PyTorch, gloo between ranks. For tests and demonstrations, on SGLang 0.5.17 to 0.5.23.

SGLang's own CPU backend needs AMX and kernels that its package for GPUs does not bring. ``SGLANG_PLATFORM=plain_cpu``
chooses this one instead; without the variable, nothing here does anything. Knows nothing of MegaFlux: stock servers and
those with a backend of ours run on it alike.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

NAME = "plain_cpu"


def activate() -> str | None:
    """The platform's class, if it was asked for."""
    return f"{__name__}.PlainCpuPlatform" if os.environ.get("SGLANG_PLATFORM") == NAME else None


def register() -> None:
    """Mend what in SGLang cannot run on a CPU without CUDA."""
    if activate() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    without_pinned_memory()
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register", lambda *args: None, HookType.REPLACE
    )
    group = "sglang.srt.distributed.parallel_state"
    HookRegistry.register(f"{group}.init_model_parallel_group", without_nccl, HookType.BEFORE)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        HookRegistry.register(f"{group}.GroupCoordinator.{name}", collective(f"_{name}"), HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value",
        lambda self: 1,
        HookType.REPLACE,
    )
    HookRegistry.register("sglang.srt.layers.moe.topk.TopK.forward_native", with_padding, HookType.AROUND)
    copy = "memcpy" if int(version("sglang").split(".")[2]) >= 19 else "memcpy_triton"
    HookRegistry.register(f"sglang.srt.layers.dp_attention.{copy}", copy_rows, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
        absorbed_attention,
        HookType.REPLACE,
    )
    HookRegistry.register(
        "sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm._forward_naive", norms_in_pytorch, HookType.REPLACE
    )


def norms_in_pytorch(norms: Any, queries: Any, keys: Any) -> Any:
    """Instead of kernels for MiniMax-M2's norms, which reach over the heads of all attention ranks."""
    import torch

    with torch.compiler.set_stance("force_eager"):  # compiled, the sum over ranks among them fails
        return norms._q_norm(queries.contiguous()), norms._k_norm(keys.contiguous())


def without_pinned_memory() -> None:
    """Let tensors be made where memory cannot be pinned."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def wrapper(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        return wrapper

    for name in ("tensor", "zeros", "empty", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def without_nccl(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before groups are made: gloo alone carries them."""
    return args, kwargs | {"use_pynccl": False, "use_custom_allreduce": False}


def collective(name: str) -> Callable[..., Any]:
    """Instead of a collective that is an operator for CUDA only: what that operator calls.

    The router in PyTorch gives int64 ids where the one on GPUs gives int32, for which SGLang makes its buffers.
    """

    def run(group: Any, output: Any, given: Any) -> Any:
        return getattr(group, name)(output, given.to(output.dtype))

    return run


def copy_rows(output: Any, given: Any, dim: int, offset: Any, size: Any, offset_src: bool) -> None:
    """Instead of a kernel for dense layers of data-parallel ranks: copy ``size`` rows from or to ``offset``."""
    if dim != 0:
        raise NotImplementedError(f"rows along dimension {dim}")
    whole, rows = slice(0, int(size)), slice(int(offset), int(offset) + int(size))
    output[whole if offset_src else rows] = given[rows if offset_src else whole]


def absorbed_attention(registry: type, backend: str) -> Callable[..., Any]:
    """Instead of a backend's choice of how latent attention runs: always on the latents themselves.

    For prompts the choice is a form that hands keys and values to the backend, which reads the cache instead.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda attention, batch: AttnForwardMethod.MLA


def with_padding(original: Callable[..., Any], self: Any, *args: Any, num_token_non_padded: Any = None, **kwargs: Any):
    """Around the router in PyTorch, which cannot mark rows of padding: mark them as the router on GPUs does."""
    import torch

    routed = original(self, *args, **kwargs)
    if num_token_non_padded is None and hasattr(self, "routing_inputs"):  # from 0.5.23 models leave it to the router
        num_token_non_padded, _ = self.routing_inputs()
    if num_token_non_padded is not None:
        rows = torch.arange(routed.topk_ids.shape[0])
        routed.topk_ids[rows >= num_token_non_padded] = -1
    return routed


def __getattr__(name: str) -> Any:
    """The class itself, made when SGLang asks for it: its bases import the engine."""
    if name != "PlainCpuPlatform":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
        """What SGLang asks of a platform."""

        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_mla_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

            class Pool(MLATokenToKVPool):
                def __init__(self, *args: Any, index_head_dim: None = None, **kwargs: Any) -> None:
                    super().__init__(*args, **kwargs)

            return Pool

        def get_paged_allocator_cls(self) -> type:
            from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

            class Allocator(TokenToKVPoolAllocator):
                def __init__(
                    self, size: int, page_size: int, dtype: Any, device: str, kvcache: Any, need_sort: bool
                ) -> None:
                    super().__init__(size, dtype, device, kvcache, need_sort)

            return Allocator

        def get_dispatch_key_name(self) -> str:
            return "native"

        def get_compile_backend(self, mode: str | None = None) -> str:
            return "inductor"

        def get_torch_distributed_backend_str(self) -> str:
            return "gloo"

    return PlainCpuPlatform
