"""The backend's name: ``--moe-backend megaflux`` and ``--kernel-config '{"moe_backend": "megaflux"}'``.

Decides how vLLM learns the name; every other unknown name is still refused by vLLM, with ours among its choices.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, get_args

BACKEND = "megaflux"


def install(module: ModuleType) -> None:
    """Add the name to the values of ``KernelConfig.moe_backend``.

    The field's type is written down in four places: the alias, the annotation that becomes the command line's choices,
    and the dataclass and pydantic fields that validation is built from.

    Args:
        module: ``vllm.config``; or ``vllm.engine.arg_utils``, which may have read the choices before.
    """
    if is_command_line(module):
        module._compute_kwargs.cache_clear()
        return
    from pydantic.dataclasses import rebuild_dataclass

    config = module.KernelConfig
    backends: Any = Literal[(*get_args(module.kernel.MoEBackend), BACKEND)]
    module.kernel.MoEBackend = backends
    config.__annotations__["moe_backend"] = backends
    config.__dataclass_fields__["moe_backend"].type = backends
    config.__pydantic_fields__["moe_backend"].annotation = backends
    rebuild_dataclass(config, force=True)


def is_installed(module: ModuleType) -> bool:
    """Whether validation, or the choices of the command line, know the name."""
    if is_command_line(module):
        return BACKEND in module.get_kwargs(module.KernelConfig)["moe_backend"]["choices"]
    from pydantic import ValidationError

    try:
        module.KernelConfig(moe_backend=BACKEND)
    except ValidationError:
        return False
    return True


def is_command_line(module: ModuleType) -> bool:
    """Whether this is the module that makes flags of configurations."""
    return module.__name__ == "vllm.engine.arg_utils"


__all__ = ["BACKEND", "install", "is_installed"]
