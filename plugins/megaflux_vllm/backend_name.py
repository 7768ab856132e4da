"""The backend's name: ``--moe-backend megaflux`` and ``--kernel-config '{"moe_backend": "megaflux"}'``.

Decides how vLLM learns the name; every other unknown name is still refused by vLLM, with ours among its choices.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

BACKEND = "megaflux"


def accept() -> None:
    """Add the name to the values of ``KernelConfig.moe_backend``.

    The field's type is written down in four places: the alias, the annotation that becomes the command line's choices,
    and the dataclass and pydantic fields that validation is built from.
    """
    import vllm.config.kernel as kernel
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.engine import arg_utils

    if is_accepted():
        return
    backends: Any = Literal[(*get_args(kernel.MoEBackend), BACKEND)]
    config: Any = kernel.KernelConfig
    kernel.MoEBackend = backends
    config.__annotations__["moe_backend"] = backends
    config.__dataclass_fields__["moe_backend"].type = backends
    config.__pydantic_fields__["moe_backend"].annotation = backends
    rebuild_dataclass(config, force=True)
    arg_utils._compute_kwargs.cache_clear()


def is_accepted() -> bool:
    """Whether validation and the command line's choices both know the name."""
    from pydantic import ValidationError
    from vllm.config.kernel import KernelConfig
    from vllm.engine.arg_utils import get_kwargs

    try:
        KernelConfig(moe_backend=BACKEND)
    except ValidationError:
        return False
    return BACKEND in get_kwargs(KernelConfig)["moe_backend"]["choices"]


__all__ = ["BACKEND", "accept", "is_accepted"]
