"""The rooms of this backend: imports lead to lower floors only."""

import ast
from pathlib import Path

import mithril_cbackend

ROOT = Path(mithril_cbackend.__file__).parent
FLOORS = (
    {"c_names", "cpu_info", "toolchains"},
    {"compile_target", "module_loader"},
    {"tir", "lowering.words"},
    {"lowering.element"},
    {"lowering.rows"},
    {"lowering.pool"},
    {"lowering.matmul"},
    {"lowering.attention", "lowering.conv"},
    {"graph"},
    {"program"},
    {"schedule"},
    {"bundle", "build", "kernels"},
    {"backend", "command"},
    {"plugin", "__init__"},
)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def room(parts: tuple[str, ...]) -> str:
    return ".".join(parts[:2]) if parts[0] == "lowering" else parts[0]


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms that a file imports, lazily and for types as well."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mithril_cbackend":
            parts = node.module.split(".")[1:]
            rooms |= {room((*parts, alias.name)) for alias in node.names}
    return rooms & LEVEL.keys()


def test_imports_lead_to_lower_floors():
    upward = []
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts == ("lowering", "__init__"):
            continue
        source = room(parts)
        assert source in LEVEL, f"{source} has no floor"
        upward += [f"{path.name} -> {r}" for r in imported_rooms(path) if r != source and LEVEL[r] >= LEVEL[source]]
    assert not upward
