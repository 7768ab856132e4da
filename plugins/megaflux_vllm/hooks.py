"""What is changed in vLLM, and where: every change waits until vLLM itself has imported the module.

Decides that a change that does not take is an error: of ``register``, or of the import that it waited for. In the range
of releases that ``versions`` allows, every module has the same name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from megaflux_serve.errors import UnsupportedError
from megaflux_vllm import versions
from megaflux_vllm.imports import when_imported


@dataclass(frozen=True)
class Hook:
    """One change of one module.

    Attributes:
        what: the change, in words.
        adapter: our module that makes it, by ``install(module)``, and knows it, by ``is_installed(module)``.
        module: vLLM's module.
    """

    what: str
    adapter: str
    module: str

    def apply(self, module: ModuleType) -> None:
        """Make the change, unless it is made already.

        Raises:
            UnsupportedError: it did not take.
        """
        adapter = importlib.import_module(f"megaflux_vllm.{self.adapter}")
        try:
            if not adapter.is_installed(module):
                adapter.install(module)
            took = adapter.is_installed(module)
        except Exception as error:  # whatever a module of another shape leads to
            raise self.refusal() from error
        if not took:
            raise self.refusal()

    def refusal(self) -> UnsupportedError:
        """That the change did not take."""
        return UnsupportedError(
            f"megaflux on vLLM {versions.engine_version()}",
            f"these hooks did not take: {self.what}",
            "remove other plugins that replace the same parts, or disable this one with VLLM_PLUGINS",
        )

    def is_possible(self) -> bool:
        """Whether this release has the module; imports nothing."""
        package = find_spec("vllm")
        assert package is not None
        assert package.submodule_search_locations is not None
        (root,) = package.submodule_search_locations
        path = Path(root, *self.module.split(".")[1:])
        return path.is_dir() or path.with_suffix(".py").is_file()


ARGUMENTS = "vllm.engine.arg_utils"
EXPERTS = "vllm.model_executor.layers.fused_moe"

# In the order in which they are made; those of one module nest.
HOOKS = (
    Hook("the name of the backend", "backend_name", "vllm.config"),
    Hook("the name of the backend", "backend_name", ARGUMENTS),
    Hook("checks before weights load", "checks", ARGUMENTS),
    Hook("capture of routes", "capture", ARGUMENTS),
    Hook("capture of routes", "capture", "vllm.v1.engine.output_processor"),
    Hook("capture of routes", "capture", "vllm.v1.engine.llm_engine"),
    Hook("capture of routes", "capture", "vllm.v1.engine.async_llm"),
    Hook("capture of routes", "engine_routes", "vllm.v1.core.sched.scheduler"),
    Hook("metrics of layers", "metrics", ARGUMENTS),
    Hook("the layer of routed experts", "layer", f"{EXPERTS}.routed_experts"),
    Hook("the layer of routed experts", "stock_method", f"{EXPERTS}.unquantized_fused_moe_method"),
)


def install() -> None:
    """Have every change made, now or when vLLM imports what it changes. Called again, it looks that they are in place.

    Raises:
        UnsupportedError: a change did not take, or this release lacks the module that it waits for.
    """
    for hook in HOOKS:
        if not hook.is_possible():
            raise hook.refusal()
        when_imported(hook.module, hook.apply)


__all__ = ["HOOKS", "Hook", "install"]
