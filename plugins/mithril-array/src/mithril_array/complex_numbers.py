"""Complex arithmetic on pairs of real values; the functions of a pair are those of Kahan (1987).

W. Kahan, "Branch cuts for complex elementary functions, or much ado about nothing's sign bit".
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from mithril import ops
from mithril.graph import DType
from mithril_array.dtypes import COMPLEX
from mithril_array.real_functions import hypot, signed

LARGE = 22.0  # tanh(22) is 1 in float64


class Pair(NamedTuple):
    """A complex value."""

    re: Any
    im: Any

    @property
    def dtype(self) -> DType:
        return COMPLEX[self.re.dtype]

    @property
    def shape(self) -> Any:
        return self.re.shape


def as_pair(x: Any, part: DType) -> Pair:
    """Return a real or complex value as a pair of a part dtype."""
    if isinstance(x, Pair):
        return Pair(ops.cast(x.re, dtype=part), ops.cast(x.im, dtype=part))
    re = ops.cast(x, dtype=part)
    return Pair(re, ops.zeros_like(re))


def times_i(z: Pair) -> Pair:
    return Pair(-z.im, z.re)


def over_i(z: Pair) -> Pair:
    return Pair(z.im, -z.re)


def scaled(z: Pair, factor: Any) -> Pair:
    return Pair(z.re * factor, z.im * factor)


def conj(z: Pair) -> Pair:
    return Pair(z.re, -z.im)


def add(a: Pair, b: Pair) -> Pair:
    return Pair(a.re + b.re, a.im + b.im)


def sub(a: Pair, b: Pair) -> Pair:
    return Pair(a.re - b.re, a.im - b.im)


def mul(a: Pair, b: Pair) -> Pair:
    return Pair(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


def matmul(a: Pair, b: Pair) -> Pair:
    re = ops.matmul(a.re, b.re) - ops.matmul(a.im, b.im)
    return Pair(re, ops.matmul(a.re, b.im) + ops.matmul(a.im, b.re))


def div(a: Pair, b: Pair) -> Pair:
    """Divide by Smith's method, which squares no part."""
    by_re = ops.abs(b.re) >= ops.abs(b.im)
    large, small = ops.where(by_re, b.re, b.im), ops.where(by_re, b.im, b.re)
    ratio = ops.where(ops.equal(small, 0.0), small * 0.0, small / large)
    size = large + small * ratio
    re = ops.where(by_re, a.re + a.im * ratio, a.re * ratio + a.im)
    im = ops.where(by_re, a.im - a.re * ratio, a.im * ratio - a.re)
    return Pair(re / size, im / size)


def magnitude(z: Pair) -> Any:
    return hypot(z.re, z.im)


def sign(z: Pair) -> Pair:
    size = magnitude(z)
    none = ops.equal(size, 0.0)
    return Pair(ops.where(none, 0.0, z.re / size), ops.where(none, 0.0, z.im / size))


def exp(z: Pair) -> Pair:
    size = ops.exp(z.re)
    is_real, vanishes = ops.equal(z.im, 0.0), ops.equal(z.re, -math.inf)
    re = ops.where(is_real, size, size * ops.cos(z.im))
    im = ops.where(is_real, z.im, size * ops.sin(z.im))
    return _unbounded(Pair(ops.where(vanishes, 0.0, re), ops.where(vanishes, 0.0, im)), z)


def _unbounded(y: Pair, z: Pair) -> Pair:
    """Return y of exponential growth, whose real part is infinite also where the angle is undefined."""
    angle = ops.logical_and(ops.equal(z.re, math.inf), ops.logical_not(ops.isfinite(z.im)))
    return Pair(ops.where(angle, math.inf, y.re), y.im)


def expm1(z: Pair) -> Pair:
    half = ops.sin(z.im * 0.5)
    is_real, vanishes = ops.equal(z.im, 0.0), ops.equal(z.re, -math.inf)
    re = ops.where(is_real, ops.expm1(z.re) + 0.0, ops.expm1(z.re) * ops.cos(z.im) - half * half * 2.0)
    im = ops.where(is_real, z.im, ops.exp(z.re) * ops.sin(z.im))
    return _unbounded(Pair(ops.where(vanishes, -1.0, re), ops.where(vanishes, 0.0, im)), z)


def log(z: Pair) -> Pair:
    size = magnitude(z)
    large, small = (f(ops.abs(z.re), ops.abs(z.im)) for f in (ops.maximum, ops.minimum))
    by_gap = ops.log1p((large - 1.0) * (large + 1.0) + small * small) * 0.5  # of numbers by_gap the unit circle
    is_near = ops.logical_and(size > 0.5, size < 2.0)
    return Pair(ops.where(is_near, by_gap, ops.log(size)), ops.atan2(z.im, z.re))


def log1p(z: Pair) -> Pair:
    by_gap = ops.log1p(z.re * 2.0 + z.re * z.re + z.im * z.im) * 0.5
    far = log(Pair(z.re + 1.0, z.im))
    return Pair(ops.where(magnitude(z) < 0.5, by_gap, far.re), far.im)


def sqrt(z: Pair) -> Pair:
    a = ops.abs(z.re)
    root = ops.sqrt(a * 0.5 + hypot(a * 0.5, z.im * 0.5))
    none, infinite = ops.equal(root, 0.0), ops.equal(ops.abs(z.im), math.inf)
    other = ops.where(none, 0.0, ops.abs(z.im) / (root * 2.0))
    right = ops.greater_equal(z.re, 0.0)
    re, im = ops.where(right, root, other), signed(ops.where(right, other, root), z.im)
    undefined = ops.isnan(z.re)
    re, im = ops.where(undefined, z.re, re), ops.where(undefined, z.re, im)
    return Pair(ops.where(infinite, math.inf, re), ops.where(infinite, z.im, im))


def sinh(z: Pair) -> Pair:
    is_real = ops.equal(z.im, 0.0)
    im = ops.where(is_real, z.im, ops.cosh(z.re) * ops.sin(z.im))
    re = ops.where(is_real, ops.sinh(z.re), ops.sinh(z.re) * ops.cos(z.im))
    return _unbounded(Pair(ops.where(ops.equal(z.re, 0.0), z.re, re), im), z)


def cosh(z: Pair) -> Pair:
    is_axis = ops.logical_or(ops.equal(z.im, 0.0), ops.equal(z.re, 0.0))
    # Zero with the sign of the product of both parts.
    at_axis = signed(signed(ops.zeros_like(z.re), z.re), z.im)
    im = ops.where(is_axis, at_axis, ops.sinh(z.re) * ops.sin(z.im))
    y = Pair(ops.cosh(z.re) * ops.where(ops.equal(z.im, 0.0), 1.0, ops.cos(z.im)), im)
    return _unbounded(y, Pair(ops.abs(z.re), z.im))


def tanh(z: Pair) -> Pair:
    tangent, s = ops.tan(z.im), ops.sinh(ops.clip(z.re, low=-LARGE, high=LARGE))
    slope = tangent * tangent + 1.0
    size = slope * s * s + 1.0
    steep = ops.equal(ops.abs(tangent), math.inf)
    re = ops.where(steep, 1.0 / ops.tanh(z.re), slope * ops.sqrt(s * s + 1.0) * s / size)
    im = ops.where(steep, 0.0, tangent / size)
    far = ops.abs(z.re) > LARGE
    tail = ops.exp(ops.abs(z.re) * -2.0) * 4.0 * ops.sin(z.im) * ops.cos(z.im)
    tail = ops.where(ops.equal(ops.abs(z.re), math.inf), 0.0, tail)
    re, im = ops.where(far, ops.sign(z.re), re), ops.where(far, tail, im)
    angle = ops.logical_and(ops.isfinite(z.re), ops.logical_not(ops.isfinite(z.im)))
    re = ops.where(angle, ops.where(ops.equal(z.re, 0.0), z.re, math.nan), re)
    return Pair(re, ops.where(ops.equal(z.im, 0.0), z.im, im))


def _beside_one(z: Pair) -> tuple[Pair, Pair]:
    """Return the roots of 1 - z and 1 + z."""
    return sqrt(Pair(1.0 - z.re, -z.im)), sqrt(Pair(z.re + 1.0, z.im))


def _crossed(a: Pair, b: Pair) -> Any:
    """Return the imaginary part of conj(a) b."""
    return a.re * b.im - a.im * b.re


def _is_infinite(z: Pair) -> Any:
    return ops.logical_or(ops.isinf(z.re), ops.isinf(z.im))


def _is_undefined_at_zero(z: Pair) -> Any:
    return ops.logical_and(ops.equal(z.re, 0.0), ops.isnan(z.im))


def _infinite(like: Any) -> Any:
    return signed(ops.full(shape=like.shape, value=math.inf, dtype=like.dtype), like)


def acos(z: Pair) -> Pair:
    below, above = _beside_one(z)
    re, im = ops.atan2(below.re, above.re) * 2.0, ops.asinh(_crossed(above, below))
    infinite = _is_infinite(z)
    re = ops.where(_is_undefined_at_zero(z), math.pi / 2, ops.where(infinite, ops.atan2(ops.abs(z.im), z.re), re))
    return Pair(re, ops.where(infinite, -_infinite(z.im), im))


def asin(z: Pair) -> Pair:
    below, above = _beside_one(z)
    return Pair(ops.atan2(z.re, below.re * above.re - below.im * above.im), ops.asinh(_crossed(below, above)))


def acosh(z: Pair) -> Pair:
    below, above = sqrt(Pair(z.re - 1.0, z.im)), sqrt(Pair(z.re + 1.0, z.im))
    re, im = ops.asinh(below.re * above.re + below.im * above.im), ops.atan2(below.im, above.re) * 2.0
    infinite = _is_infinite(z)
    im = ops.where(_is_undefined_at_zero(z), math.pi / 2, ops.where(infinite, ops.atan2(z.im, z.re), im))
    return Pair(ops.where(infinite, math.inf, re), im)


def atanh(z: Pair) -> Pair:
    distance = 1.0 - z.re
    size = distance * distance + z.im * z.im
    re = ops.log1p(z.re * 4.0 / size) * 0.25
    im = ops.atan2(z.im * 2.0, distance * (z.re + 1.0) - z.im * z.im) * 0.5
    infinite = _is_infinite(z)
    right = ops.full(shape=z.im.shape, value=math.pi / 2, dtype=z.im.dtype)
    im = ops.where(infinite, ops.where(ops.isnan(z.im), z.im, signed(right, z.im)), im)
    re = ops.where(infinite, signed(ops.zeros_like(z.re), z.re), re)
    return Pair(ops.where(_is_undefined_at_zero(z), z.re, re), im)


def asinh(z: Pair) -> Pair:
    y = over_i(asin(times_i(z)))
    infinite = _is_infinite(z)
    im = ops.where(infinite, ops.atan2(z.im, ops.abs(z.re)), y.im)
    is_real = ops.logical_and(ops.isnan(z.re), ops.equal(z.im, 0.0))
    return Pair(ops.where(infinite, _infinite(z.re), y.re), ops.where(is_real, z.im, im))


def atan(z: Pair) -> Pair:
    return over_i(atanh(times_i(z)))


def sin(z: Pair) -> Pair:
    return over_i(sinh(times_i(z)))


def cos(z: Pair) -> Pair:
    return cosh(times_i(z))


def tan(z: Pair) -> Pair:
    return over_i(tanh(times_i(z)))


def power(a: Pair, b: Pair) -> Pair:
    y = exp(mul(b, log(a)))
    zero = ops.logical_and(ops.equal(a.re, 0.0), ops.equal(a.im, 0.0))
    one = ops.logical_and(ops.equal(b.re, 0.0), ops.equal(b.im, 0.0))
    at_zero = ops.where(one, 1.0, ops.where(b.re > 0.0, 0.0, math.nan))
    y = Pair(ops.where(zero, at_zero, y.re), ops.where(zero, at_zero * 0.0, y.im))
    return Pair(ops.where(one, 1.0, y.re), ops.where(one, 0.0, y.im))
