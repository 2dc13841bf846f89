"""Functions of real values that are compositions of mithril's operations."""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril.graph import dtype as as_dtype


def _bits(x: Any) -> Any:
    return ops.bitcast(x, dtype=as_dtype(f"int{x.dtype.bits}"))


def signbit(x: Any) -> Any:
    """Whether the sign bit is set, also that of -0 and of nan."""
    return ops.less(_bits(x), 0)


def copysign(x: Any, y: Any) -> Any:
    return ops.where(ops.equal(signbit(x), signbit(y)), x, -x)


def signed(size: Any, like: Any) -> Any:
    """Return a size with the sign of a number, also of -0, by arithmetic that every engine has."""
    negative = ops.logical_or(like < 0.0, ops.logical_and(ops.equal(like, 0.0), 1.0 / like < 0.0))
    return ops.where(negative, -size, size)


def hypot(x: Any, y: Any) -> Any:
    """Return the root of x^2 + y^2 without overflow; inf if an operand is infinite, even next to nan."""
    x, y = ops.abs(x), ops.abs(y)
    large, small = ops.maximum(x, y), ops.minimum(x, y)
    scale = ops.where(ops.equal(large, 0.0), 1.0, large)
    ratio = small / scale
    size = large * ops.sqrt(ratio * ratio + 1.0)
    return ops.where(ops.logical_or(ops.equal(x, math.inf), ops.equal(y, math.inf)), math.inf, size)


def logaddexp(x: Any, y: Any) -> Any:
    high = ops.maximum(x, y)
    total = high + ops.log1p(ops.exp(-ops.abs(x - y)))
    return ops.where(ops.equal(x, y), high + math.log(2.0), total)  # also of two equal infinities


def log10(x: Any) -> Any:
    """Return the logarithm to base 10; powers of ten have integer logarithms."""
    y = ops.log(x) / math.log(10.0)
    integral = ops.round(y)
    return ops.where(ops.equal(ops.pow(ops.full(shape=(), value=10.0, dtype=x.dtype), integral), x), integral, y)


def log2(x: Any) -> Any:
    """Return the logarithm to base 2; powers of two have integer logarithms."""
    y = ops.log2(x)
    integral = ops.round(y)
    return ops.where(ops.equal(ops.pow(ops.full(shape=(), value=2.0, dtype=x.dtype), integral), x), integral, y)


def nextafter(x: Any, y: Any) -> Any:
    """Return the next number after x towards y: the bits of magnitudes are ordered like the magnitudes."""
    bits = _bits(x)
    grows = ops.equal(ops.greater(y, x), ops.greater(x, 0.0))
    step = ops.where(grows, bits + 1, bits - 1)
    smallest = ops.where(ops.greater(y, 0.0), 1, ops.full(shape=(), value=bits.dtype.limits[0] + 1, dtype=bits.dtype))
    following = ops.bitcast(ops.where(ops.equal(x, 0.0), smallest, step), dtype=x.dtype)
    undefined = ops.logical_or(ops.isnan(x), ops.isnan(y))
    return ops.where(undefined, math.nan, ops.where(ops.equal(x, y), y, following))


def floor_divide(x: Any, y: Any) -> Any:
    """Return x // y; infinite and zero quotients of floats are results already."""
    floored = ops.floordiv(x, y)
    if not x.dtype.is_float:
        return floored
    quotient = x / y
    is_result = ops.logical_or(ops.equal(ops.abs(quotient), math.inf), ops.equal(quotient, 0.0))
    return ops.where(is_result, quotient, floored)
