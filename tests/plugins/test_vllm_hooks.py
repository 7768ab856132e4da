"""The hooks of the vLLM plugin: ``register`` imports nothing of vLLM, and every hook takes when its module is imported.

What happens at imports is looked at in processes of their own, where nothing is imported yet.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from megaflux_vllm import hooks, imports
from megaflux_vllm.hooks import HOOKS, Hook

from megaflux_serve.errors import UnsupportedError

Source = Callable[[str], str]


def run(script: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_registering_imports_nothing_of_vllm_and_no_adapter() -> None:
    script = """
        import sys, megaflux_vllm
        megaflux_vllm.register()
        heavy = ("vllm", "torch", "numpy", "pydantic", "prometheus_client")
        print(*(name for name in sys.modules if name.split(".")[0] in heavy))
        print(*sorted(name for name in sys.modules if name.startswith("megaflux_vllm.")))
    """
    assert run(script) == "megaflux_vllm.hooks megaflux_vllm.imports megaflux_vllm.versions"


def test_where_vllm_is_imported_registering_adds_none_of_its_modules_and_little_of_ours() -> None:
    script = """
        import sys, vllm.engine.arg_utils, megaflux_vllm
        before = set(sys.modules)
        megaflux_vllm.register()
        added = [name for name in sys.modules if name not in before and name.startswith(("vllm", "megaflux"))]
        print(*sorted(added))
    """
    adapters = ("backend_name", "capture", "checks", "hooks", "imports", "metrics", "versions")
    own = [f"megaflux_vllm.{name}" for name in adapters]
    assert run(script).splitlines()[-1].split() == ["megaflux_serve", "megaflux_serve.errors", *own]


def test_every_hook_takes_when_its_module_is_imported_later() -> None:
    script = """
        import importlib, sys, megaflux_vllm
        megaflux_vllm.register()
        for hook in megaflux_vllm.hooks.HOOKS:
            module = importlib.import_module(hook.module)
            print(sys.modules[f"megaflux_vllm.{hook.adapter}"].is_installed(module))
        from vllm.config.kernel import KernelConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.custom_op import op_registry_oot
        print(KernelConfig(moe_backend="megaflux").moe_backend)
        print(EngineArgs.create_engine_config.checked_by_megaflux)
        print(*(op_registry_oot[name].__name__ for name in ("RoutedExperts", "UnquantizedFusedMoEMethod")))
    """
    lines = ["True"] * len(HOOKS) + ["megaflux", "True", "MegaFluxRoutedExperts StockMethod"]
    assert run(script).splitlines()[-len(lines) :] == lines


def test_names_taken_from_a_module_before_see_the_hook() -> None:
    script = """
        from vllm.config import KernelConfig
        from vllm.engine.arg_utils import EngineArgs, get_kwargs
        from vllm.v1.engine.output_processor import RequestState
        assert "megaflux" not in get_kwargs(KernelConfig)["moe_backend"]["choices"]  # remembered by vLLM
        import megaflux_vllm
        megaflux_vllm.register()
        print("megaflux" in get_kwargs(KernelConfig)["moe_backend"]["choices"])
        print(KernelConfig(moe_backend="megaflux").moe_backend)
        print(EngineArgs.create_engine_config.checked_by_megaflux, EngineArgs.create_engine_config.names_a_folder)
        print(RequestState._new_completion_output.captured_by_megaflux)
    """
    assert run(script).splitlines()[-4:] == ["True", "megaflux", "True True", "True"]


def test_an_import_whose_module_cannot_be_hooked_is_an_error_and_stays_one() -> None:
    script = """
        import megaflux_vllm
        from megaflux_vllm import capture
        capture.install = lambda module: None
        megaflux_vllm.register()
        for _ in range(2):
            try:
                import vllm.v1.engine.output_processor
            except Exception as error:
                print(type(error).__name__, str(error).replace("\\n", " "))
    """
    for line in run(script).splitlines()[-2:]:
        assert line.startswith("UnsupportedError megaflux on vLLM")
        assert "these hooks did not take: capture of routes" in line


def test_a_module_of_another_shape_is_an_error_that_names_the_hook() -> None:
    changed = ModuleType("vllm.engine.arg_utils")  # has no EngineArgs
    for hook in HOOKS:
        if hook.module == changed.__name__:
            with pytest.raises(UnsupportedError, match=f"these hooks did not take: {hook.what}"):
                hook.apply(changed)


def test_a_release_without_a_hooked_module_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Hook("metrics of layers", "metrics", "vllm.engine.not_there")
    monkeypatch.setattr(hooks, "HOOKS", (moved,))
    with pytest.raises(UnsupportedError, match="these hooks did not take: metrics of layers"):
        hooks.install()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """Makes modules of this text, whose names it gives; they and what waits for them are forgotten afterwards."""
    names: list[str] = []

    def make(text: str) -> str:
        names.append(f"waited_for_{tmp_path.name}_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return names[-1]

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in names:
        sys.modules.pop(name, None)
        imports._waiting.pop(name, None)


def test_a_function_waits_for_the_import_and_sees_the_whole_module(source: Source) -> None:
    name, seen = source("first = 1\nlast = 2"), []
    imports.when_imported(name, lambda module: seen.append(module.last))
    assert importlib.util.find_spec(name) is not None
    assert seen == []
    module = importlib.import_module(name)
    importlib.import_module(name)
    assert seen == [2]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    importlib.reload(module)  # defines everything anew
    assert seen == [2, 2]


def test_a_module_that_is_imported_is_given_at_once_and_a_function_waits_once(source: Source) -> None:
    name, seen = source("value = 3"), []
    module = importlib.import_module(name)
    function = seen.append
    imports.when_imported(name, function)
    imports.when_imported(name, function)
    assert seen == [module, module]
    importlib.reload(module)
    assert len(seen) == 3


def test_functions_are_called_in_the_order_in_which_they_came(source: Source) -> None:
    name, seen = source(""), []
    for number in range(3):
        imports.when_imported(name, lambda module, number=number: seen.append(number))
    importlib.import_module(name)
    assert seen == [0, 1, 2]


def test_an_error_of_a_function_is_an_error_of_every_import(source: Source) -> None:
    name = source("")

    def refuse(module: ModuleType) -> None:
        raise UnsupportedError("hook", "does not take", "do without")

    imports.when_imported(name, refuse)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="does not take"):
            importlib.import_module(name)
        assert name not in sys.modules


def test_a_module_that_another_thread_is_importing_is_waited_for(source: Source) -> None:
    name = source("""
        import time
        time.sleep(0.5)
        value = 4
    """)
    seen: list[int] = []
    thread = threading.Thread(target=importlib.import_module, args=(name,))
    thread.start()
    while name not in sys.modules:
        pass
    imports.when_imported(name, lambda module: seen.append(module.value))
    thread.join()
    assert seen == [4]


def test_a_module_that_does_not_exist_is_not_found_as_ever() -> None:
    imports.when_imported("megaflux_vllm_not_there", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megaflux_vllm_not_there")
