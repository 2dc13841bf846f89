"""Operators on sizes: vectors of ints and symbolic dims, computed at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mithril.graph import Dim, Size, at_most, equal, product
from mithril_onnx.values import Array, sizes_array


class NoSizesError(Exception):
    """The result is not a vector of sizes; the operator runs on values instead."""


def _objects(x: Array) -> Array:
    """Return the elements as ints and dims."""
    out = np.empty(x.shape, object)
    for index in np.ndindex(x.shape):
        item = x[index]
        out[index] = item if isinstance(item, Dim) else int(item)
        if not isinstance(item, Dim) and item != int(item):
            raise NoSizesError
    return out


def _result(x: Any) -> Array:
    """Return int64 if no element is symbolic any more."""
    array = np.asarray(x, object)
    if any(isinstance(d, Dim) for d in array.reshape(-1)):
        return array
    return array.astype(np.int64)


def _pair(a: Array, b: Array) -> tuple[Any, Any]:
    """Return both operands as objects, broadcast to one shape."""
    x, y = np.broadcast_arrays(_objects(a), _objects(b))
    return x, y


def _binary(function: Callable[[Size, Size], Any]) -> Callable[..., Array]:
    def compute(a: Array, b: Array) -> Array:
        x, y = _pair(a, b)
        out = np.empty(x.shape, object)
        for index in np.ndindex(x.shape):
            out[index] = function(x[index], y[index])
        return _result(out)

    return compute


def _divided(a: Size, b: Size) -> Size:
    return a // b


def _remainder(a: Size, b: Size) -> Size:
    return a % b


def _compared(function: Callable[[Size, Size], bool | None]) -> Callable[..., Array]:
    def compute(a: Array, b: Array) -> Array:
        x, y = _pair(a, b)
        out = np.empty(x.shape, np.bool_)
        for index in np.ndindex(x.shape):
            decided = function(x[index], y[index])
            if decided is None:
                raise NoSizesError
            out[index] = decided
        return out

    return compute


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
    return _result(np.where(condition, _objects(a), _objects(b)))


def _cast(x: Array, *, to: int, saturate: int = 1, round_mode: str = "") -> Array:  # english: ok, an attribute of ONNX
    if to not in (6, 7, 12, 13):
        raise NoSizesError
    return _result(_objects(x))


def _gather(x: Array, indices: Array, *, axis: int = 0) -> Array:
    if indices.dtype == object or not x.ndim:
        raise NoSizesError
    out = np.empty(0, object)
    axis = axis % x.ndim
    positions = np.where(indices < 0, indices + x.shape[axis], indices)
    if positions.ndim == 0:
        selected = x[(slice(None),) * axis + (int(positions),)]
        if not isinstance(selected, np.ndarray):
            out = np.empty((), object)
            out[()] = selected
            return _result(out)
        return _result(selected)
    return _result(np.take(_objects(x), positions.astype(np.int64), axis))


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
    return _result(x[tuple(index)])


def _concat(*xs: Array, axis: int = 0) -> Array:
    return _result(np.concatenate([_objects(x) for x in xs], axis))


def _axes(axes: Any) -> tuple[int, ...] | None:
    return None if axes is None else tuple(int(a) for a in np.atleast_1d(axes))


def _squeeze(x: Array, data: Array | None = None, *, axes: Any = None) -> Array:
    return _result(np.squeeze(_objects(x), _axes(data if data is not None else axes)))


def _unsqueeze(x: Array, data: Array | None = None, *, axes: Any = None) -> Array:
    return _result(np.expand_dims(_objects(x), _axes(data if data is not None else axes) or ()))


def _reshape(x: Array, shape: Array, *, allowzero: int = 0) -> Array:
    if shape.dtype == object:
        raise NoSizesError
    return _result(_objects(x).reshape(tuple(int(n) for n in shape)))


def _product(x: Array, data: Array | None = None, *, axes: Any = None, keepdims: int = 1, **_: Any) -> Array:
    if x.ndim != 1:
        raise NoSizesError
    total = product([d if isinstance(d, Dim) else int(d) for d in x])
    return _result(sizes_array([total]) if keepdims else sizes_array(total))


def _split(x: Array, data: Array | None = None, *, axis: int = 0, split: Any = None, num_outputs: Any = None) -> Any:
    if x.ndim != 1 or (data is None and split is None):
        raise NoSizesError
    parts = np.atleast_1d(data if data is not None else split).astype(int)
    return tuple(_result(p) for p in np.split(_objects(x), np.cumsum(parts)[:-1]))


def _expand(x: Array, shape: Array) -> Array:
    if shape.dtype == object:
        raise NoSizesError
    target = np.broadcast_shapes(x.shape, tuple(int(n) for n in shape))
    return _result(np.broadcast_to(_objects(x), target))


def _identity(x: Array) -> Array:
    return x


SIZES: dict[str, Callable[..., Any]] = {
    "Add": _binary(lambda a, b: a + b),
    "Sub": _binary(lambda a, b: a - b),
    "Mul": _binary(lambda a, b: a * b),
    "Div": _binary(_divided),
    "Mod": _binary(_remainder),
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
    "Identity": _identity,
}


def _extreme(name: str) -> Callable[..., Array]:
    from mithril.graph import maximum, minimum

    return _binary(maximum if name == "Max" else minimum)


SIZES |= {name: _extreme(name) for name in ("Max", "Min")}
