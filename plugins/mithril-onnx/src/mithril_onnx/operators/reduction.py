"""Reductions, arg-extrema, cumulative sums, sorting."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril_importing.special_functions import root_of_squares
from mithril_onnx.operators.common import axes_of, float32_or_wider, int64, scalar
from mithril_onnx.table import Known, Sizes, operator


def _selected(x, axes, noop):
    """Return the axes to reduce; None if the operator changes nothing."""
    if axes is None or len(axes) == 0:
        return None if noop else tuple(range(x.ndim))
    return axes_of(axes, x.ndim)


def _extreme(x, function, axis, keepdims, lowest):
    # The standard defines the extreme of an empty set as the limit of the dtype.
    if any(type(x.shape[a]) is int and x.shape[a] == 0 for a in axis):
        shape = tuple((1 if k in axis else n) for k, n in enumerate(x.shape) if keepdims or k not in axis)
        kind = x.dtype
        if kind.is_float:
            value = -float("inf") if lowest else float("inf")
        else:
            value = kind.limits[0] if lowest else kind.limits[1]
        return ops.full(shape=shape, value=bool(value) if kind.is_bool else value, dtype=kind)
    if x.dtype.is_bool:
        return (ops.any if lowest else ops.all)(x, axis=axis, keepdims=keepdims)
    return function(x, axis=axis, keepdims=keepdims)


def _in_own_dtype(function):
    """Sums of integers keep their dtype."""

    def reduce(x, axis, keepdims):
        return ops.cast(function(x, axis=axis, keepdims=keepdims), dtype=x.dtype)

    return reduce


def _mean(x, axis, keepdims):
    if x.dtype.is_float:
        return ops.mean(x, axis=axis, keepdims=keepdims)
    return ops.cast(ops.mean(ops.cast(x, dtype="float64"), axis=axis, keepdims=keepdims), dtype=x.dtype)


def _by_floats(function):
    """Compute integers in float64 and convert back."""

    def reduce(x, axis, keepdims):
        if x.dtype.is_float:
            return function(x, axis, keepdims)
        return ops.cast(function(ops.cast(x, dtype="float64"), axis, keepdims), dtype=x.dtype)

    return reduce


def _logsumexp(x, axis, keepdims):
    return ops.logsumexp(x, axis=axis, keepdims=keepdims)


REDUCTIONS = {
    "ReduceSum": _in_own_dtype(ops.sum),
    "ReduceProd": _in_own_dtype(ops.prod),
    "ReduceMean": _mean,
    "ReduceMax": lambda x, axis, keepdims: _extreme(x, ops.max, axis, keepdims, True),
    "ReduceMin": lambda x, axis, keepdims: _extreme(x, ops.min, axis, keepdims, False),
    "ReduceL1": lambda x, axis, keepdims: ops.cast(ops.sum(ops.abs(x), axis=axis, keepdims=keepdims), dtype=x.dtype),
    "ReduceL2": _by_floats(lambda x, axis, keepdims: root_of_squares(ops.sum(x * x, axis=axis, keepdims=keepdims))),
    "ReduceSumSquare": _in_own_dtype(lambda x, axis, keepdims: ops.sum(x * x, axis=axis, keepdims=keepdims)),
    "ReduceLogSum": _by_floats(lambda x, axis, keepdims: ops.log(ops.sum(x, axis=axis, keepdims=keepdims))),
    "ReduceLogSumExp": _by_floats(_logsumexp),
}
ELEMENTWISE: dict[str, Any] = {
    "ReduceL1": ops.abs,
    "ReduceL2": ops.abs,
    "ReduceSumSquare": lambda x: x * x,
    "ReduceLogSum": ops.log,
}


def _reduction(name, function):
    def apply(x, axes: Sizes = None, *, keepdims=1, noop_with_empty_axes=0):
        selected = _selected(x, axes, noop_with_empty_axes)
        if selected is None:
            return ELEMENTWISE.get(name, lambda y: y)(x)
        return function(x, selected, bool(keepdims))

    operator(apply, name=name)


for _name, _function in REDUCTIONS.items():
    _reduction(_name, _function)


def _position(name, function):
    def apply(x, *, axis=0, keepdims=1, select_last_index=0):
        axis = axis % x.ndim
        # The first extreme of the reversed axis is the last one.
        if select_last_index:
            last = x.shape[axis] - 1
            y = scalar(last, np.zeros((), np.int32)) - function(ops.flip(x, axis=(axis,)), axis=axis)
        else:
            y = function(x, axis=axis)
        y = int64(y)
        return ops.unsqueeze(y, axis=(axis,)) if keepdims else y

    operator(apply, name=name)


_position("ArgMax", ops.argmax)
_position("ArgMin", ops.argmin)


@operator
def CumSum(x, axis: Known, *, exclusive=0, reverse=0):
    place = int(np.asarray(axis).reshape(-1)[0])
    return ops.cast(ops.cumsum(x, axis=place, reverse=bool(reverse), exclusive=bool(exclusive)), dtype=x.dtype)


@operator
def CumProd(x, axis: Known, *, exclusive=0, reverse=0):
    place = int(np.asarray(axis).reshape(-1)[0])
    return ops.cast(ops.cumprod(x, axis=place, reverse=bool(reverse), exclusive=bool(exclusive)), dtype=x.dtype)


@operator
def TopK(x, k: Known, *, axis=-1, largest=1, sorted=1):
    count = int(np.asarray(k).reshape(-1)[0])
    if largest:
        values, indices = ops.top_k(x, k=count, axis=axis)
    else:
        axis = axis % x.ndim
        order = ops.argsort(x, axis=axis)
        indices = ops.slice(order, starts=(0,), stops=(count,), steps=(1,), axes=(axis,))
        values = ops.take_along_axis(x, indices, axis=axis)
    return values, int64(indices)


@operator
def LpNormalization(x, *, axis=-1, p=2):
    size = (
        ops.sum(ops.abs(x), axis=axis, keepdims=True) if p == 1 else ops.sqrt(ops.sum(x * x, axis=axis, keepdims=True))
    )
    zero = ops.equal(size, 0.0)
    return ops.where(zero, scalar(0.0, x), x / ops.where(zero, scalar(1.0, x), size))


@operator
def GlobalLpPool(x, *, p=2):
    axes = tuple(range(2, x.ndim))
    return ops.pow(ops.sum(ops.pow(ops.abs(x), float(p)), axis=axes, keepdims=True), 1.0 / p)


@operator
def GlobalAveragePool(x):
    return ops.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@operator
def GlobalMaxPool(x):
    return ops.max(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@operator
def MeanVarianceNormalization(x, *, axes=(0, 2, 3)):
    mean = ops.mean(x, axis=axes, keepdims=True)
    deviation = x - mean
    # Added to the deviation, not to the variance, as in the function that the standard gives for this
    # operator.
    return deviation / (ops.sqrt(ops.mean(deviation * deviation, axis=axes, keepdims=True)) + 1e-9)


_ = float32_or_wider
