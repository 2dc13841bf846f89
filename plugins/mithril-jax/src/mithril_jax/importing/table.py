"""The table of JAX's primitives: one function of tensors each, with the primitive's parameters as keywords.

A tensor is a value of the graph, or a NumPy array where it is known while the model is built. Sizes are ints or Dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import dtype as as_dtype
from mithril_importing.arrays import converted

ROWS: dict[str, Callable[..., Any]] = {}


def row(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function for primitives."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        ROWS.update(dict.fromkeys(names, function))
        return function

    return enter


def kind_of(x: Any) -> str:
    """Return the name of a tensor's dtype."""
    return str(x.dtype)


def cast(x: Any, dtype: Any) -> Any:
    """Return a tensor with this dtype."""
    return converted(x, as_dtype(str(np.dtype(dtype))))


def line(shape: Any, axis: int) -> Any:
    """Return 0, 1, ... along an axis as int32."""
    return ops.iota(shape=tuple(shape), axis=axis, dtype="int32")
