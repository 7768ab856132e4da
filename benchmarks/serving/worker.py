"""What a benchmark adds to vLLM's worker processes: random weights, forced routes, and what they measured.

Decides weights and routes, the same for every backend and every way to spread the model over ranks. It enters through
vLLM's own seams, a load format and a worker extension, and is never in the product's path:

    --load-format megaflux_benchmark --worker-extension-cls benchmarks.serving.worker.BenchmarkWorker

Routes are forced in batches that run outside CUDA graphs, which are those of prefill; a captured batch, one of decode,
keeps the model's own router. Routing weights are the softmax of the model's own logits over the forced experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import get_world_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from benchmarks.serving.weights import checkpoint

LOAD_FORMAT = "megaflux_benchmark"


@register_model_loader(LOAD_FORMAT)
class RandomWeights(BaseModelLoader):
    """Gives a model the weights of a checkpoint that was never written, and hooks its routers.

    The model loads them as it loads any checkpoint, so each rank keeps what belongs to it.
    """

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        device = next(model.parameters()).device
        model.load_weights(checkpoint(model_config.hf_text_config, model_config.dtype, device))
        model.forced_routes = ForcedRoutes(model)


class ForcedRoutes:
    """Replaces what the routers of a model choose, while a table is set.

    Args:
        model: whose routers are hooked for good; without a table they choose as before.

    Attributes:
        table: int16 [layers, vocabulary, k] on the model's device, or None.
        counts: int64 [layers, E] assignments by expert since counting began, or None.
    """

    def __init__(self, model: nn.Module) -> None:
        self.table: Tensor | None = None
        self.counts: Tensor | None = None
        self.input_ids: Tensor | None = None
        self._device = next(model.parameters()).device
        modules = [module for module in model.modules() if isinstance(getattr(module, "router", None), BaseRouter)]
        self.num_layers = len(modules)
        model.register_forward_pre_hook(self._remember_tokens, with_kwargs=True)
        for layer, module in enumerate(modules):
            self._hook(layer, module.router)

    def force(self, path: Path | None, is_counting: bool) -> None:
        """Take the table of a ``.npy`` file, or let the routers choose; count from zero or not at all.

        Raises:
            ValueError: a table for another number of layers.
        """
        self.table = self.counts = None
        if path is None:
            return
        table = torch.from_numpy(np.load(path)).to(self._device)
        if len(table) != self.num_layers:
            raise ValueError(f"{path} has {len(table)} layers; this model has {self.num_layers} hooked routers")
        self.table = table
        if is_counting:
            self.counts = torch.zeros(self.num_layers, self._num_experts, dtype=torch.int64, device=self._device)

    def _remember_tokens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.input_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

    def _hook(self, layer: int, router: Any) -> None:
        compute: Callable[..., tuple[Tensor, Tensor]] = router._compute_routing
        self._num_experts = router.global_num_experts

        def compute_routing(hidden: Tensor, logits: Tensor, dtype: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if self.table is None or is_dummy_batch():
                return compute(hidden, logits, dtype, **kwargs)
            return self._route(layer, logits, dtype)

        router._compute_routing = compute_routing

    def _route(self, layer: int, logits: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        tokens, table = self.input_ids, self.table
        if tokens is None or table is None or len(tokens) != len(logits):
            raise ValueError(f"{len(logits)} rows to route, for {tokens if tokens is None else len(tokens)} token ids")
        ids = table[layer].index_select(0, tokens).long()
        if self.counts is not None:
            flat = ids.flatten()
            self.counts[layer].scatter_add_(0, flat, torch.ones_like(flat))
        weights = logits.gather(1, ids).float().softmax(dim=1)
        return weights, ids.to(dtype or torch.int32)


def is_dummy_batch() -> bool:
    """Whether this forward is one that vLLM makes up, for a rank that has no requests; it has no attention."""
    return get_forward_context().attn_metadata is None


class BenchmarkWorker:
    """Methods that vLLM gives its workers; ``AsyncLLM.collective_rpc`` calls them on every rank at once."""

    def benchmark_force_routes(self: Any, path: str | None, is_counting: bool = False) -> None:
        """``ForcedRoutes.force``."""
        self.get_model().forced_routes.force(None if path is None else Path(path), is_counting)

    def benchmark_counts(self: Any) -> list[list[list[int]]]:
        """[ranks, layers, E]: assignments by expert that each rank has routed since counting began."""
        counts = self.get_model().forced_routes.counts
        return _from_all_ranks(counts.tolist())

    def benchmark_memory(self: Any) -> list[dict[str, int]]:
        """Bytes a rank: torch's allocated and reserved, of the whole device in use, and of the process's memory."""
        memory = {"process": _resident_bytes()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            memory |= {
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "device": total - free,
            }
        return _from_all_ranks(memory)


def _resident_bytes() -> int:
    """Resident memory of this process, of which the kernel keeps pages (statm's second field)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _from_all_ranks(value: Any) -> list[Any]:
    """Everybody's value, by rank: vLLM hands back only one engine's answer."""
    group = get_world_group()
    values = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values


__all__ = ["LOAD_FORMAT", "BenchmarkWorker", "ForcedRoutes", "RandomWeights"]
