"""Corrections of functions that engines lack or compute otherwise, written in operations; see ``Lowerings.correct``.

In each function, the operation of its name means the engine's function.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math

from mithril import ops
from mithril.graph import Registry, Value, bool_, int64


def polynomial(x, *coefficients):
    """Return the polynomial; the last coefficient is that of the constant."""
    total = x * coefficients[0] + coefficients[1]
    for c in coefficients[2:]:
        total = total * x + c
    return total


# -- functions near 0 -------------------------------------------------------------------------------------------------
def expm1(x):
    """Return e**x - 1, by its series where the difference would cancel."""
    small = x * polynomial(x, *(1 / math.factorial(k) for k in range(10, 0, -1)))
    # From one half on the difference loses no more than two bits; below, the series is exact to 3e-11.
    return ops.where(x * x < 0.25, small, ops.exp(x) - 1.0)


def log1p(x):
    """Return log(1 + x), by the series of 2 atanh(x / (2 + x)) where the sum would be rounded."""
    z = x / (x + 2.0)
    small = z * polynomial(z * z, *(2 / k for k in range(15, 0, -2)))
    # To one half |z| is 1 / 3 at most, and the first term that is left out 1e-9 of the sum.
    return ops.where(x * x < 0.25, small, ops.log(x + 1.0))


def tanh(x):
    e = ops.expm1(ops.abs(x) * -2.0)
    return ops.where(ops.equal(x, 0.0), x, ops.where(x < 0.0, e, -e) / (e + 2.0))


def sinh(x):
    e = ops.expm1(ops.abs(x))
    # From 20 on e**-x is lost even in float64, and e**x alone would overflow before half of it does.
    y = ops.where(ops.abs(x) < 20.0, (e + e / (e + 1.0)) * 0.5, ops.exp(ops.abs(x) - math.log(2)))
    return ops.where(ops.equal(x, 0.0), x, ops.where(x < 0.0, -y, y))


def cosh(x):
    """Return half the sum of e**x and its inverse, which overflows no earlier than the result."""
    half = ops.exp(ops.abs(x) - math.log(2))
    return half + 0.25 / half


def cos(x):
    """Return the cosine by the sine of half the angle; a quarter turn is lost in large numbers."""
    half = ops.sin(x * 0.5)
    return 1.0 - half * half * 2.0


def erf(x):
    """Return the error function, by its series where an absolute error would be a large relative one."""
    series = (c * 2 / math.sqrt(math.pi) for c in (-1 / 75600, 1 / 9360, -1 / 1320, 1 / 216, -1 / 42, 0.1, -1 / 3, 1))
    # The term after the last one is 2e-11 of the result at one half.
    return ops.where(x * x < 0.25, x * polynomial(x * x, *series), ops.erf(x))


# -- nan, infinity and the signs of zeros -----------------------------------------------------------------------------
def exp(x):
    return ops.where(ops.isnan(x), x, ops.exp(x))


def sign(x):
    return ops.where(ops.isnan(x), x, ops.sign(x))


def abs_(x):
    return ops.where(ops.equal(x, 0.0), 0.0, ops.abs(x))


def round_(x):
    """Return the nearest integers with the signs of zeros."""
    return ops.where(ops.equal(x, 0.0), x, ops.where(x < 0.0, -ops.round(-x), ops.round(x)))


def trunc(x):
    return ops.where(x < 0.0, ops.ceil(x), ops.floor(x))


def maximum(a, b):
    """Return the larger element, or nan; of a number ``b`` in two steps."""
    y = ops.where(ops.less(a, b), b, a)
    return ops.where(ops.isnan(b), b, y) if isinstance(b, Value) else y


def minimum(a, b):
    y = ops.where(ops.less(b, a), b, a)
    return ops.where(ops.isnan(b), b, y) if isinstance(b, Value) else y


def clip(x, low, high):
    if x.dtype.is_integer:
        lowest, highest = x.dtype.limits
        low, high = (None if n is None else min(max(int(n), lowest), highest) for n in (low, high))
    y = x if low is None else ops.where(ops.less(x, low), low, x)
    return y if high is None else ops.where(ops.less(high, y), high, y)


def max_(x, axis, keepdims):
    return _with_nan(x, ops.max(x, axis=axis, keepdims=keepdims), axis, keepdims)


def min_(x, axis, keepdims):
    return _with_nan(x, ops.min(x, axis=axis, keepdims=keepdims), axis, keepdims)


def _with_nan(x, y, axis, keepdims):
    return ops.where(ops.any(ops.isnan(x), axis=axis, keepdims=keepdims), math.nan, y)


def max_pool(x, **window):
    has_nan = ops.max_pool(ops.cast(ops.isnan(x), x.dtype), **window)
    return ops.where(has_nan > 0.0, math.nan, ops.max_pool(x, **window))


# For engines whose maxima and minima ignore nan; semantics="native" leaves them out.
KEEPING_NAN = (maximum, minimum, max_, min_, max_pool)
NAN_IGNORED: Registry[str] = Registry(
    "native semantics", {function.__name__.removesuffix("_"): "nan may be ignored" for function in KEEPING_NAN}
)


# -- comparisons ------------------------------------------------------------------------------------------------------
def greater(a, b):
    return ops.less(b, a)


def greater_equal(a, b):
    """Return the comparison from two others; nan is neither less nor equal."""
    return ops.logical_or(ops.less(b, a), ops.equal(a, b))


def less_equal(a, b):
    return ops.logical_or(ops.less(a, b), ops.equal(a, b))


def not_equal(a, b):
    return ops.logical_not(ops.equal(a, b))


def equal(a, b):
    """Compare integers, by a function that compares them as float32."""
    return ops.equal(ops.bitwise_xor(a, b), 0)


def less(a, b):
    """Compare the upper halves of int32, and where they are equal the lower ones, which are exact in float32."""
    (p, q), (r, s) = ((ops.bitwise_and(x, -65536), ops.bitwise_and(x, 65535)) for x in (a, b))
    return ops.logical_or(ops.less(p, r), ops.logical_and(ops.equal(p, r), ops.less(q, s)))


# -- conversions and positions ----------------------------------------------------------------------------------------
def cast(x, dtype):
    """Return the values in another dtype; floats saturate at the limits of integers, and nan becomes 0."""
    if dtype is bool_:
        return ops.not_equal(x, 0)
    if not (x.dtype.is_float and dtype.is_integer):
        return ops.cast(x, dtype)
    low, high = dtype.limits
    above, below = x >= float(high), x <= float(low)
    is_inside = ops.logical_and(x > float(low), x < float(high))
    return ops.where(above, high, ops.where(below, low, ops.cast(ops.where(is_inside, x, 0.0), dtype)))


def take(x, indices, axis):
    """Return elements at positions, which count from the end if negative, and are clamped to the axis."""
    position = indices if indices.dtype.bits >= 32 else ops.cast(indices, int64)
    size = x.shape[axis]
    n = size if isinstance(size, int) else ops.cast(ops.size_value(value=size), position.dtype)
    position = ops.where(position < 0, position + n, position)
    return ops.take(x, ops.minimum(ops.maximum(position, 0), n - 1), axis=axis)


def flip(x, axis):
    """Return a slice with negative steps."""
    sizes = [x.shape[k] for k in axis]
    return ops.slice(x, [-1] * len(axis), [-n - 1 for n in sizes], [-1] * len(axis), axes=axis)


# -- products ---------------------------------------------------------------------------------------------------------
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """Return a convolution: rows of the batch are its channels, and strides and dilations change places."""
    swapped = (1, 0, *range(2, len(shape)))
    x, g = ops.transpose(x, swapped), ops.transpose(g, swapped)
    y = ops.conv(x, g, stride=dilation, padding=padding, dilation=stride)
    axes = range(2, len(shape))  # the last windows may start past the kernel
    kernel = ops.slice(y, [0] * len(axes), [shape[k] for k in axes], [1] * len(axes), axes=tuple(axes))
    return ops.transpose(kernel, swapped)
