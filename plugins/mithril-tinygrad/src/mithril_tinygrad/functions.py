"""Operations that take several calls of tinygrad; parameters are named like operands and attributes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from mithril_tinygrad.arrays import of_numpy


def on_host(function: Callable[..., Any], types: Any, *operands: Tensor | None) -> list[Tensor]:
    """Call a function of NumPy arrays."""
    with np.errstate(all="ignore"):
        return [of_numpy(y) for y in function(*(None if x is None else x.numpy() for x in operands))]


# -- element-wise -----------------------------------------------------------------------------------------------------
def series(x: Tensor, *coefficients: float) -> Tensor:
    """Return a polynomial; the last coefficient is that of the constant."""
    total = x * 0.0 + coefficients[0]
    for c in coefficients[1:]:
        total = total * x + c
    return total


def expm1_(x: Tensor) -> Tensor:
    """e**x - 1, by its series where the difference would cancel."""
    small = x * series(x, *(1 / math.factorial(k) for k in range(12, 0, -1)))
    return (x.abs() < 0.5).where(small, x.exp() - 1)


def log1p_(x: Tensor) -> Tensor:
    """log(1 + x), by the series of 2 atanh(x / (2 + x)) where the sum would be rounded."""
    z = x / (x + 2)
    small = z * series(z * z, *(2 / k for k in range(15, 0, -2)))
    return (x.abs() < 0.5).where(small, (x + 1).log())


def cos_(x: Tensor) -> Tensor:
    return 1 - 2 * (x / 2).sin().square()  # tinygrad adds a quarter turn, which is rounded for large numbers


def abs_(x: Tensor) -> Tensor:
    return (x == 0).where(0, x.abs())  # tinygrad returns -0.0


def round_(x: Tensor) -> Tensor:
    """Return the nearest integers with the signs of zero, which tinygrad loses."""
    return (x == 0).where(x, (x < 0).where(-(-x).round(), x.round()))


def tanh_(x: Tensor) -> Tensor:
    e = expm1_(-2.0 * x.abs())
    return (x < 0).where(e, -e) / (e + 2)


def sinh_(x: Tensor) -> Tensor:
    e = expm1_(x.abs())
    y = (x.abs() < 20).where((e + e / (e + 1)) / 2, (x.abs() - math.log(2)).exp())
    return (x == 0).where(x, (x < 0).where(-y, y))


def cosh_(x: Tensor) -> Tensor:
    half = (x.abs() - math.log(2)).exp()
    return half + 0.25 / half


def erf_(x: Tensor) -> Tensor:
    """Return the error function; tinygrad's has a small absolute but a large relative error near 0."""
    series_at_0 = x * series(x * x, *(c * 2 / math.sqrt(math.pi) for c in _ERF))
    return (x.abs() < 0.5).where(series_at_0, x.erf())


_ERF = [1 / c for c in (-75600, 9360, -1320, 216, -42, 10, -3, 1)]


def sign_(x: Tensor) -> Tensor:
    return (x == x).where(x.sign(), x)


def greater_equal_(a: Tensor, b: Tensor) -> Tensor:
    """Return the comparison, which tinygrad negates: nan is not less than a number."""
    return (a > b) | (a == b)


def less_equal_(a: Tensor, b: Tensor) -> Tensor:
    return (a < b) | (a == b)


def maximum_(a: Tensor, b: Tensor) -> Tensor:
    """Return the larger element, or nan; of a constant ``b`` this takes no more than tinygrad's."""
    return b.isnan().where(b, (a < b).where(b, a)) if a.is_floating_point() else a.maximum(b)


def minimum_(a: Tensor, b: Tensor) -> Tensor:
    return b.isnan().where(b, (a > b).where(b, a)) if a.is_floating_point() else a.minimum(b)


def clip_(x: Tensor, low: float | None, high: float | None) -> Tensor:
    y = x if low is None else (x < low).where(low, x)
    return (y if high is None else (y > high).where(high, y)).cast(x.dtype)


def cast_(x: Tensor, dtype: Any) -> Tensor:
    """Return the values in another dtype; floats saturate at the limits of integers."""
    if dtype == dtypes.bool:
        return x != 0
    if not x.is_floating_point() or not dtypes.is_int(dtype):
        return x.cast(dtype)
    above, below = x > float(dtype.min), x < float(dtype.max)
    limited = (above & below).where(x, 0.0).cast(dtype)
    return x.isnan().where(0, above.where(below.where(limited, dtype.max), dtype.min)).cast(dtype)


# -- along axes -------------------------------------------------------------------------------------------------------
def reduced(x: Tensor, name: str, axis: tuple[int, ...], keepdims: bool, **settings: Any) -> Tensor:
    """Call a reduction, which tinygrad applies to all axes where none are given."""
    if axis:
        return getattr(x, name)(axis, keepdim=keepdims, **settings)
    return x != 0 if name in ("any", "all") else x.cast(settings.get("dtype", x.dtype))


def max_(x: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    """Return the largest elements, or nan."""
    return _with_nan(x, reduced(x, "max", axis, keepdims), axis, keepdims)


def min_(x: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    return _with_nan(x, reduced(x, "min", axis, keepdims), axis, keepdims)


def _with_nan(x: Tensor, y: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    return reduced(x.isnan(), "any", axis, keepdims).where(math.nan, y) if x.is_floating_point() else y


def cumsum_(x: Tensor, axis: int, reverse: bool, exclusive: bool) -> Tensor:
    y = x.flip(axis) if reverse else x
    total = y.cumsum(axis).cast(x.dtype)
    if exclusive:
        ends = [(1, 0) if k == axis else (0, 0) for k in range(x.ndim)]
        total = total.pad(ends).shrink(tuple((0, n) for n in x.shape))
    return total.flip(axis) if reverse else total


def iota_(shape: tuple[int, ...], axis: int, dtype: Any) -> Tensor:
    row = Tensor.arange(shape[axis], dtype=dtypes.int64)
    return cast_(row.reshape([-1 if k == axis else 1 for k in range(len(shape))]).expand(shape), dtype)


def take_(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    n = x.shape[axis]
    index = indices.cast(dtypes.int64)
    index = (index < 0).where(index + n, index)
    return x[(*[slice(None)] * axis, index.maximum(0).minimum(n - 1))]


# -- windows ----------------------------------------------------------------------------------------------------------
def conv_(x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    padded = x.pad(((0, 0), (0, 0), *padding)) if any(map(any, padding)) else x
    return padded.conv2d(w, None, groups, stride, dilation)


def conv_input_grad_(g: Tensor, w: Tensor, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    x = Tensor.zeros(shape, dtype=g.dtype, device="CPU").contiguous()
    return conv_(x, w, stride, padding, dilation, groups).gradient(x, gradient=g)[0]


def conv_weight_grad_(
    x: Tensor, g: Tensor, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    w = Tensor.zeros(shape, dtype=g.dtype, device="CPU").contiguous()
    return conv_(x, w, stride, padding, dilation, groups).gradient(w, gradient=g)[0]


def max_pool_(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Return the largest elements of windows, or nan."""
    y = native_max_pool(x, kernel, stride, padding, dilation)
    has_nan = native_max_pool(x.isnan().cast(x.dtype), kernel, stride, padding, dilation)
    return (has_nan > 0).where(math.nan, y)


def native_max_pool(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    padded = x.pad(((0, 0), (0, 0), *padding), value=-math.inf) if any(map(any, padding)) else x
    return padded.max_pool2d(kernel, stride, dilation)
