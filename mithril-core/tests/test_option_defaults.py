"""The default of an option of ``ml.compile`` is declared by its owner, and written nowhere else."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from mithril.backend import BuildOptions, declared_defaults
from mithril.compiler import resolve_options
from mithril.compiler.options import mithril_options

sys.path.insert(0, str(Path(__file__).parent))
import test_architecture as architecture

OPTION_OWNERS = {option: owner for owner, entry in architecture.KNOWN.items() for option in entry.get("options", ())}
DEFAULTS = {option.name: option.default for option in mithril_options()}
OWNERS = {**OPTION_OWNERS, **dict.fromkeys(DEFAULTS, "mithril-core")}
LITERALS = (ast.Constant, ast.Dict, ast.List, ast.Tuple)


def is_read(node: ast.AST, declared: Collection[str]) -> bool:
    """Whether this reads a declared option: ``settings["jit"]``, ``options.settings.get("jit")``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        table, key = node.func.value, node.args[0]
    elif isinstance(node, ast.Subscript):
        table, key = node.value, node.slice
    else:
        return False
    name = getattr(table, "attr", getattr(table, "id", ""))
    return name in ("settings", "options") and isinstance(key, ast.Constant) and key.value in declared


def second_defaults(tree: ast.AST, present: Collection[str]) -> list[str]:
    """Return the places that write a default of an option: its declaration is the only one.

    ``present`` are the distributions that are installed wherever this code runs. An option of another one may be
    undeclared: ``settings.get(name)`` without a default reads it.
    """
    certain = {name for name, owner in OWNERS.items() if owner in present}
    places = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_read(node, OWNERS):
            is_second = len(node.args) > 1 or is_read(node, certain)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            *reads, fallback = node.values
            is_second = isinstance(fallback, LITERALS) and any(is_read(value, OWNERS) for value in reads)
        elif isinstance(node, ast.Dict):
            items = [(k.value, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
            equal = [k for k, v in items if k in DEFAULTS and isinstance(v, LITERALS) and _is_default(v, DEFAULTS[k])]
            is_second = len(equal) > 1
        else:
            continue
        if is_second:
            places.append(ast.unparse(node))
    return places


def _is_default(node: ast.expr, default: object) -> bool:
    return ast.unparse(node) == (repr(dict(default)) if isinstance(default, Mapping) else repr(default))


# Their settings are those of files of other frameworks, and of the predecessor's layers.
FOREIGN = {"mithril_compat", "mithril_hub", "mithril_keras"}


@pytest.mark.parametrize(
    "path",
    [path for path in (architecture.CORE, *architecture.PLUGINS) if path.name not in FOREIGN],
    ids=lambda path: path.name,
)
def test_defaults_of_options_are_written_in_declarations_only(path):
    present = {"mithril-core"}
    if path != architecture.CORE:
        distribution = path.parents[1]
        required = architecture.dependencies(distribution, optional=False)
        present |= {distribution.name, *(name.replace("_", "-") for name in required)}
    places = [
        f"{file}: {place}"
        for file in path.rglob("*.py")
        for place in second_defaults(ast.parse(file.read_text()), present)
    ]
    assert places == []


@pytest.mark.parametrize(
    "code",
    [
        'jit = settings.get("jit", False)',
        'jit = options.settings.get("jit", None)',
        'level = self.options.get("optimization_level", "medium")',
        'seed = self.settings["seed"] or 0',
        'options = settings.get("jit_options") or {}',
        'pjit = settings.get("pjit") or False',
        'jit = settings.get("jit")',
        'DEFAULTS = {"jit": None, "semantics": "portable", "file_path": None}',
        'DEFAULTS = MappingProxyType({"jit_options": {}, "code_transformers": ()})',
    ],
)
def test_second_defaults_are_found(code):
    assert second_defaults(ast.parse(code), {"mithril-core"})


@pytest.mark.parametrize(
    "code",
    [
        'jit = settings["jit"]',
        'kind = settings.get("parallelism")',
        'backend = table.get("jit", False)',
        'effort = settings["tpu_options"].get("effort")',
        'inference = settings["inference"] or settings["static_inference"]',
        'options = {"jit": True, "semantics": "native"}',
    ],
)
def test_reads_without_a_default_are_accepted(code):
    assert second_defaults(ast.parse(code), {"mithril-core"}) == []


def test_build_options_have_the_declared_defaults():
    assert BuildOptions(seed=3).settings == {**resolve_options({}), "seed": 3}
    assert declared_defaults().items() >= {option.name: option.default for option in mithril_options()}.items()
