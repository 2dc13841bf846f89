"""The examples of names for plugins, in ``author_examples.md``."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def blocks() -> list[str]:
    """Return the examples of ``author_examples.md``, of modules that are installed."""
    text = Path(__file__).with_name("author_examples.md").read_text(encoding="utf-8")
    written = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    return [block for block in written if all(find_spec(name.partition(".")[0]) for name, _ in _imported(block))]


@cache
def examples() -> dict[tuple[str, str], str]:
    """Return by module and name the shortest example that imports the name."""
    uses: dict[tuple[str, str], str] = {}
    for block in sorted(blocks(), key=len, reverse=True):
        uses.update(dict.fromkeys(_imported(block), block))
    return uses


def _imported(block: str) -> list[tuple[str, str]]:
    nodes = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    return [(node.module or "", alias.name) for node in nodes for alias in node.names]
