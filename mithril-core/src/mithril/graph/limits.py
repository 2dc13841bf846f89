"""Limits of everything that reads files, so that a small file costs little. ``with reader_limits(...)`` raises one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from mithril.graph.errors import InputError, OptionError, ParseError

MARK = 64  # bytes of memory for each bracket, comma and colon of JSON, at most
NODE = 512  # bytes of memory for each element in the syntax tree of an expression


@dataclass(frozen=True)
class Limits:
    """The limits of readers by name."""

    terms: int = 256  # of a size such as B*H + 1
    factors: int = 32  # of a term of a size
    depth: int = 100  # of brackets, regions, layers and functions inside each other
    nodes: int = 50_000  # that calls of functions in a file expand to
    growth: int = 4  # bytes of memory per byte of the file
    room: int = 64 << 20  # bytes of memory on top of that
    steps: int = 1_000_000  # of a chat template
    piece: int = 4096  # characters of a piece of a tokenizer


DEFAULT = Limits()
_limits: ContextVar[Limits] = ContextVar("limits", default=DEFAULT)


def reader_limits(*unnamed: object, **limits: int) -> AbstractContextManager[None]:
    """Change limits of readers for a block, for a file that is trusted and exceeds one.

    ``with ml.reader_limits(room=8 << 30): ml.open_weights(path)``. The limits are ``terms`` and ``factors`` of sizes,
    ``depth`` of nesting, ``nodes`` of expanded functions, ``growth`` and ``room`` of memory (a file of n bytes may need
    growth * n + room), ``steps`` of chat templates, and characters of a ``piece`` of a tokenizer.
    """
    names = [f.name for f in fields(Limits)]
    facts = [f"accepted: integers for {', '.join(names)}"]
    if unnamed:
        raise OptionError("reader_limits takes limits by name", facts=facts)
    for name, value in limits.items():
        if name not in names or type(value) is not int or value < 0:
            raise OptionError(f"reader_limits: {name}={value!r:.60}", facts=facts)
    return _changed(limits)


@contextmanager
def _changed(limits: Mapping[str, int]) -> Iterator[None]:
    token = _limits.set(replace(_limits.get(), **limits))
    try:
        yield
    finally:
        _limits.reset(token)


def limit(name: str) -> int:
    """Return the limit of this name."""
    value: int = getattr(_limits.get(), name)
    return value


def check_limit(name: str, count: int, description: str) -> None:
    """Raise InputError if a file needs more than the limit of this name; ``description`` has the subject."""
    if count > limit(name):
        raise InputError(
            f"{description}, more than the limit '{name}'",
            facts=[f"limit: {limit(name):,}"],
            hint=f"if the file is trusted: with ml.reader_limits({name}=...):",
        )


def allowed_memory(size: int) -> int:
    """Return the bytes of memory that the content of a file of ``size`` bytes may need."""
    return limit("growth") * size + limit("room")


def check_memory(needed: int, size: int, description: str) -> None:
    """Raise InputError if content of a file of ``size`` bytes needs more memory than such a file may."""
    allowed = allowed_memory(size)
    if needed > allowed:
        raise InputError(
            f"{description} needs {needed:,} bytes of memory",
            facts=[f"a file of {size:,} bytes may need {allowed:,}"],
            hint=f"if the file is trusted: with ml.reader_limits(room={needed}):",
        )


def parsed_json(content: bytes | str, description: str) -> Any:
    """Parse JSON; raise InputError if it is malformed, nested too deeply or would need too much memory."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    check_memory(len(data) + MARK * sum(data.count(c) for c in (b"[", b"{", b",", b":")), len(data), description)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{description} is not readable JSON", facts=[f"{error}"[:200]]) from None


def parsed_expression(text: str, description: str) -> ast.expr:
    """Parse a Python expression, of which nothing runs; raise ParseError if it is malformed or nested too deeply."""
    depth = largest = 0
    for mark in re.findall(r"[\[({\])}]", text):
        depth += 1 if mark in "[({" else -1
        largest = max(largest, depth)
    check_limit("depth", largest, f"{description} has {largest} brackets inside each other")
    check_memory(NODE * sum(text.count(c) for c in ",+-*/%"), len(text), description)
    try:
        return ast.parse(text, mode="eval").body
    # Python's parser raises MemoryError where its stack ends, and ValueError for null bytes.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ParseError(f"{description} cannot be read", facts=[text[:200]]) from None
