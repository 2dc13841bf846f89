"""Complex numbers as pairs of real tensors: their arithmetic and Fourier transforms in operations of mithril."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril import ops


def part_of(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of the real and imaginary part."""
    return np.finfo(np.dtype(dtype)).dtype


class Complex:
    """A complex tensor."""

    def __init__(self, re: Any, im: Any) -> None:
        self.re, self.im = re, im

    @property
    def shape(self) -> Any:
        return self.re.shape

    @property
    def dtype(self) -> str:
        """The dtype of the parts."""
        return str(self.re.dtype)

    @classmethod
    def of(cls, x: Any) -> Complex:
        """Return a tensor or number as a complex one."""
        if isinstance(x, cls):
            return x
        if isinstance(x, complex):
            return cls(x.real, x.imag)
        if isinstance(x, np.ndarray) and np.iscomplexobj(x):
            return cls(*(np.asarray(p, part_of(x.dtype)) for p in (x.real, x.imag)))
        return cls(x, x * 0.0)

    def plus(self, number: float) -> Complex:
        """Return the sum with a real number."""
        return Complex(ops.add(self.re, number), self.im)


def over(function: Callable[..., Any], x: Complex, axes: Sequence[int]) -> Complex:
    """Return the transform along several axes."""
    for axis in axes:
        x = Complex(*function(x.re, x.im, axis=axis))
    return x


def multiply(x: Any, y: Any) -> Complex:
    for a, b in ((x, y), (y, x)):
        if not isinstance(b, (Complex, complex, np.ndarray)):  # real
            return Complex(ops.mul(a.re, b), ops.mul(a.im, b))
    return bilinear(ops.mul, x, y)


def bilinear(product: Callable[[Any, Any], Any], x: Any, y: Any) -> Complex:
    """Return a product of complex tensors that is linear in both, by that of real ones."""
    a, b = Complex.of(x), Complex.of(y)
    re = ops.sub(product(a.re, b.re), product(a.im, b.im))
    return Complex(re, ops.add(product(a.re, b.im), product(a.im, b.re)))


def divide(x: Any, y: Any) -> Complex:
    a, b = Complex.of(x), Complex.of(y)
    size = b.re * b.re + b.im * b.im
    return Complex((a.re * b.re + a.im * b.im) / size, (a.im * b.re - a.re * b.im) / size)


def modulus(x: Complex) -> Any:
    """Return the modulus, with gradient 0 at 0 as in the frameworks."""
    square = x.re * x.re + x.im * x.im
    is_zero = ops.equal(square, 0.0)
    return ops.where(is_zero, 0.0, ops.sqrt(ops.where(is_zero, 1.0, square)))


def angle(x: Complex) -> Any:
    return ops.atan2(x.im, x.re)


def equal(x: Any, y: Any) -> Any:
    a, b = Complex.of(x), Complex.of(y)
    return ops.logical_and(ops.equal(a.re, b.re), ops.equal(a.im, b.im))


def sign(x: Complex) -> Complex:
    """Return x / abs(x), or 0."""
    size = modulus(x)
    size = ops.where(ops.equal(size, 0.0), 1.0, size)
    return Complex(x.re / size, x.im / size)


def polar(size: Any, phase: Any) -> Complex:
    return Complex(ops.mul(size, ops.cos(phase)), ops.mul(size, ops.sin(phase)))


def exp(x: Complex) -> Complex:
    return polar(ops.exp(x.re), x.im)


def log(x: Complex) -> Complex:
    return Complex(ops.log(modulus(x)), angle(x))


def sqrt(x: Complex) -> Complex:
    return polar(ops.sqrt(modulus(x)), ops.mul(angle(x), 0.5))


def conj(x: Complex) -> Complex:
    return Complex(x.re, ops.neg(x.im))


def sin(x: Complex) -> Complex:
    return Complex(ops.sin(x.re) * ops.cosh(x.im), ops.cos(x.re) * ops.sinh(x.im))


def cos(x: Complex) -> Complex:
    return Complex(ops.cos(x.re) * ops.cosh(x.im), ops.neg(ops.sin(x.re) * ops.sinh(x.im)))


def sinh(x: Complex) -> Complex:
    return Complex(ops.sinh(x.re) * ops.cos(x.im), ops.cosh(x.re) * ops.sin(x.im))


def cosh(x: Complex) -> Complex:
    return Complex(ops.cosh(x.re) * ops.cos(x.im), ops.sinh(x.re) * ops.sin(x.im))


def tanh(x: Complex) -> Complex:
    """Return the tangent of a double argument, which does not overflow where the real part is limited to 40."""
    re = ops.minimum(ops.maximum(x.re * 2.0, -80.0), 80.0)
    size = ops.cosh(re) + ops.cos(x.im * 2.0)
    return Complex(ops.sinh(re) / size, ops.sin(x.im * 2.0) / size)


def rotated(function: Callable[[Complex], Complex], x: Complex) -> Complex:
    """Return -i times a function of i x, which exchanges hyperbolic and circular functions."""
    y = function(Complex(ops.neg(x.im), x.re))
    return Complex(y.im, ops.neg(y.re))


def tan(x: Complex) -> Complex:
    return rotated(tanh, x)


def asin(x: Complex) -> Complex:
    """Return the inverse sine by Kahan's formulas, as the other inverse functions."""
    a, b = sqrt(Complex(1.0 - x.re, ops.neg(x.im))), sqrt(x.plus(1.0))
    return Complex(ops.atan2(x.re, multiply(a, b).re), ops.asinh(multiply(conj(a), b).im))


def acos(x: Complex) -> Complex:
    a, b = sqrt(Complex(1.0 - x.re, ops.neg(x.im))), sqrt(x.plus(1.0))
    return Complex(ops.mul(ops.atan2(a.re, b.re), 2.0), ops.asinh(multiply(conj(b), a).im))


def acosh(x: Complex) -> Complex:
    a, b = sqrt(x.plus(-1.0)), sqrt(x.plus(1.0))
    return Complex(ops.asinh(multiply(conj(a), b).re), ops.mul(ops.atan2(a.im, b.re), 2.0))


def asinh(x: Complex) -> Complex:
    return rotated(asin, x)


def atanh(x: Complex) -> Complex:
    upper, lower = log(x.plus(1.0)), log(Complex(1.0 - x.re, ops.neg(x.im)))
    return Complex((upper.re - lower.re) * 0.5, (upper.im - lower.im) * 0.5)


def atan(x: Complex) -> Complex:
    return rotated(atanh, x)


def reciprocal(x: Complex) -> Complex:
    size = x.re * x.re + x.im * x.im
    return Complex(x.re / size, ops.neg(x.im) / size)


def sigmoid(x: Complex) -> Complex:
    return reciprocal(exp(Complex(ops.neg(x.re), ops.neg(x.im))).plus(1.0))


def expm1(x: Complex) -> Complex:
    """Return exp(x) - 1, accurate where it is small."""
    half = ops.sin(x.im * 0.5)
    re = ops.expm1(x.re) * ops.cos(x.im) - half * half * 2.0
    return Complex(re, ops.exp(x.re) * ops.sin(x.im))


def log1p(x: Complex) -> Complex:
    return log(x.plus(1.0))


def raised(x: Any, y: Any) -> Complex:
    """Return x to the power y."""
    base, exponent = Complex.of(x), Complex.of(y)
    result = exp(multiply(log(base), exponent))
    is_zero = ops.logical_and(ops.equal(base.re, 0.0), ops.equal(base.im, 0.0))
    one = ops.where(ops.equal(exponent.re, 0.0), 1.0, 0.0)
    return Complex(ops.where(is_zero, one, result.re), ops.where(is_zero, 0.0, result.im))


def _selected(precedes: Callable[[Any, Any], Any], x: Any, y: Any) -> Complex:
    a, b = Complex.of(x), Complex.of(y)
    decided = ops.where(ops.equal(a.re, b.re), precedes(a.im, b.im), precedes(a.re, b.re))
    return Complex(ops.where(decided, a.re, b.re), ops.where(decided, a.im, b.im))


def maximum(x: Any, y: Any) -> Complex:
    """Return the larger number by the real part, then the imaginary part."""
    return _selected(ops.greater, x, y)


def minimum(x: Any, y: Any) -> Complex:
    return _selected(ops.less, x, y)


FUNCTIONS: dict[str, Callable[[Complex], Any]] = {
    "abs": modulus,
    "angle": angle,
    "exp": exp,
    "expm1": expm1,
    "log": log,
    "log1p": log1p,
    "sqrt": sqrt,
    "sin": sin,
    "cos": cos,
    "tan": tan,
    "asin": asin,
    "acos": acos,
    "atan": atan,
    "sinh": sinh,
    "cosh": cosh,
    "tanh": tanh,
    "asinh": asinh,
    "acosh": acosh,
    "atanh": atanh,
    "sigmoid": sigmoid,
    "reciprocal": reciprocal,
    "rsqrt": lambda x: reciprocal(sqrt(x)),
}


def power(x: Complex, exponent: int) -> Complex:
    """Return a power with a positive exponent."""
    result = x
    for _step in range(exponent - 1):
        result = multiply(result, x)
    return result
