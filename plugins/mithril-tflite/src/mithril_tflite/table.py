"""The table of operators: one function each; its signature is the schema of operands and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Annotations of operands; others are values in real numbers.
Operand = Any  # a value; of a quantized tensor, the real numbers
Weight = Any  # the same; a float constant connected to it is a parameter, with the operand's name
Stored = Any  # a value as it is stored, such as an index
Known = Any  # an array whose elements decide the graph
Sizes = Any  # a tuple of int | Dim, or None
KINDS = ("Weight", "Stored", "Known", "Sizes")


@dataclass(frozen=True)
class Row:
    """An operator: its function, and the kind and the name of each operand."""

    name: str
    function: Callable[..., Any]
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    required: int  # number of operands without a default
    rest: str | None  # kind of ``*operands``
    takes: frozenset[str]  # keywords: options, and "context"
    moves: bool  # whether the elements of operands arrive in results unchanged
    folds: bool  # whether it can be computed on constants at import

    def kind(self, position: int) -> str:
        return self.kinds[position] if position < len(self.kinds) else self.rest or "Operand"


OPERATORS: dict[str, Row] = {}


def operator(
    function: Callable[..., Any] | None = None, *, name: str = "", moves: bool = False, folds: bool = True
) -> Any:
    """Register the decorated function as the operator of its name."""

    def enter(f: Callable[..., Any]) -> Callable[..., Any]:
        kinds: list[str] = []
        names: list[str] = []
        rest, required = None, 0
        takes: set[str] = set()
        for p in inspect.signature(f).parameters.values():
            kind = p.annotation if p.annotation in KINDS else "Operand"
            if p.kind is p.VAR_POSITIONAL:
                rest = kind
            elif p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD):
                takes.add(p.name)
            else:
                kinds.append(kind)
                names.append(p.name)
                required += p.default is p.empty
        label = name or f.__name__
        OPERATORS[label] = Row(label, f, tuple(kinds), tuple(names), required, rest, frozenset(takes), moves, folds)
        return f

    return enter if function is None else enter(function)
