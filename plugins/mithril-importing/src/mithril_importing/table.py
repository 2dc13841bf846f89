"""Tables of source operators: the signature of a function is the schema of its operands and attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mithril.graph import OperationError

Operand = Any  # the annotation of operands that are values, and have no other one


@dataclass(frozen=True)
class Signature:
    """The operands of a function, which are positional, and its keywords."""

    function: Callable[..., Any]
    kinds: tuple[str, ...]  # annotations of operands
    names: tuple[str, ...]  # of operands
    required: int  # number of operands without a default
    rest: str | None  # annotation of ``*operands``
    keywords: Mapping[str, Any]  # names and defaults

    @classmethod
    def of(cls, function: Callable[..., Any], annotations: Collection[str]) -> Signature:
        """Return the signature of a function, whose operands may have these annotations."""
        kinds, names, keywords, rest, required = [], [], {}, None, 0
        for p in inspect.signature(function).parameters.values():
            kind = p.annotation if p.annotation in annotations else "Operand"
            if p.kind is p.VAR_POSITIONAL:
                rest = kind
            elif p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD):
                keywords[p.name] = p.default
            else:
                kinds.append(kind)
                names.append(p.name)
                required += p.default is p.empty
        return cls(function, tuple(kinds), tuple(names), required, rest, keywords)

    def kind(self, position: int) -> str:
        """Return the annotation of an operand."""
        return self.kinds[position] if position < len(self.kinds) else self.rest or "Operand"

    def check_operands(self, name: str, operands: Sequence[Any]) -> None:
        """Raise OperationError if an operator has too few or too many operands; absent ones are None."""
        count = len(operands)
        if count < self.required or (self.rest is None and count > len(self.kinds)):
            largest = "any number" if self.rest is not None else len(self.kinds)
            raise OperationError(f"{name} has {count} operands", facts=[f"accepted: {self.required} to {largest}"])
        for k, x in enumerate(operands[: self.required]):
            if x is None:
                raise OperationError(f"{name} lacks its operand {k}")


def results_of(results: Any) -> tuple[Any, ...]:
    """Return the results of a row as a tuple."""
    return tuple(results) if isinstance(results, tuple) else (results,)
