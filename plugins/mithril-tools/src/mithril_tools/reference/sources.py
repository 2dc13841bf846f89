"""The source of a declared function: of a reference, a body, a gradient, also if it is a lambda in a table."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.Lambda


def source_of(function: Callable[..., Any], name: str = "") -> str:
    """Return the source of a function, without decorators and docstring; ``name`` replaces its name.

    A function that has no Python source, such as one of NumPy, is returned as its name.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None and code.co_filename.endswith(".md"):  # a block of a page
        return f"{code.co_name}(...)"
    if code is None or not Path(code.co_filename).is_file():
        return f"np.{getattr(function, '__name__', repr(function))}"
    text, nodes = _functions(code.co_filename)
    candidates = [n for n in nodes.get(code.co_firstlineno, []) if _parameters(n) == _code_parameters(code)]
    if not candidates:
        return f"{code.co_name}(...)"
    node = candidates[0]
    if isinstance(node, ast.Lambda):
        return ast.get_source_segment(text, node) or code.co_name
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    if ast.get_docstring(node) is not None:
        first = node.body[0]
        start, end = first.lineno - node.lineno, (first.end_lineno or first.lineno) - node.lineno
        del lines[start : end + 1]
    source = textwrap.dedent("\n".join(lines))
    return source.replace(f"def {node.name}(", f"def {name}(", 1) if name else source


def _code_parameters(code: Any) -> list[str]:
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return sorted(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags])


def _parameters(node: Function) -> list[str]:
    a = node.args
    return sorted(p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))))


@lru_cache(maxsize=64)
def _functions(path: str) -> tuple[str, dict[int, list[Function]]]:
    """Return the text of a file, and its functions by the line on which Python says that they begin."""
    text = Path(path).read_text(encoding="utf-8")
    functions: dict[int, list[Function]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            functions.setdefault(first, []).append(node)
    return text, functions
