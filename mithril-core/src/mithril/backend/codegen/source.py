"""Generated source: its text, the function it defines, and what users may do to the text."""

from __future__ import annotations

import difflib
import hashlib
import io
import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from mithril.base import BackendError, OptionError, files, quoted, utf8

SIGNATURE = "def forward(params, inputs):"
CLOSING = "return outputs"


class Source:
    """The text of a module that defines ``forward(params, inputs)``."""

    def __init__(self, text: str, arrays: Mapping[str, Any] | None = None) -> None:
        self.text = text
        self.arrays = dict(arrays or {})  # large constants, which the text takes by name
        self.filename = f"<mithril {hashlib.sha256(utf8(text)).hexdigest()[:12]}>"

    def code(self) -> CodeType:
        """The module's code."""
        try:
            return compile(self.text, self.filename, "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BackendError(
                f"the generated source does not compile: {error}", facts=_around(self.text, error)
            ) from None

    def function(self) -> Callable[..., Any]:
        """``forward``, compiled from the text: each call gives a function of its own."""
        code = self.code()
        linecache.cache[self.filename] = (len(self.text), None, self.text.splitlines(keepends=True), self.filename)
        space: dict[str, Any] = {"__name__": "mithril_generated", "_arrays": self.arrays}
        exec(code, space)
        space.pop("_arrays", None)  # the module has made its constants of them
        forward: Callable[..., Any] = space["forward"]
        return forward

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the text to a file, its large constants beside it."""
        if self.arrays:
            packed = io.BytesIO()
            np.savez(packed, allow_pickle=False, **self.arrays)
            files.write(Path(path).with_suffix(".npz"), packed.getvalue(), "file_path")
        files.write(path, self.text, "file_path")


def _around(text: str, error: Exception) -> list[str]:
    at = getattr(error, "lineno", None)
    if at is None:
        return []
    lines = text.splitlines()
    return [
        f"{'>' if k + 1 == at else ' '} {k + 1}: {lines[k]}" for k in range(max(0, at - 3), min(len(lines), at + 2))
    ]


def transformed(text: str, transformers: Sequence[Callable[[str], str]]) -> str:
    """The text after the user's functions; lines they inserted are indented as their neighbors where they must be."""
    for function in transformers:
        name = getattr(function, "__name__", repr(function))
        made = function(text)
        if not isinstance(made, str):
            raise OptionError(f"code transformer '{name}' returned {type(made).__name__}, expected the source text")
        text = _reindented(text, made, name)
    return text


def _reindented(before: str, after: str, name: str) -> str:
    """Inserted lines that Python cannot read for their indentation get that of the line above."""
    old = set(before.splitlines())
    lines = after.splitlines()
    for _ in range(len(lines) + 1):
        try:
            compile("\n".join(lines), "<transformed>", "exec")
            return "\n".join(lines) + "\n"
        except IndentationError as error:
            at = (error.lineno or 1) - 1
            above = next((k for k in range(at - 1, -1, -1) if lines[k].strip()), None)
            if lines[at] in old or above is None:
                raise _broken(before, after, name, error) from None
            indent = _indent(lines[above]) + ("    " if lines[above].split("#")[0].rstrip().endswith(":") else "")
            if lines[at] == indent + lines[at].strip():
                raise _broken(before, after, name, error) from None
            lines[at] = indent + lines[at].strip()
        except SyntaxError as error:
            raise _broken(before, after, name, error) from None
    raise _broken(before, after, name, None)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _broken(before: str, after: str, name: str, error: SyntaxError | None) -> OptionError:
    changes = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "generated", "transformed", lineterm="", n=1
    )
    return OptionError(
        f"code transformer '{name}' made source that Python cannot read: {error.msg if error else 'indentation'}",
        facts=list(changes)[:40],
        hint=f"the source has the lines '{SIGNATURE}' and '{CLOSING}', indented by four spaces inside the function",
    )


def from_template(path: str | os.PathLike[str], context: Mapping[str, Any]) -> str:
    """The source a Jinja2 template makes; unknown names are errors. Templates are code: use those you trust."""
    import jinja2

    file, space = _templates(path)
    try:
        return str(space.get_template(file.name).render(**context))
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise OptionError(
            f"template '{file}' failed: {error}",
            facts=[f"line {line}" if line else "", "names: " + ", ".join(sorted(context))],
        ) from None


def template_texts(path: str | os.PathLike[str]) -> dict[str, str] | None:
    """The template and all that it includes, by name; None where a name is only known when it is rendered."""
    import jinja2
    from jinja2.meta import find_referenced_templates

    file, space = _templates(path)
    assert space.loader is not None
    texts: dict[str, str] = {}
    pending: list[str] = [file.name]
    while pending:
        name = pending.pop()
        try:
            texts[name] = space.loader.get_source(space, name)[0]
            named = list(find_referenced_templates(space.parse(texts[name])))
        except jinja2.TemplateError as error:
            raise OptionError(f"template '{file}' failed: {error}") from None
        if None in named:
            return None
        pending += [n for n in named if n is not None and n not in texts]
    return texts


def _templates(path: str | os.PathLike[str]) -> tuple[Path, Any]:
    """The template's file, and the Jinja environment that finds it and its neighbors."""
    import jinja2

    file = Path(path)
    if not file.is_file():
        raise OptionError(f"there is no template '{file}'")
    space = jinja2.Environment(
        loader=jinja2.FileSystemLoader(file.parent), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    space.filters["quoted"] = quoted
    return file, space
