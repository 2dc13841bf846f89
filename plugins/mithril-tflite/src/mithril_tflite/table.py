"""The table of operators: one function each; its signature is the schema of operands and options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mithril_importing.table import Signature

# Annotations of operands; others are values in real numbers.
Weight = Any  # such a value; a float constant connected to it is a parameter, with the operand's name
Stored = Any  # a value as it is stored, such as an index
Known = Any  # an array whose elements decide the graph
Sizes = Any  # a tuple of int | Dim, or None
KINDS = ("Weight", "Stored", "Known", "Sizes")


@dataclass(frozen=True)
class Row:
    """An operator; it may take ``context``, the operator being imported."""

    name: str
    signature: Signature
    moves: bool  # whether the elements of operands arrive in results unchanged
    folds: bool  # whether it can be computed on constants at import


OPERATORS: dict[str, Row] = {}


def operator(
    function: Callable[..., Any] | None = None, *, name: str = "", moves: bool = False, folds: bool = True
) -> Any:
    """Register the decorated function as the operator of its name."""

    def enter(f: Callable[..., Any]) -> Callable[..., Any]:
        label = name or f.__name__
        OPERATORS[label] = Row(label, Signature.of(f, KINDS), moves, folds)
        return f

    return enter if function is None else enter(function)
