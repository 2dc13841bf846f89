"""A page of the reference, and the pieces of Markdown that it consists of."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from mithril.graph import LAYERS, OPERATIONS


@dataclass(frozen=True)
class Page:
    """One entry of the reference: its Markdown is written when it is read."""

    kind: str  # a key of ``catalog.KINDS``
    name: str
    short: str | Callable[[], str]  # one line; computed when it is read, where that imports a framework
    write: Callable[[], str]  # returns the text below the heading
    group: str = ""  # the section of the index that lists it

    @property
    def summary(self) -> str:
        """The page in one line."""
        return self.short if isinstance(self.short, str) else self.short()

    def text(self) -> str:
        """Return the complete page."""
        synonyms = {"operation": OPERATIONS, "layer": LAYERS}.get(self.kind, {}).get(self.name, "").split()
        elsewhere = f"\n\nCalled elsewhere: {', '.join(f'`{name}`' for name in synonyms)}." if synonyms else ""
        return f"# {self.name}\n\n{self.write()}{elsewhere}\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; bars and line breaks within cells are escaped."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def fence(code: str, language: str = "python") -> str:
    """Return a block of code."""
    return f"```{language}\n{code.rstrip()}\n```"


def sections(parts: Iterable[tuple[str, str]]) -> str:
    """Return titled sections, without those that are empty."""
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts if text)


def prose(documentation: str | None) -> str:
    """Convert the inline code of a docstring to Markdown."""
    return inspect.cleandoc(documentation or "").replace("``", "`")


def first_line(documentation: str | None) -> str:
    """Return the summary line of a docstring."""
    return prose(documentation).partition("\n\n")[0].replace("\n", " ")


def run(code: str) -> str:
    """Run an example and return the text that it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "<example>", "exec"), {"__name__": "example"})
    return printed.getvalue()


def example(code: str) -> str:
    """Return an example with its output, computed now."""
    return f"{fence(code)}\n\n{fence(run(code), 'text')}"


def default_text(value: Any) -> str:
    """Return a default value as it is written in a table."""
    return f"`{value!r}`"


class _Annotation:
    """An annotation in a printed signature: its text, without quotes."""

    def __init__(self, text: object) -> None:
        self.text = text

    def __repr__(self) -> str:
        return str(self.text)


def signature_text(value: Any) -> str:
    """Return the signature of a callable as it is written, without ``self``; empty if it has none."""
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    plain = [
        p.replace(annotation=_Annotation(p.annotation)) if isinstance(p.annotation, str) else p
        for name, p in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    result = signature.return_annotation
    shown = signature.replace(
        parameters=plain, return_annotation=_Annotation(result) if isinstance(result, str) else result
    )
    return re.sub(r"<(?:[\w.]+\.)?(\w+) object at 0x\w+>", r"\1(...)", str(shown))


def call_block(name: str, value: Any) -> str:
    """Return a block with a name and its signature; a long one has a line for each parameter."""
    signature = signature_text(value)
    if len(name) + len(signature) <= 88:
        return fence(name + signature)
    parameters, arrow, result = signature.rpartition(") -> ") if ") -> " in signature else (signature[:-1], ")", "")
    lines = [f"    {part}," for part in _split_arguments(parameters.removeprefix("("))]
    end = f"{arrow}{result}" if result else ")"
    return fence("\n".join([f"{name}(", *lines, end]))


def _split_arguments(text: str) -> list[str]:
    """Split at the commas outside of brackets and strings."""
    parts, depth, quote, start = [], 0, "", 0
    for k, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:k].strip())
            start = k + 1
    return [*parts, text[start:].strip()]
