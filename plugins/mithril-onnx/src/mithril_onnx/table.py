"""The table of source operators: one function per operator, its attributes as keywords, its signature the schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mithril_importing.table import Signature

# Annotations of operands; other operands are values, which arrive as ``mithril.graph.Value``.
Known = Any  # an array whose elements decide the graph
Sizes = Any  # a tuple of int | Dim, or None
Weight = Any  # a value; a float constant connected to it is a parameter
State = Any  # a value; an initializer connected to it is a state, updated in training
Item = Any  # anything in the environment: a value, a sequence, None
KINDS = ("Known", "Sizes", "Weight", "State", "Item")

STANDARD = ""  # the domain of the standard's operators, also spelled "ai.onnx"


@dataclass(frozen=True)
class Row:
    """One version of a source operator."""

    name: str
    domain: str
    since: int
    signature: Signature  # an attribute of the name of an operand is this operand in older versions
    folds: bool = True  # whether constant operands can be computed at import

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The names and defaults of attributes."""
        return {n: default for n, default in self.signature.keywords.items() if n != "context"}


def row_of(function: Callable[..., Any], name: str, domain: str, since: int, folds: bool) -> Row:
    """Return the row that a function's signature describes; it may take ``context``, the node being imported."""
    return Row(name, domain, since, Signature.of(function, KINDS), folds)


class Table:
    """Rows by domain and name, latest first."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[Row]] = {}

    def add(self, row: Row) -> None:
        rows = self._rows.setdefault((row.domain, row.name), [])
        if any(r.since == row.since for r in rows):
            raise ValueError(f"two rows for {row.name} of version {row.since}")
        rows.append(row)
        rows.sort(key=lambda r: -r.since)

    def find(self, domain: str, name: str, version: int) -> Row | None:
        """Return the latest row with ``since <= version``, or None."""
        rows = self._rows.get((canonical_domain(domain), name), ())
        return next((row for row in rows if row.since <= version), None)

    def names(self, domain: str = STANDARD) -> list[str]:
        return sorted(name for d, name in self._rows if d == domain)


OPERATORS = Table()


def canonical_domain(domain: str) -> str:
    return STANDARD if domain == "ai.onnx" else domain


def operator(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    domain: str = STANDARD,
    since: int = 1,
    folds: bool = True,
) -> Any:
    """Register the decorated function as an operator of that name, from version ``since`` of its domain."""

    def enter(f: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.add(row_of(f, name or f.__name__.lstrip("_"), domain, since, folds))
        return f

    return enter if function is None else enter(function)
