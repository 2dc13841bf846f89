"""Pages of the names for authors of plugins: all public names of the modules that docs/plugins.md lists."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mithril
from mithril.graph import operations
from mithril_tools.reference.author_examples import examples
from mithril_tools.reference.entries import members_table
from mithril_tools.reference.guides import read
from mithril_tools.reference.layers import layer_classes
from mithril_tools.reference.page import Page, call_block, fence, first_line, prose, sections, table

OTHERS = ("mithril_cbackend.kernels", "mithril_ggml.steps")  # modules of backends, where these are installed
LONGEST = 12  # lines of a definition


@cache
def modules() -> dict[str, ModuleType]:
    """Return the public modules for plugins by name, without ``mithril``, whose names have pages of their own."""
    listed = re.findall(r"^\| `([\w.]+)` \| (?!hooks)", read("plugins.md").partition("## Public modules")[2], re.M)
    names = [*listed, *OTHERS]
    return {name: import_module(name) for name in names if find_spec(name.partition(".")[0])}


def module_pages() -> Iterator[Page]:
    """Yield the page of each public module: its names in one line each."""
    for name, module in modules().items():
        yield Page("module", name, first_line(module.__doc__), partial(_module_text, name, module))


def _module_text(name: str, module: ModuleType) -> str:
    rows = [(f"`{public}`", _summary(name, public)) for public in sorted(module.__all__)]
    return f"{prose(module.__doc__)}\n\n{table(('name', 'meaning'), rows)}"


def author_pages() -> Iterator[Page]:
    """Yield the page of each public name of the modules for plugins; a name of several modules has one page.

    Operations, layers, errors and names of ``mithril`` itself have pages of their own.
    """
    homes = _homes()
    for name in sorted(homes):
        module = homes[name][0]
        yield Page("name", name, partial(_summary, module, name), partial(_text, name), module)


@cache
def _homes() -> dict[str, list[str]]:
    homes: dict[str, list[str]] = defaultdict(list)
    for module, loaded in modules().items():
        for name in loaded.__all__:
            if not _has_own_page(name, getattr(loaded, name)):
                homes[name].append(module)
    return homes


def _has_own_page(name: str, value: Any) -> bool:
    face = {public for names in mithril._HOME.values() for public in names}
    owners = operations().get(name), layer_classes().get(name), getattr(mithril, name) if name in face else None
    return any(value is other for other in owners)


def _summary(module: str, name: str) -> str:
    value = getattr(modules()[module], name)
    definition = _definition(module, name)
    return definition.comment if definition is not None else first_line(inspect.getdoc(value))


def _text(name: str) -> str:
    parts = [_of_module(module, name) for module in _homes()[name]]
    return "\n\n".join(dict.fromkeys(parts))


def _of_module(module: str, name: str) -> str:
    value = getattr(modules()[module], name)
    definition = _definition(module, name)
    if definition is not None:
        head = fence(definition.code)
        words = definition.comment
    else:
        head = call_block(name, value) if callable(value) else ""
        words = prose(inspect.getdoc(value))
    members = members_table(value) if inspect.isclass(value) else ""
    if isinstance(value, ModuleType):
        functions = [n for n, f in vars(value).items() if inspect.isfunction(f) and f.__module__ == value.__name__]
        rows = [(f"`{n}`", first_line(inspect.getdoc(getattr(value, n)))) for n in functions if not n.startswith("_")]
        members = table(("name", "meaning"), rows) if rows else ""
    example = examples().get((module, name), "")
    body = sections([("Members", members), ("Example", fence(example) if example else "")])
    return "\n\n".join(part for part in (head, words, body) if part)


class Definition(NamedTuple):
    """An assignment of a constant or type: its code, and the comment that explains it."""

    code: str
    comment: str


@cache
def _definition(module: str, name: str) -> Definition | None:
    """Return the definition of a name that is neither a class, a function nor a module, or None."""
    value = getattr(modules()[module], name)
    if inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, ModuleType):
        return None
    files = _files(module)
    package = _files(module.partition(".")[0])
    for path in sorted(package, key=lambda path: (path not in files, path.stem != _home(module, name))):
        text = path.read_text(encoding="utf-8")
        if not re.search(rf"^ *{name}\b.*=", text, re.M):
            continue
        for node in _statements(ast.parse(text)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                lines = text.splitlines()
                code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno][:LONGEST]))
                above = []
                for line in reversed(lines[: node.lineno - 1]):
                    if not line.lstrip().startswith("#"):
                        break
                    above.append(line.lstrip("# "))
                beside = lines[node.lineno - 1].partition("  # ")[2]
                comment = " ".join(reversed(above)) or beside
                return Definition(code, comment or first_line(type(value).__doc__ if not _plain(value) else ""))
    return None


def _home(module: str, name: str) -> str:
    """Return the file of a package that defines a public name, as far as its list of exports tells."""
    homes = getattr(modules()[module], "HOMES", {})
    return next((home for home, names in homes.items() if name in names), "")


def _plain(value: Any) -> bool:
    return type(value).__module__ in ("builtins", "typing", "types", "collections.abc")


def _files(package: str) -> list[Path]:
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]


def _statements(tree: ast.AST) -> Iterator[ast.Assign | ast.AnnAssign]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign))
