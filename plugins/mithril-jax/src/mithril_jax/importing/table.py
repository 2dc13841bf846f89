"""The table of JAX's primitives: one function of tensors each, with the primitive's parameters as keywords.

A tensor is a value of the graph, or a NumPy array where it is known while the model is built. Sizes are ints or Dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder, Value, dtype as as_dtype, is_static

ROWS: dict[str, Callable[..., Any]] = {}


def row(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function for primitives."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        ROWS.update(dict.fromkeys(names, function))
        return function

    return enter


def as_value(x: Any) -> Value:
    """Return a tensor as a value of the graph."""
    return x if isinstance(x, Value) else Builder.current().constant(np.asarray(x))


def kind_of(x: Any) -> str:
    """Return the name of a tensor's dtype."""
    return str(x.dtype)


def cast(x: Any, dtype: Any) -> Any:
    """Return a tensor with this dtype."""
    kind = as_dtype(str(np.dtype(dtype)))
    if isinstance(x, Value):
        return x if x.dtype is kind else ops.cast(x, dtype=kind)
    return np.asarray(ops.cast(np.asarray(x), dtype=kind))


def reshape(x: Any, shape: Any) -> Any:
    return ops.reshape(x if is_static(tuple(shape)) else as_value(x), shape=tuple(shape))


def broadcast(x: Any, shape: Any) -> Any:
    return ops.broadcast_to(x if is_static(tuple(shape)) else as_value(x), shape=tuple(shape))


def line(shape: Any, axis: int) -> Any:
    """Return 0, 1, ... along an axis as int32."""
    return ops.iota(shape=tuple(shape), axis=axis, dtype="int32")


def arrays_of(result: Any) -> Any:
    """Return results with NumPy's scalars as arrays."""
    if isinstance(result, (tuple, list)):
        return tuple(arrays_of(r) for r in result)
    return np.asarray(result) if isinstance(result, np.generic) else result
