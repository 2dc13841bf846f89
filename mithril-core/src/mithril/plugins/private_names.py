"""Imports of private modules and names of mithril in the code of a plugin, which any version may change.

The search reads all files of a plugin, and its finds concern the authors, so that no compilation makes it:
``mithril doctor --plugins`` and ``mithril plugins verify`` do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from mithril.plugins.loader import Plugin, PluginProblem

CORE = Path(__file__).parents[1]


def private_imports(plugin: Plugin, packages: Iterable[str]) -> PluginProblem | None:
    """Return the doubt about a plugin whose top-level packages import private modules or names of mithril."""
    lines = tuple(line for package in packages for line in _lines(package))
    if not lines:
        return None
    return PluginProblem(
        "doubtful",
        f"plugin '{plugin.name}' of {plugin.origin} imports private names of mithril, which any version may change",
        lines,
        f"its authors should import from packages such as mithril.graph; {plugin.disable_hint()}",
    )


def _lines(package: str) -> Iterator[str]:
    try:
        spec = find_spec(package)
    except ValueError:  # a module that was registered manually has no specification
        spec = None
    if spec is None:
        return
    files = [(Path(root).parent, path) for root in spec.submodule_search_locations or () for path in _files(root)]
    if not files and str(spec.origin).endswith(".py"):
        files = [(Path(str(spec.origin)).parent, Path(str(spec.origin)))]
    yield from (f"{path.relative_to(top)}:{line}: {name}" for top, path in files for line, name in _names(path))


def _files(root: str) -> list[Path]:
    return sorted(Path(root).rglob("*.py"))


def _names(file: Path) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return  # the import of the file has this error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if _is_private(one.name, ""))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            pairs = [(node.module, one.name) for one in node.names]
            yield from ((node.lineno, f"{module}.{name}") for module, name in pairs if _is_private(module, name))


def _is_private(module: str, name: str) -> bool:
    root, *parts = module.split(".")
    if root != "mithril":
        return False
    if len(parts) > 1 or any(re.match("_(?!_)", part) for part in (*parts, name)):
        return True
    # A package exports some of its modules, such as mithril.system.files.
    return CORE.joinpath(*parts, f"{name}.py").is_file() and name not in import_module(module).__all__
