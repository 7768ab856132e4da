"""The engines that are compared, as arguments of vLLM.

Decides parallelism, options and sizes of every backend; all of them serve the same model with the same budgets.

* ``stock``: vLLM with data-parallel attention and expert parallelism, as the variants of ours, and the kernels it picks
  for this machine. On Hopper that is Triton's, which vLLM puts before FlashInfer's there.
* ``stock-tp``: vLLM with tensor parallelism, where every rank computes a part of every expert and skew costs nothing.
* ``fixed``: ours without replica slots; ``staged``: replicas are copied before the layer; ``pipelined``: while it
  computes, every batch anew; ``sticky``: copies stay from batch to batch. Where decode is compared, each says who
  computes its small batches (``min_tokens``): ``staged`` hands them to vLLM's own kernels, the others compute them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.models import ServedModel

BACKENDS = ("stock", "stock-tp", "fixed", "staged", "pipelined", "sticky")

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # NVLink multicast stays off: not every host allows it, and every backend shall have the same transport.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles itself at the first start; greedy answers do not need it
}
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

HANDS_OVER, MIN_TOKENS = "staged", 256
"""The backend that hands small batches over, and from how many rows of a rank it computes itself."""

BUDGET = "benchmark_chunk"
"""The extra argument of a request that carries the budget of a step to ``scheduler.BudgetScheduler``."""

CAPTURED_BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
"""Sizes of decode batches that get a CUDA graph; fewer than vLLM's default, so that engines start sooner."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine to start.

    Attributes:
        name: the backend.
        arguments: of ``vllm.AsyncEngineArgs``.
        log: file for what its processes print.
        ranks: data-parallel ranks, over which requests are dealt in turn.
        environment: set before vLLM is imported.
    """

    name: str
    arguments: dict[str, Any]
    log: Path
    ranks: int = 1
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))


@dataclass(frozen=True)
class Sizes:
    """Limits of every engine of a run.

    Attributes:
        max_batch_tokens: the largest chunk budget.
        max_requests: running at a time.
        kv_cache_tokens: a rank.
        is_compiled: vLLM's default mode, with torch.compile, which makes a start half a minute longer. Otherwise layers
            run as vLLM's eager mode runs them, and batches of decode in CUDA graphs all the same.
        is_cpu: dry run on a CPU with float32, where our layer is the staged executor of processes.
        num_ranks: processes with a GPU each, over which data and experts, or tensors, are spread.
    """

    max_batch_tokens: int = 32768
    max_requests: int = 128
    kv_cache_tokens: int = 131072
    is_compiled: bool = False
    is_cpu: bool = False
    num_ranks: int = 2


def engine_spec(
    backend: str, model: ServedModel, folder: Path, logs: Path, sizes: Sizes, *, says_min_tokens: bool = True
) -> EngineSpec:
    """The engine of a backend.

    Args:
        backend: one of ``BACKENDS``.
        model: to serve.
        folder: of its configuration.
        logs: where the engine's log goes.
        sizes: limits.
        says_min_tokens: whether variants of ours say who computes small batches; otherwise the plugin decides, as it
            does for users.
    """
    common: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "megaflux_benchmark",
        "worker_extension_cls": "benchmarks.serving.worker.BenchmarkWorker",
        "scheduler_cls": "benchmarks.serving.scheduler.BudgetScheduler",
        "max_model_len": model.max_len,
        "max_num_seqs": sizes.max_requests,
        "max_num_batched_tokens": sizes.max_batch_tokens,
        "enable_prefix_caching": False,
    }
    if sizes.is_cpu:
        common |= {"dtype": "float32", "enforce_eager": True}
    else:
        common |= {
            "kv_cache_memory_bytes": sizes.kv_cache_tokens * model.kv_bytes_per_token,
            "gpu_memory_utilization": 0.05,  # engines share the device; the line above decides
            "compilation_config": compilation(sizes),
        }
    spread: dict[str, Any] = {"data_parallel_size": sizes.num_ranks, "enable_expert_parallel": True}
    if backend.startswith("stock"):
        # Stock vLLM cannot spread experts over CPU processes.
        one_process: dict[str, Any] = {}
        arguments = one_process if sizes.is_cpu else spread
        if backend == "stock-tp":
            arguments = {"tensor_parallel_size": sizes.num_ranks}
    else:
        options = megaflux_options(backend, model, sizes.num_ranks) | megaflux_limits(sizes)
        if says_min_tokens and not sizes.is_cpu:
            options["min_tokens"] = MIN_TOKENS if backend == HANDS_OVER else 0
        arguments = spread | {"moe_backend": "megaflux", "additional_config": {"megaflux": options}}
    environment = ENVIRONMENT | (CPU_ENVIRONMENT if sizes.is_cpu else {})
    ranks = int(arguments.get("data_parallel_size", 1))
    return EngineSpec(backend, common | arguments, logs / f"{model.name}-{backend}.log", ranks, environment)


def compilation(sizes: Sizes) -> dict[str, Any]:
    """What vLLM compiles and captures; FlashInfer's fused all-reduce, which would use NVLink multicast, stays off."""
    captured = {"cudagraph_capture_sizes": [size for size in CAPTURED_BATCHES if size <= sizes.max_requests]}
    if sizes.is_compiled:
        return captured | {"pass_config": {"fuse_allreduce_rms": False}}
    return captured | {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def megaflux_options(backend: str, model: ServedModel, num_ranks: int) -> dict[str, Any]:
    """Our options by variant; a replica slot for every four home experts, the paper's spare capacity."""
    if backend == "fixed":
        return {"replica_slots": 0}
    options: dict[str, Any] = {"replica_slots": model.experts // num_ranks // 4, "sticky": backend == "sticky"}
    return options | ({"transfer": "staged"} if backend == "staged" else {})


def megaflux_limits(sizes: Sizes) -> dict[str, Any]:
    """Our options by machine."""
    if sizes.is_cpu:
        return {"executor": "staged", "block_rows": 16}
    return {"executor": "megakernel", "max_tokens": sizes.max_batch_tokens}
