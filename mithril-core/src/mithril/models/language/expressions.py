"""Conditions and updates written as text, ``"step < max_steps"``: a small grammar, read with ``ast`` and never run.

Names, numbers, True and False, ``+ - * / // %``, comparisons, ``and or not`` and parentheses.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from mithril import ops
from mithril.base import ModelError
from mithril.ir import Value
from mithril.models.language.source_location import here

GRAMMAR = "accepted: names, numbers, + - * / // %, comparisons, and, or, not, parentheses"
_Pair = tuple[Callable[[Any, Any], Any], str]  # on Python numbers, and the operation otherwise
BINARY: dict[type, _Pair] = {
    ast.Add: (operator.add, "add"),
    ast.Sub: (operator.sub, "sub"),
    ast.Mult: (operator.mul, "mul"),
    ast.Div: (operator.truediv, "div"),
    ast.FloorDiv: (operator.floordiv, "floordiv"),
    ast.Mod: (operator.mod, "mod"),
    ast.Lt: (operator.lt, "less"),
    ast.LtE: (operator.le, "less_equal"),
    ast.Gt: (operator.gt, "greater"),
    ast.GtE: (operator.ge, "greater_equal"),
    ast.Eq: (operator.eq, "equal"),
    ast.NotEq: (operator.ne, "not_equal"),
}
LONGEST = 2000  # characters; keeps nesting far from Python's recursion limit


class Expression:
    """One expression: what it reads, and its value when the names are known."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            if len(text) > LONGEST:
                raise SyntaxError(f"it is longer than {LONGEST} characters")
            self.body = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"'{text}' is no expression", str(getattr(error, "msg", "") or error)) from None
        self.names = self._names()

    def _names(self) -> tuple[str, ...]:
        """Names in order of appearance; anything outside of the grammar is an error."""
        found: dict[str, None] = {}
        pending: list[ast.AST] = [self.body]
        while pending:
            node = pending.pop()
            match node:
                case ast.Name(id=name):
                    found[name] = None
                case ast.Constant(value=bool() | int() | float()):
                    pass
                case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                    pending += [right, left]
                case ast.Compare(left=left, ops=tests, comparators=rest) if all(type(t) in BINARY for t in tests):
                    pending += [*reversed(rest), left]
                case ast.BoolOp(values=values):
                    pending += reversed(values)
                case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=inner):
                    pending.append(inner)
                case _:
                    part = ast.unparse(node)
                    raise self._error(f"'{part}' is not allowed in the expression '{self.text}'")
        return tuple(found)

    def _error(self, what: str, *facts: str) -> ModelError:
        return ModelError(what, facts=[*facts, f"at {here()}", GRAMMAR])

    def value(self, known: Mapping[str, Any]) -> Any:
        """The value: a Python number where every name has one, else built from operations."""
        return _value(self.body, known)

    def __str__(self) -> str:
        return self.text


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return known[name]
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left, known), _value(right, known))
        case ast.Compare(left=left, ops=tests, comparators=rest):
            values = [_value(n, known) for n in (left, *rest)]
            made = [_binary(t, a, b) for t, a, b in zip(tests, values, values[1:], strict=False)]
            return _joined(made, "logical_and", all)
        case ast.BoolOp(op=ast.And(), values=parts):
            return _joined([_value(p, known) for p in parts], "logical_and", all)
        case ast.BoolOp(values=parts):
            return _joined([_value(p, known) for p in parts], "logical_or", any)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            value = _value(inner, known)
            return ops.logical_not(_truth(value)) if isinstance(value, Value) else not value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = _value(inner, known)
            return ops.neg(value) if isinstance(value, Value) else -value
        case ast.UnaryOp(operand=inner):
            return _value(inner, known)
    raise AssertionError(node)


def _binary(op: ast.AST, a: Any, b: Any) -> Any:
    python, name = BINARY[type(op)]
    if isinstance(a, Value) or isinstance(b, Value):
        return getattr(ops, name)(a, b)
    try:
        return python(a, b)
    except ZeroDivisionError:
        raise ModelError("an expression divides by zero", facts=[f"{a} {name} {b}"]) from None


def _joined(parts: list[Any], name: str, python: Callable[[list[Any]], bool]) -> Any:
    """Parts that are known now decide now, or drop out; the others are joined by the operation."""
    fixed = [bool(p) for p in parts if not isinstance(p, Value)]
    open_ = [_truth(p) for p in parts if isinstance(p, Value)]
    decides = name == "logical_or"
    if not open_ or decides in fixed:
        return python(fixed) if fixed else True
    result = open_[0]
    for part in open_[1:]:
        result = getattr(ops, name)(result, part)
    return result


def _truth(value: Value) -> Any:
    return value if value.dtype.is_bool else ops.not_equal(value, 0)
