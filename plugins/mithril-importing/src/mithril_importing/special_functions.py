"""Special functions of frameworks that ``mithril.ops`` lacks, in its operations: of tensors of float32 or float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from mithril import ops

# Recurrences move arguments up by 6, from where the terms below leave an error of 1e-10.
SHIFT = 6
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680)
EULER = (1 / 12, -1 / 120, 1 / 252, -1 / 240)
ZETA_TERMS = 32
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)  # B2, B4, ...


def in_32_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes floats of 16 bits in 32: its terms cancel."""

    @wraps(function)
    def computed(*xs: Any, **options: Any) -> Any:
        kind = str(xs[-1].dtype)
        if kind not in ("float16", "bfloat16"):
            return function(*xs, **options)
        tensors = (ops.cast(x, dtype="float32") if hasattr(x, "dtype") else x for x in xs)
        return ops.cast(function(*tensors, **options), dtype=kind)

    return computed


def polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Return the polynomial of coefficients, lowest power first."""
    result: Any = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        result = result * x + c
    return result


# -- bits of floats -----------------------------------------------------------------------------------------------
def width_of(x: Any) -> int:
    """Return the bytes of an element."""
    return 2 if str(x.dtype) == "bfloat16" else int(np.dtype(str(x.dtype)).itemsize)


def nextafter(x: Any, y: Any) -> Any:
    """Return the next number in the direction of y: floats of one sign are ordered as their bits."""
    bits = f"int{8 * width_of(x)}"
    grows = ops.equal(ops.greater(y, x), ops.greater(x, 0.0))
    step = ops.cast(ops.where(grows, 1, -1), dtype=bits)
    neighbor = ops.bitcast(ops.add(ops.bitcast(x, dtype=bits), step), dtype=str(x.dtype))
    smallest = ops.bitcast(np.ones((), bits), dtype=str(x.dtype))
    neighbor = ops.where(ops.equal(x, 0.0), ops.where(ops.greater(y, 0.0), smallest, ops.neg(smallest)), neighbor)
    neighbor = ops.where(ops.equal(x, y), y, neighbor)
    neighbor = ops.where(ops.logical_or(ops.isnan(x), ops.isnan(y)), float("nan"), neighbor)
    return ops.add(neighbor, ops.where(ops.isfinite(x), ops.sub(x, ops.stop_gradient(x)), 0.0))


# -- the gamma function -------------------------------------------------------------------------------------------
def lgamma(x: Any) -> Any:
    """Return the logarithm of the size of the gamma function, by Stirling's series and reflection."""
    negative = ops.less(x, 0.5)
    z = ops.where(negative, 1.0 - x, x)
    product, w = z, z + float(SHIFT)
    for k in range(1, SHIFT):
        product = product * (z + float(k))
    inverse = ops.reciprocal(w)
    series = polynomial(ops.square(inverse), STIRLING) * inverse
    positive = (w - 0.5) * ops.log(w) - w + 0.5 * math.log(2 * math.pi) + series - ops.log(product)
    fraction = x - ops.floor(x)
    is_pole = ops.equal(fraction, 0.0)
    # The gradient of positive numbers must not be nan.
    sine = ops.sin(ops.where(is_pole, 0.5, fraction) * math.pi)
    reflected = math.log(math.pi) - ops.log(sine) - positive
    return ops.where(negative, ops.where(is_pole, float("inf"), reflected), positive)


def digamma(x: Any) -> Any:
    """Return the derivative of ``lgamma``."""
    negative = ops.less(x, 0.5)
    z = ops.where(negative, 1.0 - x, x)
    total, w = ops.reciprocal(z), z + float(SHIFT)
    for k in range(1, SHIFT):
        total = total + ops.reciprocal(z + float(k))
    inverse = ops.reciprocal(w)
    square = ops.square(inverse)
    positive = ops.log(w) - 0.5 * inverse - polynomial(square, EULER) * square - total
    fraction = x - ops.floor(x)
    is_pole = ops.equal(fraction, 0.0)
    inner = ops.where(is_pole, 0.5, fraction) * math.pi
    reflected = positive - math.pi * ops.cos(inner) / ops.sin(inner)
    return ops.where(negative, ops.where(is_pole, float("nan"), reflected), positive)


def zeta(s: Any, q: Any) -> Any:
    """Return the sum of (q + k)**-s for k from 0, by the formula of Euler and Maclaurin; nan below q = -20."""
    terms = [ops.pow(q + float(k), -s) for k in range(ZETA_TERMS)]
    total: Any = 0.0
    for term in reversed(terms):  # the least first
        total = term + total
    w = q + float(ZETA_TERMS)
    power = ops.pow(w, -s)
    total = total + power * w / (s - 1.0) + 0.5 * power
    factor = s / w
    for j, number in enumerate(BERNOULLI, start=1):
        total = total + power * factor * (number / math.factorial(2 * j))
        factor = factor * (s + (2.0 * j - 1)) * (s + 2.0 * j) / ops.square(w)
    is_pole = ops.logical_and(ops.less_equal(q, 0.0), ops.equal(q, ops.floor(q)))
    total = ops.where(is_pole, float("inf"), total)
    total = ops.where(ops.less(q, -20.0), float("nan"), total)
    return ops.where(ops.equal(s, 1.0), float("inf"), ops.where(ops.less(s, 1.0), float("nan"), total))


def polygamma(n: int, x: Any) -> Any:
    """Return the derivative of this order of ``digamma``."""
    if n == 0:
        return digamma(x)
    order = ops.full(shape=(), value=float(n + 1), dtype=str(x.dtype))
    return ops.mul(zeta(order, x), (-1.0) ** (n + 1) * math.factorial(n))


def root_of_squares(x: Any) -> Any:
    """Return the square root, whose gradient at 0 is 0, as PyTorch defines it for norms and deviations."""
    is_zero = ops.equal(x, 0.0)
    return ops.where(is_zero, 0.0, ops.sqrt(ops.where(is_zero, 1.0, x)))


# -- the error function -------------------------------------------------------------------------------------------
def erfcx(x: Any) -> Any:
    """Return erfc(x) exp(x**2)."""
    large = ops.greater(x, 1.0)
    small = ops.where(large, 1.0, x)
    return ops.where(
        large, ops.scaled_erfc(ops.where(large, x, 1.0)), ops.exp(ops.square(small)) * (1.0 - ops.erf(small))
    )


def log_ndtr(x: Any) -> Any:
    """Return the logarithm of the distribution function of the normal distribution."""
    z = x * math.sqrt(0.5)
    tail = ops.less(z, -1.0)
    inner = ops.where(tail, ops.neg(z), 1.0)
    in_tail = ops.log(0.5 * ops.scaled_erfc(inner)) - ops.square(inner)
    return ops.where(tail, in_tail, ops.log1p(-0.5 * ops.erfc(ops.where(tail, 0.0, z))))


def ndtri(p: Any) -> Any:
    """Return the quantile of the normal distribution; one step of Newton's method makes small ones exact."""
    x = ops.erfinv(2.0 * p - 1.0) * math.sqrt(2.0)
    finite = ops.isfinite(x)
    start = ops.where(finite, x, 0.0)
    density = ops.exp(-0.5 * ops.square(start)) * (2 * math.pi) ** -0.5
    value = 0.5 * ops.erfc(start * -math.sqrt(0.5))
    stable = ops.logical_and(finite, ops.greater(density, 1e-30))
    return ops.where(stable, start - (value - p) / ops.where(stable, density, 1.0), x)


# -- modified Bessel functions ------------------------------------------------------------------------------------
@lru_cache(maxsize=8)
def _bessel_coefficients(order: int, far: bool) -> tuple[float, ...]:
    """Return Chebyshev coefficients of exp(-x) I(x), far from 0 times the root of x, by Bessel's integral."""
    count = 8192 if far else 128
    angles = (np.arange(count) + 0.5) * (np.pi / count)

    def near_zero(t: Any) -> Any:
        x = 4.0 * (t + 1.0)
        return np.mean(np.exp(x[:, None] * (np.cos(angles) - 1)) * np.cos(order * angles), axis=1)

    def beyond(t: Any) -> Any:
        x = 16.0 / (t + 1.0)
        return np.mean(np.exp(x[:, None] * (np.cos(angles) - 1)) * np.cos(order * angles), axis=1) * np.sqrt(x)

    return tuple(chebyshev.chebinterpolate(beyond if far else near_zero, 26 if far else 30).tolist())


def _chebyshev(t: Any, coefficients: Sequence[float]) -> Any:
    """Return a Chebyshev series by Clenshaw's recurrence."""
    first: Any = 0.0
    second: Any = 0.0
    for c in reversed(coefficients[1:]):
        first, second = (2.0 * t) * first - second + c, first
    return t * first - second + coefficients[0]


def scaled_bessel_i(x: Any, order: int) -> Any:
    """Return exp(-abs(x)) I(x) of order 0 or 1."""
    size = ops.where(ops.less(x, 0.0), ops.neg(x), x) if order else ops.abs(x)  # an odd function has a slope at 0
    is_near = ops.less(size, 8.0)
    lower_part = _chebyshev(ops.where(is_near, size, 8.0) / 4.0 - 1.0, _bessel_coefficients(order, False))
    beyond = ops.where(is_near, 8.0, size)
    upper_part = _chebyshev(16.0 / beyond - 1.0, _bessel_coefficients(order, True)) * ops.rsqrt(beyond)
    value = ops.where(is_near, lower_part, upper_part)
    return ops.where(ops.less(x, 0.0), ops.neg(value), value) if order % 2 else value


def bessel_i(x: Any, order: int) -> Any:
    return scaled_bessel_i(x, order) * ops.exp(ops.abs(x))


# -- Bessel functions of both kinds -------------------------------------------------------------------------------
def _series_of(order: int, x: Any, sign: float) -> tuple[Any, Any]:
    """Return J(x) (or I(x) with sign 1), and the sum of its terms times twice their harmonic numbers."""
    term = (x / 2) ** order
    value, harmonic = np.zeros_like(x), np.zeros_like(x)
    for k in range(60):
        numbers = sum(1 / j for j in range(1, k + 1)) + sum(1 / j for j in range(1, k + order + 1))
        value, harmonic = value + term, harmonic + term * numbers
        term = term * (sign * x * x / 4) / ((k + 1) * (k + 1 + order))
    return value, harmonic


@lru_cache(maxsize=16)
def _second_kind(order: int, sign: float, end: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return Chebyshev series in x**2 up to ``end``, of J / x**order and of the regular part of Y (or K)."""

    def first(t: Any) -> Any:
        x = end * np.sqrt((t + 1) / 2)
        return _series_of(order, x, sign)[0] / x**order

    def rest(t: Any) -> Any:
        x = end * np.sqrt((t + 1) / 2)
        value, harmonic = _series_of(order, x, sign)
        return (np.euler_gamma * value - harmonic / 2) / x**order  # plus log(x / 2) J, and the pole

    return tuple(tuple(chebyshev.chebinterpolate(f, 30).tolist()) for f in (first, rest))  # type: ignore[return-value]


def _near_zero(x: Any, order: int, sign: float, end: float) -> tuple[Any, Any]:
    """Return J (or I), and log(x / 2) J plus the regular part of the second kind, without its pole."""
    t = ops.square(x) * (2.0 / end**2) - 1.0
    first, rest = (_chebyshev(t, c) for c in _second_kind(order, sign, end))
    power = x if order else 1.0
    return first * power, (ops.log(x * 0.5) * first + rest) * power


def _waves(x: Any, order: int) -> tuple[Any, Any]:
    """Return J and Y from 8 by Hankel's expansion."""
    factors = [1.0]
    for k in range(1, 12):
        factors.append(factors[-1] * (4 * order**2 - (2 * k - 1) ** 2) / (k * 8))
    inverse = ops.reciprocal(x)
    square = ops.neg(ops.square(inverse))
    even, odd = polynomial(square, factors[::2]), polynomial(square, factors[1::2]) * inverse
    size, phase = ops.sqrt(inverse * (2 / math.pi)), x - (order / 2 + 0.25) * math.pi
    sine, cosine = ops.sin(phase), ops.cos(phase)
    return size * (even * cosine - odd * sine), size * (even * sine + odd * cosine)


def bessel_j(x: Any, order: int) -> Any:
    size = ops.abs(x)
    is_small = ops.less(size, 8.0)
    small, _ = _near_zero(ops.where(is_small, size, 1.0), order, -1.0, 8.0)
    value = ops.where(is_small, small, _waves(ops.where(is_small, 8.0, size), order)[0])
    return ops.where(ops.less(x, 0.0), ops.neg(value), value) if order else value


def bessel_y(x: Any, order: int) -> Any:
    """Return Y; -inf at 0, and nan below."""
    is_small = ops.less(x, 8.0)
    z = ops.where(ops.logical_and(is_small, ops.greater(x, 0.0)), x, 1.0)
    small = _near_zero(z, order, -1.0, 8.0)[1] * (2 / math.pi)
    small = small - (2 / math.pi) * ops.reciprocal(z) if order else small
    value = ops.where(is_small, small, _waves(ops.where(is_small, 8.0, x), order)[1])
    return _of_positive(value, x, float("-inf"))


def _of_positive(value: Any, x: Any, at_zero: float) -> Any:
    return ops.where(ops.greater(x, 0.0), value, ops.where(ops.equal(x, 0.0), at_zero, float("nan")))


@lru_cache(maxsize=4)
def _decay(order: int) -> tuple[float, ...]:
    """Return the Chebyshev series in 4 / x - 1 of exp(x) K(x) times the root of x, by its integral."""

    def value(t: Any) -> Any:
        x = 4.0 / (t + 1.0)
        steps = np.arange(0, 2000) * 0.005
        weights = np.where(steps == 0, 0.5, 1.0) * 0.005 * np.cosh(order * steps)
        with np.errstate(over="ignore"):
            return np.exp(-x[:, None] * (np.cosh(steps) - 1)) @ weights * np.sqrt(x)

    return tuple(chebyshev.chebinterpolate(value, 20).tolist())


def bessel_k(x: Any, order: int, *, scaled: bool = False) -> Any:
    """Return K, or exp(x) K; inf at 0, and nan below."""
    is_small = ops.less(x, 2.0)
    z = ops.where(ops.logical_and(is_small, ops.greater(x, 0.0)), x, 1.0)
    small = _near_zero(z, order, 1.0, 2.0)[1]
    small = small + ops.reciprocal(z) if order else ops.neg(small)
    far = ops.where(is_small, 2.0, x)
    large = _chebyshev(4.0 / far - 1.0, _decay(order)) * ops.rsqrt(far)
    small, large = (small * ops.exp(z), large) if scaled else (small, large * ops.exp(ops.neg(far)))
    return _of_positive(ops.where(is_small, small, large), x, float("inf"))


# -- the incomplete gamma function --------------------------------------------------------------------------------
TERMS = 400  # of the series and the continued fraction; they suffice up to a = 10^4


def igamma(a: Any, x: Any, upper: bool = False) -> Any:
    """Return the regularized lower (or upper) incomplete gamma function; its derivative is that by x."""
    a0, x0 = ops.stop_gradient(a), ops.stop_gradient(x)
    in_range = ops.logical_and(ops.greater(a0, 0.0), ops.greater(x0, 0.0))
    in_range = ops.logical_and(in_range, ops.logical_and(ops.isfinite(a0), ops.isfinite(x0)))
    b, z = ops.where(in_range, a0, 1.0), ops.where(in_range, x0, 1.0)
    scale = ops.exp(b * ops.log(z) - z - lgamma(b))
    by_series = ops.less(z, b + 1.0)
    series = scale * _series(b, ops.where(by_series, z, b))
    fraction = scale * _fraction(b, ops.where(by_series, b + 1.0, z))
    value = ops.where(by_series, 1.0 - series if upper else series, fraction if upper else 1.0 - fraction)
    none, all_ = (1.0, 0.0) if upper else (0.0, 1.0)
    not_negative = ops.logical_and(ops.greater_equal(a0, 0.0), ops.greater_equal(x0, 0.0))
    is_none = ops.logical_or(ops.equal(x0, 0.0), ops.equal(a0, float("inf")))
    is_all = ops.logical_or(ops.equal(a0, 0.0), ops.equal(x0, float("inf")))
    limit = ops.where(is_none, none, ops.where(is_all, all_, float("nan")))
    defined = ops.logical_and(not_negative, ops.not_equal(is_none, is_all))
    value = ops.where(in_range, value, ops.where(defined, limit, float("nan")))
    density = ops.where(in_range, scale / z, 0.0)
    return value + ops.where(in_range, ops.sub(x, x0), 0.0) * (ops.neg(density) if upper else density)


def betainc(a: Any, b: Any, x: Any) -> Any:
    """Return the regularized incomplete beta function, by its continued fraction; its derivative is that by x."""
    a, b, x0 = (ops.stop_gradient(t) for t in (a, b, x))
    is_valid = ops.logical_and(ops.greater(a, 0.0), ops.greater(b, 0.0))
    in_range = ops.logical_and(is_valid, ops.logical_and(ops.greater(x0, 0.0), ops.less(x0, 1.0)))
    a, b, z = ops.where(in_range, a, 1.0), ops.where(in_range, b, 1.0), ops.where(in_range, x0, 0.5)
    scale = ops.exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * ops.log(z) + b * ops.log1p(-z))
    mirrored = ops.greater(z, (a + 1.0) / (a + b + 2.0))  # where the fraction converges slowly
    p, q = ops.where(mirrored, b, a), ops.where(mirrored, a, b)
    part = scale / p * _beta_fraction(p, q, ops.where(mirrored, 1.0 - z, z))
    value = ops.where(mirrored, 1.0 - part, part)
    at_end = ops.logical_and(is_valid, ops.logical_or(ops.equal(x0, 0.0), ops.equal(x0, 1.0)))
    limit = ops.where(at_end, x0, float("nan"))
    density = ops.where(in_range, scale / (z * (1.0 - z)), 0.0)
    return ops.where(in_range, value, limit) + ops.where(in_range, ops.sub(x, x0), 0.0) * density


def _not_zero(x: Any) -> Any:
    return ops.where(ops.less(ops.abs(x), 1e-30), 1e-30, x)


def _beta_fraction(p: Any, q: Any, z: Any) -> Any:
    """Return the continued fraction by the method of Lentz, two terms in a step."""

    def step(state: Any, _: Any) -> Any:
        c, d, h, m = state
        even = m * (q - m) * z / ((p - 1.0 + 2.0 * m) * (p + 2.0 * m))
        odd = ops.neg(p + m) * (p + q + m) * z / ((p + 2.0 * m) * (p + 1.0 + 2.0 * m))
        for term in (even, odd):
            d = ops.reciprocal(_not_zero(term * d + 1.0))
            c = _not_zero(term / c + 1.0)
            h = h * d * c
        return (c, d, h, m + 1.0), None

    ones = p * 0.0 + 1.0
    d = ops.reciprocal(_not_zero(1.0 - (p + q) * z / (p + 1.0)))
    return ops.scan(step, (ones, d, d, ones), None, length=TERMS // 2)[0][2]


def _series(a: Any, x: Any) -> Any:
    def step(state: Any, _: Any) -> Any:
        term, total, n = state
        term = term * x / n
        return (term, total + term, n + 1.0), None

    first = ops.reciprocal(a)
    (_, total, _), _ = ops.scan(step, (first, first, a + 1.0), None, length=TERMS)
    return total


def _fraction(a: Any, x: Any) -> Any:
    """Return the continued fraction of the upper function, by the method of Lentz."""
    b = x + 1.0 - a

    def step(state: Any, _: Any) -> Any:
        c, d, h, b, i = state
        an = ops.neg(i) * (i - a)
        b = b + 2.0
        d = ops.reciprocal(_not_zero(an * d + b))
        c = _not_zero(b + an / c)
        return (c, d, h * d * c, b, i + 1.0), None

    d = ops.reciprocal(_not_zero(b))
    ones = a * 0.0 + 1.0
    (_, _, h, _, _), _ = ops.scan(step, (ones * 1e30, d, d, b, ones), None, length=TERMS)
    return h
