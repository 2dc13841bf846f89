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


def power(x: Complex, exponent: int) -> Complex:
    """Return a power with a positive exponent."""
    result = x
    for _step in range(exponent - 1):
        result = multiply(result, x)
    return result
