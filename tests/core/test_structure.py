"""The import graph is the diagram of docs/architecture.md: a module imports only what stands above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Top to bottom: a name may import the names before it, and its own package.
ORDER = (
    "durable",
    "drawing",
    "errors",
    "messages",
    "slots",
    "routing",
    "planning",
    "config",
    "workspace",
    "executors",
    "layer",
    "capture",
    "routepack",
    "migration",
    "trace",
    "plan_log",
    "startup",
    "metrics",
    "rank",
    "cli",
)
SOURCES = sorted((ROOT / "megaflux_serve").rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Absolute names that a file imports anywhere, function bodies included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def stage(module: str) -> str | None:
    """The name below ``megaflux_serve`` that a module or file belongs to, None for anything else."""
    parts = module.split(".")
    return parts[1] if parts[0] == "megaflux_serve" and len(parts) > 1 and parts[1] in ORDER else None


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(ROOT)) for p in SOURCES])
def test_a_module_imports_only_what_stands_above_it(path: Path) -> None:
    own = stage(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own is None:
        assert path.name == "__init__.py", f"{path.name} is missing from the list of stages"
        return
    below = {
        module
        for module in imported_modules(path)
        if (other := stage(module)) and ORDER.index(other) > ORDER.index(own)
    }
    assert not below


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(ROOT)) for p in SOURCES])
def test_the_core_knows_no_engine_and_the_planners_no_torch(path: Path) -> None:
    roots = {module.split(".")[0] for module in imported_modules(path)}
    assert not roots & {"vllm", "sglang"} or path.parts[-2] == "cli"
    if path.parts[-2] in ("planning", "routepack"):
        assert "torch" not in roots


def test_the_kernels_are_a_leaf() -> None:
    for path in (ROOT / "kernels" / "megaflux_kernels").rglob("*.py"):
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert not roots & {"megaflux_serve", "vllm", "sglang"}, path


def test_plugins_are_imported_by_nothing_else() -> None:
    for path in SOURCES + sorted((ROOT / "kernels").rglob("*.py")):
        assert not {m for m in imported_modules(path) if m.startswith(("megaflux_vllm", "megaflux_sglang"))}, path
