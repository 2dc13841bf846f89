"""The drawing of the rooms of the core in docs/architecture.md, made from the imports in the source."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

CORE = Path(__file__).parents[1] / "mithril-core/src/mithril"


def room_imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports, in functions and for type checkers too."""
    rooms = {path.parent.name for path in CORE.glob("*/__init__.py")}
    edges: dict[str, set[str]] = {room: set() for room in rooms}
    for room in rooms:
        for path in (CORE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mithril":
                    parts = (node.module or "").split(".")
                    names = parts[1:2] or [alias.name for alias in node.names]
                    edges[room] |= {name for name in names if name in rooms and name != room}
    return edges


def drawing() -> str:
    """Return a line per floor, highest first; each room with the rooms that it imports and no import implies."""
    imports = room_imports()

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(imports[room]).union(*(below(other) for other in imports[room]))

    @cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in imports[room]), default=0)

    floors = defaultdict(list)
    for room in sorted(imports):
        direct = sorted(r for r in imports[room] if not any(r in below(other) for other in imports[room]))
        floors[floor(room)].append(f"{room} -> {', '.join(direct)}" if direct else room)
    lines = [f"{number}  {'     '.join(rooms)}" for number, rooms in sorted(floors.items(), reverse=True)]
    return "```\n" + "\n".join(lines) + "\n```"
