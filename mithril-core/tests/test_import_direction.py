"""The house stands: a file imports downwards only, the core imports no plugin, a plugin no other plugin."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mithril

CORE = Path(mithril.__file__).parent
PROJECT = Path(__file__).parents[2]

# Ground first. A module may import what stands in its own row or above it here.
FLOORS = [
    {"__init__", "errors", "decisions"},
    {"types", "dims"},
    {"graph"},
    {"ops"},
    {"rewrite", "autodiff", "passes"},
    {"models"},
    {"hookspecs", "known", "discovery", "plugins", "annotations", "options"},
    {"codegen"},
    # The compiler ends in runtime objects, which come back to it for more.
    {"compiler", "pipeline", "runtime", "shapes", "observers", "caching", "partition"},
    {"cli", "__main__", "testing"},
]
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}
# Imports inside functions are how a lower floor offers a shortcut to a higher one; those are not looked at.


def imported(tree, *, top_level_only):
    """Modules that a file imports at run time; what stands under TYPE_CHECKING is for type checkers only."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            if node.module == "mithril":
                yield from (f"mithril.{alias.name}" for alias in node.names)
        elif not (top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            pending += ast.iter_child_nodes(node)


def floor_of(path):
    return path.relative_to(CORE).parts[0].removesuffix(".py")


CORE_FILES = sorted(path for path in CORE.rglob("*.py") if "new_plugin" not in path.parts)


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda p: str(p.relative_to(CORE)))
def test_core_imports_downwards_only(path):
    own = floor_of(path)
    assert own in LEVEL, f"{own} has no floor yet: give it one in this test and in docs/architecture.md"
    for module in imported(ast.parse(path.read_text()), top_level_only=True):
        parts = module.split(".")
        assert not parts[0].startswith("mithril_"), f"the core imports the plugin {module}"
        if parts[0] == "mithril" and len(parts) > 1:
            name = parts[1] if parts[1] in LEVEL else mithril._MODULE_OF.get(parts[1], "__init__").split(".")[0]
            assert LEVEL[name] <= LEVEL[own], f"{own} (floor {LEVEL[own]}) imports {module} (floor {LEVEL[name]})"


def plugin_files():
    return sorted((PROJECT / "plugins").glob("*/src/**/*.py"))


@pytest.mark.parametrize("path", plugin_files(), ids=lambda p: str(p.relative_to(PROJECT / "plugins")))
def test_plugins_import_the_core_and_no_other_plugin(path):
    own = path.relative_to(PROJECT / "plugins").parts[2]
    allowed = {own, "mithril_jax"} if own == "mithril_tpu" else {own}
    tree = ast.parse(path.read_text())
    for module in imported(tree, top_level_only=False):
        root = module.split(".")[0]
        assert not root.startswith("mithril_") or root in allowed, f"{own} imports {module}"
        if root == "mithril":
            assert not any(part.startswith("_") for part in module.split(".")), f"{own} imports the private {module}"


FRAMEWORKS = {"numpy", "jax", "jaxlib", "torch", "mlx", "tvm", "ggml", "gguf", "ml_dtypes"}


@pytest.mark.parametrize(
    "path", [p for p in plugin_files() if p.name in ("plugin.py", "__init__.py")], ids=lambda p: "/".join(p.parts[-2:])
)
def test_entry_modules_import_no_framework(path):
    roots = {module.split(".")[0] for module in imported(ast.parse(path.read_text()), top_level_only=True)}
    assert not roots & FRAMEWORKS
