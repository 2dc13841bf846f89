"""Conditions and updates written as strings, ``"step < max_steps"``: parsed with ``ast``, never passed to ``eval``.

The grammar has names, numbers, True and False, ``+ - * / // %``, comparisons, ``and or not`` and parentheses.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from mithril import ops
from mithril.graph import ModelError, Value
from mithril.models.language.source_location import user_location

GRAMMAR = "accepted: names, numbers, + - * / // %, comparisons, and, or, not, parentheses"
_Pair = tuple[Callable[[Any, Any], Any], str]  # function of Python numbers, name of the operation on values
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
LONGEST = 2000  # characters; keeps the nesting depth far below Python's recursion limit


class Expression:
    """A parsed expression: the names it uses, and its value for bindings of these names."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            if len(text) > LONGEST:
                raise SyntaxError(f"it is longer than {LONGEST} characters")
            self.body = ast.parse(text.strip(), mode="eval").body
        # Python's parser raises MemoryError where its stack ends, and ValueError for null bytes.
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"'{text}' is not an expression", str(getattr(error, "msg", "") or error)) from None
        self.names = self._names()

    def _names(self) -> tuple[str, ...]:
        """Return the names in order of appearance; raise ModelError for syntax outside the grammar."""
        names: dict[str, None] = {}
        pending: list[ast.AST] = [self.body]
        while pending:
            node = pending.pop()
            match node:
                case ast.Name(id=name):
                    names[name] = None
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
        return tuple(names)

    def _error(self, message: str, *facts: str) -> ModelError:
        return ModelError(message, facts=[*facts, f"at {user_location()}", GRAMMAR])

    def value(self, bindings: Mapping[str, Any]) -> Any:
        """Return a Python number if all bindings are numbers, else a value built from operations."""
        return _value(self.body, bindings)

    def __str__(self) -> str:
        return self.text


def _value(node: ast.expr, bindings: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return bindings[name]
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left, bindings), _value(right, bindings))
        case ast.Compare(left=left, ops=tests, comparators=rest):
            values = [_value(n, bindings) for n in (left, *rest)]
            comparisons = [_binary(t, a, b) for t, a, b in zip(tests, values, values[1:], strict=False)]
            return _combine(comparisons, "logical_and", all)
        case ast.BoolOp(op=ast.And(), values=parts):
            return _combine([_value(p, bindings) for p in parts], "logical_and", all)
        case ast.BoolOp(values=parts):
            return _combine([_value(p, bindings) for p in parts], "logical_or", any)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            value = _value(inner, bindings)
            return ops.logical_not(_as_bool(value)) if isinstance(value, Value) else not value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = _value(inner, bindings)
            return ops.neg(value) if isinstance(value, Value) else -value
        case ast.UnaryOp(operand=inner):
            return _value(inner, bindings)
    raise AssertionError(node)


def _binary(op: ast.AST, a: Any, b: Any) -> Any:
    python, name = BINARY[type(op)]
    if isinstance(a, Value) or isinstance(b, Value):
        return getattr(ops, name)(a, b)
    try:
        return python(a, b)
    except ZeroDivisionError:
        raise ModelError("an expression divides by zero", facts=[f"{a} {name} {b}"]) from None


def _combine(parts: list[Any], name: str, python: Callable[[list[Any]], bool]) -> Any:
    """Combine the operands of ``and`` or ``or``; static operands are folded, the others use the operation."""
    static = [bool(p) for p in parts if not isinstance(p, Value)]
    dynamic = [_as_bool(p) for p in parts if isinstance(p, Value)]
    decides = name == "logical_or"
    if not dynamic or decides in static:
        return python(static) if static else True
    result = dynamic[0]
    for part in dynamic[1:]:
        result = getattr(ops, name)(result, part)
    return result


def _as_bool(value: Value) -> Any:
    return value if value.dtype.is_bool else ops.not_equal(value, 0)
