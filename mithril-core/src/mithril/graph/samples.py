"""Sample calls of an operation, run by the conformance kit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mithril.graph.dims import Shape


@dataclass(frozen=True)
class Arr:
    """A random array: uniform in [low, high] for floats, integers in [low, high] for integers."""

    shape: Shape
    dtype: str = "float32"
    low: float = -2.0
    high: float = 2.0
    values: tuple[Any, ...] | None = None  # exact elements instead of random ones
    ordered: bool = False  # whether the exact elements are valid in this order only


@dataclass(frozen=True)
class Sample:
    """Operands and attributes of one call. ``label`` distinguishes the samples of an operation."""

    operands: tuple[Arr | None, ...]
    attributes: dict[str, Any]
    label: str = ""
    gradient: bool = True  # whether to check the gradient (it may be undefined at ties)
    dtypes: bool = True  # whether the kit may also run it with other dtypes of the same kind


def sample(
    *operands: Arr | Shape | None, label: str = "", gradient: bool = True, dtypes: bool = True, **attributes: Any
) -> Sample:
    """Return a sample, as in ``sample((2, 3), axis=1)``; plain shapes are float32 arrays in [-2, 2]."""
    arrays = tuple(o if o is None or isinstance(o, Arr) else Arr(tuple(o)) for o in operands)
    return Sample(arrays, attributes, label, gradient, dtypes)


def ints(shape: Shape, low: int = 0, high: int = 4, dtype: str = "int32") -> Arr:
    """Return random integers from low to high inclusive."""
    return Arr(shape, dtype, low, high)


def bools(shape: Shape) -> Arr:
    """Return the description of an array of truth values, for samples."""
    return Arr(shape, "bool", 0, 1)


def positive(shape: Shape, low: float = 0.1, high: float = 4.0) -> Arr:
    """Return the description of an array of positive numbers, for samples of operations such as log."""
    return Arr(shape, "float32", low, high)


def exactly(*values: Any, dtype: str = "float32", shape: Shape | None = None, ordered: bool = False) -> Arr:
    """Return an array of exactly these elements."""
    return Arr(shape if shape is not None else (len(values),), dtype, values=tuple(values), ordered=ordered)
