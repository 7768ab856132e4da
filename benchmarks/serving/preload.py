"""What every engine needs, imported once, in the process that engines are forked from; starts no CUDA context.

On a cold machine an import of vLLM takes half a minute, and vLLM would import it anew in every process and once more to
look at the model's class.
"""

import vllm.v1.engine.async_llm  # noqa: F401
from vllm import ModelRegistry
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.warmup import kernel_warmup
from vllm.plugins import load_general_plugins

load_general_plugins()
ModelRegistry.register_model("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM)
kernel_warmup._warmup_ll_bf16_router_gemm = lambda: None  # 15 seconds, for routers of other models
