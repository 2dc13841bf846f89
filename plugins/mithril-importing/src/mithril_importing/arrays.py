"""Tensors that are arrays where they are known at import, and values of the graph elsewhere; vectors of sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder, Dim, DType, Size, Value, int64, is_static

Array = np.ndarray[Any, Any]


def as_value(x: Any, dtype: DType = int64) -> Value:
    """Return a tensor as a value of the current graph; symbolic sizes get the dtype."""
    if isinstance(x, Value):
        return x
    if is_sizes(x):
        elements = [ops.cast(ops.size_value(value=d), dtype=dtype) for d in x.reshape(-1)]
        flat = ops.stack(*elements) if elements else np.zeros(0, dtype.numpy)
        value: Value = ops.reshape(as_value(flat), shape=x.shape)
        return value
    return Builder.current().constant(np.asarray(x))


def reshape(x: Any, shape: Any) -> Any:
    """Reshape; an array becomes a value for symbolic sizes only."""
    shape = tuple(shape)
    return ops.reshape(x if is_static(shape) else as_value(x), shape=shape)


def broadcast(x: Any, shape: Any) -> Any:
    """Broadcast; an array becomes a value for symbolic sizes only."""
    shape = tuple(shape)
    return ops.broadcast_to(x if is_static(shape) else as_value(x), shape=shape)


def converted(x: Any, dtype: DType) -> Any:
    """Return a tensor with this dtype: references convert arrays as programs convert values."""
    if isinstance(x, Value):
        return x if x.dtype is dtype else ops.cast(x, dtype=dtype)
    array = np.asarray(x)
    return array if array.dtype == dtype.numpy else np.asarray(ops.cast(array, dtype=dtype))


def arrays_of(result: Any) -> Any:
    """Return results with NumPy's scalars as arrays."""
    if isinstance(result, (tuple, list)):
        return tuple(arrays_of(r) for r in result)
    return np.asarray(result) if isinstance(result, np.generic) else result


# -- sizes --------------------------------------------------------------------------------------------------------
def is_sizes(x: Any) -> bool:
    """Whether x is an array of sizes, of which at least one is symbolic."""
    return isinstance(x, np.ndarray) and x.dtype == object


def sizes_of(x: Array) -> tuple[Size, ...]:
    """Return the elements of an array as ints and Dims."""
    return tuple(d if isinstance(d, Dim) else int(d) for d in x.reshape(-1))


def sizes_array(sizes: Sequence[Size] | Size, dtype: DType = int64) -> Array:
    """Return sizes as an array of integers, or of objects if one of them is symbolic."""
    if isinstance(sizes, Dim):
        return as_sizes(_objects([sizes], ()), dtype)
    if isinstance(sizes, (int, np.integer)):
        return np.asarray(sizes, dtype.numpy)
    return as_sizes(_objects(sizes, (len(sizes),)), dtype)


def as_sizes(x: Any, dtype: DType = int64) -> Array:
    """Return an array of ints and Dims as integers if none is symbolic any more."""
    array = _objects([x], ()) if isinstance(x, Dim) else np.asarray(x, object)
    return array if any(isinstance(d, Dim) for d in array.reshape(-1)) else array.astype(dtype.numpy)


def on_sizes(function: Callable[[Size, Size], Any], a: Array, b: Array) -> Array:
    """Apply a function of two sizes to the elements of broadcast arrays."""
    x, y = np.broadcast_arrays(a, b)
    return as_sizes(_objects([function(*pair) for pair in zip(sizes_of(x), sizes_of(y), strict=True)], x.shape))


def _objects(elements: Sequence[Any], shape: Sequence[int]) -> Array:
    # NumPy would ask a Dim for its length, or compare it, if it converted the list.
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)
