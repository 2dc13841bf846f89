"""Generated source: its text, the function it defines, and templates and transformers of users."""

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

from mithril.graph import BackendError, OptionError, quoted
from mithril.system import files

SIGNATURE = "def forward(params, inputs):"
CLOSING = "return outputs"


class Source:
    """The text of a module that defines ``forward(params, inputs)``."""

    def __init__(self, text: str, arrays: Mapping[str, Any] | None = None) -> None:
        self.text = text
        self.arrays = dict(arrays or {})  # large constants, used by name in the text
        self.filename = f"<mithril {hashlib.sha256(files.utf8(text)).hexdigest()[:12]}>"

    def code(self) -> CodeType:
        """Compile the text of the module."""
        try:
            return compile(self.text, self.filename, "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BackendError(
                f"the generated source does not compile: {error}", facts=_source_excerpt(self.text, error)
            ) from None

    def function(self) -> Callable[..., Any]:
        """Return a new function ``forward``, compiled from the text."""
        code = self.code()
        linecache.cache[self.filename] = (len(self.text), None, self.text.splitlines(keepends=True), self.filename)
        space: dict[str, Any] = {"__name__": "mithril_generated", "_arrays": self.arrays}
        exec(code, space)
        space.pop("_arrays", None)  # the module has converted them to its constants
        forward: Callable[..., Any] = space["forward"]
        return forward

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the text to a file, and its large constants to a ``.npz`` file next to it."""
        if self.arrays:
            packed = io.BytesIO()
            np.savez(packed, allow_pickle=False, **self.arrays)
            files.write(Path(path).with_suffix(".npz"), packed.getvalue(), "file_path")
        files.write(path, self.text, "file_path")


def _source_excerpt(text: str, error: Exception) -> list[str]:
    number = getattr(error, "lineno", None)
    if number is None:
        return []
    lines = text.splitlines()
    return [
        f"{'>' if k + 1 == number else ' '} {k + 1}: {lines[k]}"
        for k in range(max(0, number - 3), min(len(lines), number + 2))
    ]


def transformed(text: str, transformers: Sequence[Callable[[str], str]]) -> str:
    """Apply the user's transformers to the text; inserted lines are reindented if their indentation is invalid."""
    for function in transformers:
        name = getattr(function, "__name__", repr(function))
        result = function(text)
        if not isinstance(result, str):
            raise OptionError(f"code transformer '{name}' returned {type(result).__name__}, expected the source text")
        text = _reindented(text, result, name)
    return text


def _reindented(old_text: str, new_text: str, name: str) -> str:
    """Indent inserted lines with invalid indentation like the line above."""
    old = set(old_text.splitlines())
    lines = new_text.splitlines()
    for _ in range(len(lines) + 1):
        try:
            compile("\n".join(lines), "<transformed>", "exec")
            return "\n".join(lines) + "\n"
        except IndentationError as error:
            index = (error.lineno or 1) - 1
            above = next((k for k in range(index - 1, -1, -1) if lines[k].strip()), None)
            if lines[index] in old or above is None:
                raise _broken(old_text, new_text, name, error) from None
            indent = _indent(lines[above]) + ("    " if lines[above].split("#")[0].rstrip().endswith(":") else "")
            if lines[index] == indent + lines[index].strip():
                raise _broken(old_text, new_text, name, error) from None
            lines[index] = indent + lines[index].strip()
        except SyntaxError as error:
            raise _broken(old_text, new_text, name, error) from None
    raise _broken(old_text, new_text, name, None)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _broken(old_text: str, new_text: str, name: str, error: SyntaxError | None) -> OptionError:
    changes = difflib.unified_diff(
        old_text.splitlines(), new_text.splitlines(), "generated", "transformed", lineterm="", n=1
    )
    return OptionError(
        f"code transformer '{name}' returned invalid Python: {error.msg if error else 'indentation'}",
        facts=list(changes)[:40],
        hint=f"indent lines in the function by four spaces; it begins with '{SIGNATURE}', ends with '{CLOSING}'",
    )


def from_template(path: str | os.PathLike[str], context: Mapping[str, Any]) -> str:
    """Render a Jinja2 template to source; unknown names are errors. Templates are code: use only trusted ones."""
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
    """Return the texts of a template and its includes by name, or None if an include is computed when rendering."""
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
            includes = list(find_referenced_templates(space.parse(texts[name])))
        except jinja2.TemplateError as error:
            raise OptionError(f"template '{file}' failed: {error}") from None
        if None in includes:
            return None
        pending += [n for n in includes if n is not None and n not in texts]
    return texts


def require_template(path: str | os.PathLike[str]) -> Path:
    """Return the file of a template, which must exist."""
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"template '{file}' does not exist")
    return file


def _templates(path: str | os.PathLike[str]) -> tuple[Path, Any]:
    """Return the file of the template, and a Jinja environment that loads from its folder."""
    import jinja2

    file = require_template(path)
    space = jinja2.Environment(
        loader=jinja2.FileSystemLoader(file.parent), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    space.filters["quoted"] = quoted
    return file, space
