"""The drawing of the packages of the core in docs/architecture.md, made from the imports in the source."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

CORE = Path(__file__).parents[1] / "mithril-core/src/mithril"


def package_imports() -> dict[str, set[str]]:
    """Return the packages that each package imports, in functions and for type checkers too."""
    packages = {path.parent.name for path in CORE.glob("*/__init__.py")}
    edges: dict[str, set[str]] = {package: set() for package in packages}
    for package in packages:
        for path in (CORE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mithril":
                    parts = (node.module or "").split(".")
                    names = parts[1:2] or [alias.name for alias in node.names]
                    edges[package] |= {name for name in names if name in packages and name != package}
    return edges


def drawing() -> str:
    """Return a line per layer, highest first; each package with the packages that it imports and no import implies."""
    imports = package_imports()

    @cache
    def below(package: str) -> frozenset[str]:
        return frozenset(imports[package]).union(*(below(other) for other in imports[package]))

    @cache
    def layer(package: str) -> int:
        return 1 + max((layer(other) for other in imports[package]), default=0)

    layers = defaultdict(list)
    for package in sorted(imports):
        direct = sorted(r for r in imports[package] if not any(r in below(other) for other in imports[package]))
        layers[layer(package)].append(f"{package} -> {', '.join(direct)}" if direct else package)
    lines = [f"{number}  {'     '.join(packages)}" for number, packages in sorted(layers.items(), reverse=True)]
    return "```\n" + "\n".join(lines) + "\n```"
