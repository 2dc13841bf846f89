"""Attribute annotations and their converters: the row of ``Axes`` checks and canonicalizes ``axis: Axes``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NewType

from mithril.base import Dim, DType, OperationError, Shape, ShapeError, Size, dtype as as_dtype

if TYPE_CHECKING:
    Axis = int
else:  # a distinct type, so that evaluated annotations differ from plain int
    Axis = NewType("Axis", int)
Axes = tuple[int, ...] | int | None
Ints = tuple[int, ...]
Pairs = tuple[tuple[Size, Size], ...]
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
        f"operation '{op}': attribute '{name}' cannot be {value!r}",
        facts=[f"expected {annotation}", str(cause)],
    )
