"""ATen operators that reduce or scan axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Op
from mithril.ops import size_value
from mithril_importing import special_functions as special
from mithril_importing.arrays import as_value, reshape
from mithril_torch.importing.table import axes_of_dims, axis_of, cast, line, row


@row("sum.dim_IntList", "sum")
def sum_(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, like: Any = None) -> Any:
    return ops.sum(cast(x, like.dtype), axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("mean.dim", "mean")
def mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, like: Any = None) -> Any:
    return ops.mean(cast(x, like.dtype), axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("prod", "prod.dim_int")
def prod(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, like: Any = None) -> Any:
    return ops.prod(cast(x, like.dtype), axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("amax")
def amax(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return ops.max(x, axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("amin")
def amin(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return ops.min(x, axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("max")
def maximum_of_all(x: Any) -> Any:
    return ops.max(x)


@row("min")
def minimum_of_all(x: Any) -> Any:
    return ops.min(x)


@row("max.dim")
def max_along(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _extreme(ops.max, ops.argmax, x, dim, keepdim)


@row("min.dim")
def min_along(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _extreme(ops.min, ops.argmin, x, dim, keepdim)


def _extreme(value: Any, position: Any, x: Any, dim: int, keepdim: bool) -> Any:
    if not len(x.shape):
        return x, np.zeros((), np.int64)
    axis = axis_of(x, dim)
    positions = cast(position(x, axis=axis, keepdims=keepdim), "int64")
    return value(x, axis=(axis,), keepdims=keepdim), positions


@row("argmax")
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _position(ops.argmax, x, dim, keepdim)


@row("argmin")
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _position(ops.argmin, x, dim, keepdim)


def _position(op: Op, x: Any, dim: int | None, keepdim: bool) -> Any:
    if not len(x.shape):
        return np.zeros((), np.int64)
    if dim is not None:
        return cast(op(x, axis=axis_of(x, dim), keepdims=keepdim), "int64")
    y = cast(op(reshape(x, (-1,)), axis=0), "int64")
    return reshape(y, [1] * len(x.shape)) if keepdim else y


@row("any", "any.dim", "any.dims")
def any_(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.any(cast(x, "bool"), axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("all", "all.dim", "all.dims")
def all_(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.all(cast(x, "bool"), axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("var.correction")
def var(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Return the variance; a fractional correction scales the population's."""
    axes = axes_of_dims(x, dim)
    correction = 1 if correction is None else correction
    if correction == int(correction):
        return ops.var(x, axis=axes, keepdims=keepdim, ddof=int(correction))
    count: Any = 1
    for k in axes:
        count = count * x.shape[k]
    size = count if isinstance(count, int) else cast(as_value(size_value(value=count)), str(x.dtype))
    ratio = size / (size - correction) if isinstance(size, int) else ops.div(size, ops.sub(size, correction))
    return ops.mul(ops.var(x, axis=axes, keepdims=keepdim), ratio)


@row("std.correction")
def std(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return special.root_of_squares(var(x, dim, correction, keepdim))


@row("std_mean.correction")
def std_mean(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return std(x, dim, correction, keepdim), ops.mean(x, axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("var_mean.correction")
def var_mean(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return var(x, dim, correction, keepdim), ops.mean(x, axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("logsumexp")
def logsumexp(x: Any, dim: Any, keepdim: bool = False, like: Any = None) -> Any:
    x = cast(x, like.dtype)
    return x if not len(x.shape) else ops.logsumexp(x, axis=axes_of_dims(x, dim), keepdims=keepdim)


@row("linalg_vector_norm")
def vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    axes, x = axes_of_dims(x, dim), cast(x, dtype)
    if ord == float("inf"):
        return ops.max(ops.abs(x), axis=axes, keepdims=keepdim)
    if ord == float("-inf"):
        return ops.min(ops.abs(x), axis=axes, keepdims=keepdim)
    if ord == 0:
        return ops.sum(cast(ops.not_equal(x, 0.0), str(x.dtype)), axis=axes, keepdims=keepdim)
    if ord == 1:
        return ops.sum(ops.abs(x), axis=axes, keepdims=keepdim)
    if ord == 2:
        return special.root_of_squares(ops.sum(ops.square(x), axis=axes, keepdims=keepdim))
    lowest = 0.0 if ord > 0 else float("inf")
    total = ops.sum(_power_from_zero(ops.abs(x), ord, lowest), axis=axes, keepdims=keepdim)
    return _power_from_zero(total, 1.0 / ord, lowest)


def _power_from_zero(x: Any, exponent: float, at_zero: float) -> Any:
    """Return a power, whose gradient at 0 is 0, as in PyTorch's norms."""
    is_zero = ops.equal(x, 0.0)
    return ops.where(is_zero, at_zero, ops.pow(ops.where(is_zero, 1.0, x), float(exponent)))


@row("cumsum")
def cumsum(x: Any, dim: int, dtype: Any = None, like: Any = None) -> Any:
    return ops.cumsum(cast(x, like.dtype), axis=axis_of(x, dim)) if len(x.shape) else cast(x, like.dtype)


@row("logcumsumexp")
def logcumsumexp(x: Any, dim: int) -> Any:
    return ops.logcumsumexp(x, axis=axis_of(x, dim)) if len(x.shape) else x


@row("cumprod")
def cumprod(x: Any, dim: int, dtype: Any = None, like: Any = None) -> Any:
    return ops.cumprod(cast(x, like.dtype), axis=axis_of(x, dim)) if len(x.shape) else cast(x, like.dtype)


@row("sort", "sort.stable")
def sort(x: Any, dim: int = -1, descending: bool = False, stable: bool | None = None) -> Any:
    order = in_order(x, axis_of(x, dim), descending)
    return ops.take_along_axis(x, order, axis=axis_of(x, dim)), cast(order, "int64")


@row("argsort", "argsort.stable")
def argsort(x: Any, dim: int = -1, descending: bool = False, stable: bool | None = None) -> Any:
    return cast(in_order(x, axis_of(x, dim), descending), "int64")


def in_order(x: Any, axis: int, descending: bool) -> Any:
    """Return the positions that sort the elements; nan is the largest, and first in descending order."""
    order = ops.argsort(x, axis=axis, descending=descending)
    if not descending or "float" not in str(x.dtype) or not len(x.shape):
        return order
    count = ops.sum(cast(ops.isnan(x), "int32"), axis=(axis,), keepdims=True)
    steps = reshape(line(x.shape[axis], "int32"), [-1 if k == axis else 1 for k in range(len(x.shape))])
    return ops.take_along_axis(order, ops.sub(steps, count), axis=axis)  # negative positions count from the end


@row("topk")
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    axis = axis_of(x, dim)
    if not len(x.shape):
        return x, np.zeros((), np.int64)
    positions = first_positions(x, k, axis, largest)
    return ops.take_along_axis(x, positions, axis=axis), cast(positions, "int64")


def first_positions(x: Any, k: int, axis: int, largest: bool) -> Any:
    """Return the first ``k`` positions of `in_order` by selections, which take less time than sorting all elements."""
    is_float = "float" in str(x.dtype)
    if not largest:
        return ops.top_k(ops.neg(x) if is_float else ops.bitwise_not(x), k=k, axis=axis)[1]
    numbers = ops.top_k(x, k=k, axis=axis)[1]
    if not is_float or k == 0:
        return numbers
    is_nan = cast(ops.isnan(x), "int32")
    count = ops.sum(is_nan, axis=(axis,), keepdims=True)
    places = ops.sub(reshape(line(k, "int32"), [-1 if n == axis else 1 for n in range(len(x.shape))]), count)
    after = ops.take_along_axis(numbers, ops.maximum(places, 0), axis=axis)
    return ops.where(ops.less(places, 0), ops.top_k(is_nan, k=k, axis=axis)[1], after)
