"""Attribute values as parsable text, and as exact keys: 0.0 differs from -0.0, and 1.0 from True."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from mithril.base import DTYPE_NAMES, Dim, DType, ParseError, dim_of_node, parsed_expression, quoted

Limits = Mapping[str, tuple[int, int | None]]


def attribute_text(value: Any) -> str:
    """Return the value as graph text. Equal texts mean equal attributes, so the text is also a key."""
    if value is None or isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, DType):
        return value.short
    if isinstance(value, Dim):
        return str(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(attribute_text, value)) + "]"
    raise TypeError(f"an attribute cannot be a {type(value).__name__}: {value!r}")


def attributes_text(attributes: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> str:
    """Return ``name=value`` pairs, without those equal to their default."""
    parts = []
    for name, value in attributes.items():
        text = attribute_text(value)
        if not defaults or name not in defaults or attribute_text(defaults[name]) != text:
            parts.append(f"{name}={text}")
    return ", ".join(parts)


def attributes_key(attributes: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return a hashable, exact key of the attributes."""
    return tuple((name, attribute_text(value)) for name, value in sorted(attributes.items()))


def parse_attributes(text: str, limits: Limits) -> dict[str, Any]:
    """Parse ``name=value, ...``."""
    if not text.strip():
        return {}
    description = f"the attributes '{text[:200]}'"
    call = parsed_expression(f"f({text})", description)
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ParseError(f"{description} cannot be read", hint="write them as axis=1, shape=[2, B]")
    try:
        return {str(k.arg): _value(k.value, limits) for k in call.keywords}
    except RecursionError:
        raise ParseError(f"{description} are nested too deeply") from None


def _value(node: ast.expr, limits: Limits) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.List(elts=items):
            return tuple(_value(item, limits) for item in items)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=(int() | float()) as number)):
            return -number
        case ast.Name(id="inf" | "nan"):
            return float(node.id)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -math.inf
        case ast.Name(id=name) if name in DTYPE_NAMES and name not in limits:
            return DTYPE_NAMES[name]
    return dim_of_node(node, limits)
