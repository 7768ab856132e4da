"""Functions that wait for the import of a module, so that what changes a module need not import it.

Decides how imports are followed: a finder leaves the search to all others, and has the loader that they found call what
waits, when it has executed the module. Knows nothing of vLLM.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Waiting = Callable[[ModuleType], None]

_waiting: defaultdict[str, list[Waiting]] = defaultdict(list)


def when_imported(name: str, function: Waiting) -> None:
    """Call ``function`` with a module: now, if it has been imported, and whenever it is imported or reloaded later.

    What the function raises is raised by the import. While another thread imports the module, both may call it, one
    after the other.

    Args:
        name: full name of the module.
        function: changes the module in place; the same one waits once.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if function not in _waiting[name]:
        _waiting[name].append(function)
    if name in sys.modules:
        function(importlib.import_module(name))  # waits where another thread is importing it


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for function in _waiting[name]:
                    function(module)

            # every module has a loader of its own, which stays what it is else
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()

__all__ = ["when_imported"]
