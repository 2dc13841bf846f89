"""Attribute annotations and their converters: the row of ``Axes`` checks and canonicalizes ``axis: Axes``."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NewType

from mithril.graph.dims import Dim, Shape, Size, dim_of_node
from mithril.graph.dtypes import DTYPE_NAMES, DType, dtype as as_dtype
from mithril.graph.errors import OperationError, ParseError, ShapeError, quoted
from mithril.graph.limits import parsed_expression

if TYPE_CHECKING:
    # Annotation of an attribute: an axis of the first operand; negative ones begin at the end.
    Axis = int
else:  # a distinct type, so that evaluated annotations differ from plain int
    Axis = NewType("Axis", int)
# Annotation of an attribute: several axes of the first operand; None is all of them.
Axes = tuple[int, ...] | int | None
# Annotation of an attribute: integers.
Ints = tuple[int, ...]
# Annotation of an attribute: a pair of sizes for each axis, such as the widths of a padding.
Pairs = tuple[tuple[Size, Size], ...]
# Annotation of an attribute: a Python number, which promotes no array.
number = bool | int | float

__all__ = [
    "NORMALIZERS",
    "Axes",
    "Axis",
    "DType",
    "Ints",
    "Pairs",
    "Shape",
    "Size",
    "normalize_axes",
    "normalize_axis",
    "number",
]


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("expected an int, got a bool")
    return operator.index(value)


def _bool(value: Any) -> bool:
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise TypeError("expected True or False")
    return bool(value)


def _float(value: Any) -> float:
    if isinstance(value, (str, bool)):
        raise TypeError("expected a number")
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a string")
    return value


def _size(value: Any) -> Size:
    return value if isinstance(value, Dim) else _int(value)


def _shape(value: Any) -> Shape:
    if isinstance(value, (int, Dim)):
        return (_size(value),)
    return tuple(_size(v) for v in value)


def _ints(value: Any) -> tuple[int, ...]:
    return (_int(value),) if isinstance(value, int) else tuple(_int(v) for v in value)


def _pairs(value: Any) -> tuple[tuple[Size, Size], ...]:
    return tuple((_size(a), _size(b)) for a, b in value)


def _number(value: Any) -> bool | int | float:
    if isinstance(value, (bool, int, float)):
        return value
    item: bool | int | float = value.item()
    return item


def _optional(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else inner(value)


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": _int,
    "bool": _bool,
    "float": _float,
    "str": _str,
    "number": _number,
    "Size": _size,
    "Shape": _shape,
    "Ints": _ints,
    "Pairs": _pairs,
    "DType": as_dtype,
    "Axis": _int,
    "Axes": _optional(_ints),
}
NORMALIZERS = _PLAIN | {f"{name} | None": _optional(f) for name, f in _PLAIN.items()}


def normalize_axis(axis: int, rank: int) -> int:
    """Return the axis as a non-negative index; raise ShapeError if it is out of range."""
    if not -rank <= axis < rank:
        accepted = f"{-rank} to {rank - 1}" if rank else "none: it is a scalar"
        raise ShapeError(f"axis {axis} is out of range for rank {rank}", facts=[f"accepted: {accepted}"])
    return axis % rank


def normalize_axes(axes: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return the axes sorted and non-negative; None means all axes."""
    if axes is None:
        return tuple(range(rank))
    result = sorted(normalize_axis(a, rank) for a in axes)
    if len(set(result)) != len(result):
        raise ShapeError(f"duplicate axis in {tuple(axes)}")
    return tuple(result)


def attribute_error(op: str, name: str, value: Any, annotation: str, cause: Exception) -> OperationError:
    return OperationError(
        f"operation '{op}': attribute '{name}' cannot be {value!r:.200}",
        facts=[f"expected {annotation}", str(cause)],
    )


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
    return tuple([(name, attribute_text(value)) for name, value in sorted(attributes.items())]) if attributes else ()


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
