"""Operators on sizes: vectors of ints and symbolic dims, computed at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mithril.graph import Size, at_most, equal, maximum, minimum, product
from mithril_importing.arrays import Array, as_sizes, is_sizes, on_sizes, sizes_array, sizes_of


class NoSizesError(Exception):
    """The result is not a vector of sizes; the operator runs on values instead."""


def _integers(x: Array) -> Array:
    """Return an array whose elements are ints and Dims."""
    if is_sizes(x):
        return x
    integers = x.astype(np.int64)
    if (integers != x).any():
        raise NoSizesError
    return integers.astype(object)


def _binary(function: Callable[[Size, Size], Any]) -> Callable[..., Array]:
    return lambda a, b: on_sizes(function, _integers(a), _integers(b))


def _compared(function: Callable[[Size, Size], bool | None]) -> Callable[..., Array]:
    def decided(a: Size, b: Size) -> bool:
        result = function(a, b)
        if result is None:
            raise NoSizesError
        return result

    return lambda a, b: on_sizes(decided, _integers(a), _integers(b)).astype(np.bool_)


def _not(decided: bool | None) -> bool | None:
    return None if decided is None else not decided


def _equal(a: Size, b: Size) -> bool | None:
    """Sizes are not negative, so a symbol differs from -1 although its bounds may be open."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if (isinstance(a, int) and a < 0) or (isinstance(b, int) and b < 0):
        return False
    return equal(a, b)


def _where(condition: Array, a: Array, b: Array) -> Array:
    if condition.dtype != np.bool_:
        raise NoSizesError
    return as_sizes(np.where(condition, _integers(a), _integers(b)))


def _cast(x: Array, *, to: int, saturate: int = 1, round_mode: str = "") -> Array:  # english: ok, an attribute of ONNX
    if to not in (6, 7, 12, 13):
        raise NoSizesError
    return as_sizes(_integers(x))


def _gather(x: Array, indices: Array, *, axis: int = 0) -> Array:
    if indices.dtype == object or not x.ndim:
        raise NoSizesError
    return as_sizes(x[(slice(None),) * (axis % x.ndim) + (indices.astype(np.int64)[()],)])


def _slice(
    x: Array, starts: Array | None = None, ends: Array | None = None, axes: Array | None = None,
    steps: Array | None = None, **attributes: Any,
) -> Array:  # fmt: skip
    starts, ends, axes = (attributes.get(n, v) for n, v in (("starts", starts), ("ends", ends), ("axes", axes)))
    if any(v is not None and np.asarray(v).dtype == object for v in (starts, ends, axes, steps)) or starts is None:
        raise NoSizesError
    rank = len(np.atleast_1d(starts))
    numbers = np.arange(rank) if axes is None else np.atleast_1d(axes)
    jumps = np.ones(rank, int) if steps is None else np.atleast_1d(steps)
    index = [slice(None)] * x.ndim
    assert ends is not None
    for a, start, end, step in zip(numbers, np.atleast_1d(starts), np.atleast_1d(ends), jumps, strict=True):
        stop: int | None = int(end)
        if step < 0 and end < -x.shape[a]:
            stop = None
        index[int(a)] = slice(int(start), stop, int(step))
    return as_sizes(x[tuple(index)])


def _concat(*xs: Array, axis: int = 0) -> Array:
    return as_sizes(np.concatenate([_integers(x) for x in xs], axis))


def _axes(axes: Any) -> tuple[int, ...] | None:
    return None if axes is None else tuple(int(a) for a in np.atleast_1d(axes))


def _squeeze(x: Array, data: Array | None = None, *, axes: Any = None) -> Array:
    return as_sizes(np.squeeze(_integers(x), _axes(data if data is not None else axes)))


def _unsqueeze(x: Array, data: Array | None = None, *, axes: Any = None) -> Array:
    return as_sizes(np.expand_dims(_integers(x), _axes(data if data is not None else axes) or ()))


def _reshape(x: Array, shape: Array, *, allowzero: int = 0) -> Array:
    if shape.dtype == object:
        raise NoSizesError
    return as_sizes(_integers(x).reshape(tuple(int(n) for n in shape)))


def _product(x: Array, data: Array | None = None, *, axes: Any = None, keepdims: int = 1, **_: Any) -> Array:
    if x.ndim != 1:
        raise NoSizesError
    total = product(sizes_of(x))
    return as_sizes(sizes_array([total]) if keepdims else sizes_array(total))


def _split(x: Array, data: Array | None = None, *, axis: int = 0, split: Any = None, num_outputs: Any = None) -> Any:
    if x.ndim != 1 or (data is None and split is None):
        raise NoSizesError
    parts = np.atleast_1d(data if data is not None else split).astype(int)
    return tuple(as_sizes(p) for p in np.split(_integers(x), np.cumsum(parts)[:-1]))


def _expand(x: Array, shape: Array) -> Array:
    if shape.dtype == object:
        raise NoSizesError
    target = np.broadcast_shapes(x.shape, tuple(int(n) for n in shape))
    return as_sizes(np.broadcast_to(_integers(x), target))


SIZES: dict[str, Callable[..., Any]] = {
    "Add": _binary(lambda a, b: a + b),
    "Sub": _binary(lambda a, b: a - b),
    "Mul": _binary(lambda a, b: a * b),
    "Div": _binary(lambda a, b: a // b),
    "Mod": _binary(lambda a, b: a % b),
    "Equal": _compared(_equal),
    "Less": _compared(lambda a, b: _not(at_most(b, a))),
    "Greater": _compared(lambda a, b: _not(at_most(a, b))),
    "LessOrEqual": _compared(at_most),
    "GreaterOrEqual": _compared(lambda a, b: at_most(b, a)),
    "Where": _where,
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "ReduceProd": _product,
    "Split": _split,
    "Expand": _expand,
    "Identity": lambda x: x,
    "Max": _binary(maximum),
    "Min": _binary(minimum),
}
