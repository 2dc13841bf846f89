"""Pages of errors: each class with the mistakes of the guide that raise it, and every cause with its remedy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from mithril import graph
from mithril.plugins import found
from mithril_tools.reference import author_examples
from mithril_tools.reference.guides import mistakes
from mithril_tools.reference.page import Page, fence, first_line, prose, sections, table


def error_classes() -> dict[str, type]:
    """Return the errors and warnings of mithril by name."""
    names = {n: getattr(graph, n) for n in dir(graph)}
    return {n: c for n, c in sorted(names.items()) if isinstance(c, type) and issubclass(c, Exception)}


def error_pages() -> Iterator[Page]:
    """Yield the page of each error class."""
    for name, cls in error_classes().items():
        yield Page("error", name, first_line(cls.__doc__), partial(error_text, cls))


def error_text(cls: type) -> str:
    """Return the page of an error class."""
    bases = " → ".join(f"`{c.__name__}`" for c in cls.__mro__ if c not in (object, BaseException))
    examples = [
        f"{fence(code)}\n\n{fence(f'{name}: {text}', 'text')}"
        for name, code, text in mistakes()
        if name == cls.__name__
    ]
    example = author_examples.examples().get(("mithril.graph", cls.__name__))
    examples += [fence(example)] if example and not examples else []
    causes = sorted(set(raised_texts().get(cls.__name__, [])))
    rows = [(f"`{message}`", f"{hint}" and f"`{hint}`") for message, hint in causes]
    parts = (
        ("Causes and remedies", table(("text", "hint"), rows) if rows else ""),
        ("Examples", "\n\n".join(examples)),
    )
    return f"{prose(cls.__doc__)}\n\n{bases}\n\n{sections(parts)}".rstrip()


@cache
def raised_texts() -> dict[str, list[tuple[str, str]]]:
    """Return by class the texts and hints of the errors that the installed distributions of mithril create."""
    texts: dict[str, list[tuple[str, str]]] = {}
    modules = {"mithril", *(plugin.module.partition(".")[0] for plugin in found() if plugin.first_party)}
    for module in sorted(modules):
        spec = find_spec(module)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                if "new_plugin" not in path.parts:
                    _read(path, texts)
    return texts


def _read(path: Path, texts: dict[str, list[tuple[str, str]]]) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in error_classes()
            and node.args
        ):
            message = literal_text(node.args[0])
            hint = next((literal_text(k.value) for k in node.keywords if k.arg == "hint"), "")
            if message:
                texts.setdefault(node.func.id, []).append((message, hint))


def literal_text(node: ast.expr) -> str:
    """Return the text of a literal with … for its computed parts; empty if nothing of it is literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal_text(node.left) + literal_text(node.right)
    if isinstance(node, ast.IfExp):
        return literal_text(node.body)
    return ""
