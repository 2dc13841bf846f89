"""The packages of this backend: imports lead to lower layers only."""

import ast
from pathlib import Path

import mithril_cbackend

ROOT = Path(mithril_cbackend.__file__).parent
LAYERS = (
    {"c_names", "cpu_info", "instructions", "toolchains", "lowering.packings"},
    {"compile_target", "module_loader"},
    {"tir", "lowering.int8x4"},
    {"lowering.element"},
    {"lowering.rows"},
    {"lowering.pool"},
    {"lowering.matmul"},
    {"lowering.attention", "lowering.conv", "lowering.scheduled"},
    {"graph"},
    {"program"},
    {"schedule"},
    {"bundle", "build", "kernels"},
    {"backend", "command", "devices"},
    {"plugin", "__init__"},
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def package(parts: tuple[str, ...]) -> str:
    return ".".join(parts[:2]) if parts[0] == "lowering" else parts[0]


def imported_rooms(path: Path) -> set[str]:
    """Return the packages that a file imports, lazily and for types as well."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mithril_cbackend":
            parts = node.module.split(".")[1:]
            packages |= {package((*parts, alias.name)) for alias in node.names}
    return packages & LEVEL.keys()


def test_imports_lead_to_lower_floors():
    upward = []
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts == ("lowering", "__init__"):
            continue
        source = package(parts)
        assert source in LEVEL, f"{source} has no layer"
        upward += [f"{path.name} -> {r}" for r in imported_rooms(path) if r != source and LEVEL[r] >= LEVEL[source]]
    assert not upward
