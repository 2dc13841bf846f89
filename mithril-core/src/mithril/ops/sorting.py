"""Sorting: stable, nan last in either direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    Axis,
    ShapeError,
    Size,
    TensorType,
    always,
    at_most,
    composite,
    dtype as as_dtype,
    exactly,
    int32,
    ints,
    like,
    op,
    product,
    same_shape,
    sample,
)
from mithril.ops.along_axis import scatter_add_along_axis, take_along_axis
from mithril.ops.creation import full
from mithril.ops.slicing import narrow


def _order(x: np.ndarray[Any, Any], axis: int, descending: bool) -> np.ndarray[Any, Any]:
    kind = as_dtype(x.dtype)
    if kind.is_float:
        key = x if kind.bits > 16 else x.astype(np.float32)
        key = -key if descending else key  # nan stays nan, and NumPy sorts it last
    else:
        key = ~x if descending else x  # reverses the order without overflow
    return np.argsort(key, axis=axis, kind="stable")


def _comparisons(types: Sequence[Any], results: Sequence[TensorType], attributes: Mapping[str, Any]) -> Size:
    size = types[0].shape[attributes["axis"]]
    return product(types[0].shape) * (size.bit_length() if isinstance(size, int) else 10)


SAMPLES = [
    sample((3, 5)),
    sample((5, 2), axis=0, descending=True, label="descending"),
    sample(exactly(2.0, float("nan"), -0.0, 0.0, float("inf"), 2.0, float("-inf")), label="special", gradient=False),
    sample(
        exactly(2.0, float("nan"), -1.0, float("inf"), 2.0, float("nan")),
        descending=True,
        label="special descending",
        gradient=False,
    ),
    sample(ints((4, 6), -3, 3), descending=True, label="ties"),
]


@op(shape=same_shape, dtype=like, flops=_comparisons, samples=SAMPLES, axes="*x -> *x | x[axis] whole", moves=True)
def sort(x, *, axis: Axis = -1, descending: bool = False):
    """Elements sorted along an axis; the sort is stable, and nan is last in either direction."""
    return np.take_along_axis(x, _order(x, axis, descending), axis)


@sort.vjp
def _(g, y, x, *, axis, descending):
    back = argsort(argsort(x, axis=axis, descending=descending), axis=axis)
    return (take_along_axis(g, back, axis=axis),)


@op(shape=same_shape, dtype=always(int32), flops=_comparisons, samples=SAMPLES, axes="*x -> *x | x[axis] whole")
def argsort(x, *, axis: Axis = -1, descending: bool = False):
    """Positions, int32, that sort the elements; the sort is stable, and nan is last in either direction."""
    return _order(x, axis, descending).astype(np.int32)


argsort.no_vjp("positions are integers")


@composite(
    results=("values", "indices"),
    samples=[
        sample((3, 6), k=2),
        sample((4, 3), k=4, axis=0, label="axis"),
        sample(exactly(1.0, float("nan"), 3.0, 3.0, float("-inf")), k=4, label="special", gradient=False),
    ],
)
def top_k(x, *, k: int, axis: Axis = -1):
    """The k largest elements along an axis, in descending order, and their positions (int32); ties in order."""
    size = x.shape[axis]
    if k < 0 or at_most(k, size) is False:
        raise ShapeError(f"top_k: k={k} exceeds the {size} elements of axis {axis}", facts=[f"accepted: 0 to {size}"])
    indices = narrow(argsort(x, axis=axis, descending=True), axis, 0, k)
    return take_along_axis(x, indices, axis=axis), indices


@top_k.vjp
def _(g, y, x, *, k, axis):
    return (scatter_add_along_axis(full(shape=x.shape, value=0, dtype=x.dtype), y[1], g[0], axis=axis),)


__all__ = ["argsort", "sort", "top_k"]
