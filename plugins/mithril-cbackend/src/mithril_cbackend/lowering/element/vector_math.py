"""Vectorizable elementary functions of float32, and the table of those of both dtypes.

Tests bound the largest errors in ulp: exp and log 2, log1p and expm1 4, tanh 5, erf 6, the others 3. Functions whose
formula loses digits are evaluated in float64 (``double_math.py``), which costs less than compensating the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from mithril import ops
from mithril.graph import Op
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import double_math as double
from mithril_cbackend.lowering.element.double_math import absolute, polynomial, with_sign

INF = float("inf")


def f(value: float) -> t.Expr:
    return t.const(value, "float32")


def i(value: int) -> t.Expr:
    return t.const(value, "int32")


def clamped(code: t.Code, x: t.Expr, low: float, high: float) -> t.Expr:
    """Clamp x to a range; nan becomes the upper bound."""
    x = t.select(x < high, x, f(high))
    x = code.let(x, "c")
    return code.let(t.select(x > low, x, f(low)), "c")


EXP = (1.3814467e-3, 8.3687808e-3, 4.1668393e-2, 1.66665196e-1, 4.99999940e-1)
LOG2_E = 1.44269504088896341
ROUNDING = 12582912.0  # adding it to a moderate float leaves the nearest integer in the low bits


def exp(code: t.Code, x: t.Expr) -> t.Expr:
    """Compute 2**n times a polynomial on [-0.5, 0.5] log 2; subnormal results are 0."""
    x = code.let(x, "x")
    # The logarithms of the largest and of the smallest normal number: beyond them the result is infinite
    # or 0. Clamped first, because the exponent would overflow into the sign.
    c = code.let(t.select(x < 88.7228394, x, f(88.7228394)), "c")
    c = code.let(t.select(c > -87.3365479, c, f(-87.3365479)), "c")
    biased = code.let(c * LOG2_E + ROUNDING, "k")
    p = code.let(_exp_less_one(code, c, code.let(biased - ROUNDING, "n")) + 1.0, "p")
    # The low bits of ``biased`` are n, and the shift moves them to the exponent, whatever is above
    # them.
    exponent = t.bits(biased, "int32") << i(23)
    result = t.bits(t.bits(p, "int32") + exponent, "float32")
    result = t.select(x < -87.3365479, f(0.0), result)
    result = t.select(x > 88.7228394, f(INF), result)
    return t.select(t.isnan(x), x, result)


def exp_of_negative(code: t.Code, x: t.Expr) -> t.Expr:
    """Compute exp for x <= 0, as in softmax, with half the instructions: 2**n is a normal float, and 0 from -88 on."""
    bias = ROUNDING + 127.0
    c = code.let(t.select(x < -88.0, f(-88.0), x), "c")  # nan stays
    biased = code.let(c * LOG2_E + bias, "k")
    n = code.let(biased - bias, "n")
    scale = code.let(t.bits(t.bits(biased, "int32") << i(23), "float32"), "scale")
    return _exp_less_one(code, c, n) * scale + scale


def _exp_less_one(code: t.Code, x: t.Expr, n: t.Expr) -> t.Expr:
    """Compute exp(x - n log 2) - 1 for the reduced argument."""
    # log 2 in two parts, of which the first has few bits: its product with n is exact, so that no
    # digits cancel.
    r = code.let(x - n * 0.693359375 - n * -2.12194440e-4, "r")
    return polynomial(code, r, EXP) * (r * r) + r


LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
       2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip


def log(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    tiny = code.let(x < 1.17549435e-38, "tiny")  # the smallest normal number
    # Subnormal numbers have no implicit bit: times 2**23 they are normal, and the exponent is
    # corrected by 23.
    scaled = code.let(t.select(tiny, x * 8388608.0, x), "s")
    word = code.let(t.bits(scaled, "int32"), "w")
    exponent = (word >> i(23)) - t.select(tiny, i(126 + 23), i(126))
    mantissa = word & i(0x007FFFFF) | i(0x3F000000)
    m = code.let(t.bits(mantissa, "float32"), "m")  # in [0.5, 1)
    # Below the root of one half, m is doubled: r is then in [-0.3, 0.42], where the polynomial is
    # accurate.
    low = code.let(m < 0.707106781186547524, "low")
    e = code.let(t.cast(exponent - t.select(low, i(1), i(0)), "float32"), "e")
    r = code.let(t.select(low, m + m, m) - 1.0, "r")
    z = code.let(r * r, "z")
    y = polynomial(code, r, LOG) * r * z
    y = y + e * -2.12194440e-4 - z * 0.5
    y = r + y + e * 0.693359375
    y = t.select(x > 0.0, y, t.select(t.equal(x, 0.0), f(-INF), f(float("nan"))))
    return t.select(x < INF, y, x)  # infinity and nan are unchanged


def log1p(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    u = code.let(x + 1.0, "u")
    # u - 1 has the same rounding error as u, which the quotient cancels (Kahan's method), also in
    # expm1.
    y = log(code, u) * (x / (u - 1.0))
    y = t.select(t.equal(u, INF), u, y)
    return t.select(t.equal(u, 1.0), x, y)


def expm1(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    c = code.let(t.select(x > 88.7228394, f(88.7228394), x), "c")
    # exp(-18) is below half a unit in the last place of -1; nan stays.
    c = code.let(t.select(c < -18.0, f(-18.0), c), "c")
    biased = code.let(c * LOG2_E + ROUNDING, "k")
    less_one = _exp_less_one(code, c, code.let(biased - ROUNDING, "n"))
    k = code.let(t.bits(biased, "int32") - i(0x4B400000), "k")
    one = power_of_two(i(0) - k)  # 1 / 2**k, where it counts
    one = t.select(k < i(30), one, f(0.0))  # rounding loses it from 2**25 on; from 2**127 on it would be subnormal
    y = (less_one + (f(1.0) - one)) * power_of_two(k - i(1)) * 2.0
    y = t.select(x > 88.7228394, f(INF), y)
    return t.select(t.equal(x, 0.0), x, y)  # of -0 it is -0


def power_of_two(k: t.Expr) -> t.Expr:
    return t.bits(k + i(127) << i(23), "float32")


ATANH = (1.81740078349e-1, 8.24370301058e-2, 1.46691431730e-1, 1.99782164500e-1, 3.33337300303e-1)


def atanh(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    a = absolute(code, x)
    z = code.let(a * a, "z")
    central = polynomial(code, z, ATANH) * z * a + a
    # From one half on 1 - a is exact, and the logarithm at least that of 3: no digits cancel.
    y = t.select(a < 0.5, central, log(code, (a + 1.0) / (f(1.0) - a)) * 0.5)
    return with_sign(code, y, x)


TANH = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
        1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
TANH_BELOW = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def tanh(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    c = clamped(code, x, -7.90531110763549805, 7.90531110763549805)
    z = code.let(c * c, "z")
    y = c * polynomial(code, z, TANH) / polynomial(code, z, TANH_BELOW)
    # Below, x is its tanh to half a ulp: x**2 / 3 < 2**-24.
    small = t.intrinsic("abs", x) < 0.0004
    return t.select(small | t.isnan(x), x, y)


ERF = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
       -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
ERF_BELOW = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
             -1.42647390514189e-02)  # fmt: skip


def erf(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    # Beyond 4 erf rounds to 1 in float32.
    c = clamped(code, x, -4.0, 4.0)
    z = code.let(c * c, "z")
    y = c * polynomial(code, z, ERF) / polynomial(code, z, ERF_BELOW)
    return t.select(t.isnan(x), x, y)


# -- trigonometry -------------------------------------------------------------------------------------------------
SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
HALF_PI, HALF_PI_REST = 1.57079632673412561417e00, 6.07710050650619224932e-11
# 2 / pi in three parts of 29, 29 and 53 bits, from the bits that count for numbers from 2**20, 2**56 and 2**92: the
# bits before contribute multiples of 4, which are full turns.
WINDOWS = (2.0**56, 2.0**92)


def _two_over_pi(first: int) -> tuple[float, float, float]:
    """Return the bits of 2 / pi from 2**-first on."""
    digits = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7  # 264 bits after the point
    left = digits & ((1 << 264 - first) - 1) if first > 0 else digits
    parts = []
    for width in (29, 29, 53):
        shift = 264 - first - width
        parts.append(math.ldexp(left >> shift, -first - width))
        left &= (1 << shift) - 1
        first += width
    return parts[0], parts[1], parts[2]


# For numbers below each of WINDOWS, and for larger ones.
PARTS = [_two_over_pi(first) for first in (0, 31, 67)]


def _within_turns(code: t.Code, x: t.Expr) -> t.Expr:
    """Return float64 x less full turns of 2 pi, for |x| from 2**20 to the largest float32."""
    a = absolute(code, x)
    turns: t.Expr | None = None
    for first, second, third in zip(*PARTS, strict=True):
        part = t.select(a < WINDOWS[0], double.d(first), t.select(a < WINDOWS[1], double.d(second), double.d(third)))
        product = code.let(x * part, "p")
        product = product - t.intrinsic("nearbyint", product * 0.25) * 4.0
        turns = product if turns is None else turns + product
    assert turns is not None
    return code.let(turns, "turns") * (math.pi / 2)


def _sin_or_cos(code: t.Code, x: t.Expr, turn: int) -> t.Expr:
    """Compute the sine of x + turn * pi / 2."""
    x = code.let(x, "x")
    x64 = t.cast(x, "float64")
    x64 = code.rarely(t.intrinsic("abs", x), double.FAR, x64, lambda: _within_turns(code, x64))
    biased = code.let(x64 * double.TWO_OVER_PI + double.ROUNDING, "k")
    n = code.let(biased - double.ROUNDING, "n")
    r = code.let(t.cast(x64 - n * HALF_PI - n * HALF_PI_REST, "float32"), "r")
    quadrant = code.let(t.cast(t.bits(biased, "int64"), "int32") + i(turn), "q")
    z = code.let(r * r, "z")
    sine = polynomial(code, z, SIN) * z * r + r
    cosine = polynomial(code, z, COS) * (z * z) - z * 0.5 + 1.0
    y = code.let(t.select(t.equal(quadrant & i(1), i(0)), sine, cosine), "y")
    y = t.bits(t.bits(y, "int32") ^ (quadrant & i(2)) << i(30), "float32")
    return y if turn else t.select(t.equal(x, 0.0), x, y)


def sin(code: t.Code, x: t.Expr) -> t.Expr:
    return _sin_or_cos(code, x, 0)


def cos(code: t.Code, x: t.Expr) -> t.Expr:
    return _sin_or_cos(code, x, 1)


ATAN = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)
ASIN = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
PI_REST = -8.74227766e-8  # pi is this plus the float32


def _constant(x: t.Expr, value: float) -> t.Expr:
    return t.const(value, x.dtype)


def _pi_rest(x: t.Expr) -> float:
    return PI_REST if x.dtype == "float32" else double.PI_REST


def atan(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    a = absolute(code, x)
    # tan(pi / 8) and its inverse bound the reductions by pi / 4 and pi / 2.
    far, middle = code.let(a > math.sqrt(2) + 1, "far"), code.let(a > math.sqrt(2) - 1, "middle")
    one, zero = _constant(x, 1.0), _constant(x, 0.0)
    over = t.select(far, _constant(x, -1.0), t.select(middle, a - 1.0, a))
    r = code.let(over / t.select(far, a, t.select(middle, a + 1.0, one)), "r")
    z = code.let(r * r, "z")
    terms = polynomial(code, z, ATAN) * z if x.dtype == "float32" else double.atan_terms(code, z)
    base = t.select(far, _constant(x, math.pi / 2), t.select(middle, _constant(x, math.pi / 4), zero))
    rest = t.select(far, _constant(x, _pi_rest(x) / 2), t.select(middle, _constant(x, _pi_rest(x) / 4), zero))
    return with_sign(code, base + (r * terms + rest + r), x)


def atan2(code: t.Code, y: t.Expr, x: t.Expr) -> t.Expr:
    y, x = code.let(y, "y"), code.let(x, "x")
    above, right = absolute(code, y), absolute(code, x)
    undefined = t.equal(above, right) & (t.equal(above, INF) | t.equal(above, 0.0))
    quotient = t.select(t.equal(above, 0.0), _constant(x, 0.0), _constant(x, 1.0))
    angle = code.let(atan(code, t.select(undefined, quotient, above / right)), "angle")
    integer = "int32" if x.dtype == "float32" else "int64"
    left = t.bits(x, integer) < t.const(0, integer)  # also -0
    angle = t.select(left, _constant(x, math.pi) - (angle - _pi_rest(x)), angle)
    angle = t.select(t.isnan(x), x, angle)
    return with_sign(code, angle, y)


def _asin_terms(code: t.Code, z: t.Expr) -> t.Expr:
    return polynomial(code, z, ASIN) * z if z.dtype == "float32" else double.asin_terms(code, z)


def _from_one(code: t.Code, a: t.Expr) -> tuple[t.Expr, t.Expr, t.Expr]:
    """Return whether a is past 1 / 2, the number whose arc sine counts, and that arc sine."""
    beyond = code.let(a > 0.5, "beyond")
    square = code.let((_constant(a, 1.0) - a) * 0.5, "z")
    z = code.let(t.select(beyond, square, a * a), "z")
    s = code.let(t.select(beyond, t.intrinsic("sqrt", square), a), "s")
    return beyond, s, code.let(s * _asin_terms(code, z), "y")


def asin(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    a = absolute(code, x)
    beyond, s, terms = _from_one(code, a)
    y = s + terms
    far = _constant(x, math.pi / 2) - ((y + y) - _pi_rest(x) / 2)
    return with_sign(code, t.select(beyond, far, y), x)


def acos(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    beyond, s, terms = _from_one(code, absolute(code, x))
    negative = code.let(x < 0.0, "negative")
    double_angle = code.let((s + terms) * 2.0, "y")
    far = t.select(negative, _constant(x, math.pi) - (double_angle - _pi_rest(x)), double_angle)
    signed, terms = t.select(negative, s * -1.0, s), t.select(negative, terms * -1.0, terms)
    central = _constant(x, math.pi / 2) - (signed - (_constant(x, _pi_rest(x) / 2) - terms))
    return t.select(beyond, far, central)


# -- functions of two numbers -------------------------------------------------------------------------------------
def pow(code: t.Code, x: t.Expr, y: t.Expr) -> t.Expr:
    x, y = code.let(x, "x"), code.let(y, "y")
    one = _constant(x, 1.0)
    a = absolute(code, x)
    if x.dtype == "float32":
        logarithm = double.log(code, t.cast(a, "float64"))
        magnitude = t.cast(double.exp(code, logarithm * t.cast(y, "float64")), "float32")
    else:
        magnitude = double.magnitude_of_power(code, a, y)
    magnitude = code.let(t.select(t.equal(a, 1.0), one, magnitude), "m")
    half = code.let(y * 0.5, "h")
    is_integer = t.equal(t.intrinsic("floor", y), y)
    odd = is_integer & t.not_equal(t.intrinsic("floor", half), half)
    power = t.select(odd, with_sign(code, magnitude, x), magnitude)
    undefined = (x < 0.0) & (a < INF) & ~is_integer
    power = t.select(undefined | t.isnan(x) | t.isnan(y), _constant(x, math.nan), power)
    return t.select(t.equal(y, 0.0) | t.equal(x, 1.0), one, power)


def fmod(code: t.Code, x: t.Expr, y: t.Expr) -> t.Expr:
    """Return the remainder of the quotient rounded towards 0, which is exact."""
    x, y = code.let(x, "x"), code.let(y, "y")
    a, b = absolute(code, x), absolute(code, y)
    if x.dtype == "float32":
        c, d = t.cast(a, "float64"), t.cast(b, "float64")
        quotient = code.let(c / d, "q")
        # The product of a quotient of 28 bits is exact in float64.
        usual = _remainder(code, quotient, d, partial(_less_multiple, c, d))
        rest = t.cast(code.rarely(quotient, 2.0**28, usual, lambda: _far_remainder(code, c, d)), "float32")
    else:
        quotient = code.let(a / b, "q")
        # Its products and those of the rest, of 32 bits, are exact.
        head = code.let(double.upper(b), "head")

        def difference(q: t.Expr) -> t.Expr:
            r, lost = double.exact_difference(code, a, code.let(q * head, "p"))
            return r - q * (b - head) + lost

        usual = _remainder(code, quotient, b, difference)
        rest = code.rarely(quotient, 2.0**21, usual, lambda: t.libm("fmod", a, b))
    rest = t.select(t.equal(b, INF) & (a < INF), a, rest)
    return with_sign(code, t.select(t.isnan(y), y, rest), x)


def _less_multiple(a: t.Expr, b: t.Expr, quotient: t.Expr) -> t.Expr:
    return a - quotient * b


def _remainder(code: t.Code, quotient: t.Expr, b: t.Expr, difference: Callable[[t.Expr], t.Expr]) -> t.Expr:
    rest = code.let(difference(code.let(t.intrinsic("trunc", quotient), "q")), "r")
    return code.let(t.select(rest < 0.0, rest + b, rest), "r")  # the quotient may have been rounded up


def _far_remainder(code: t.Code, a: t.Expr, b: t.Expr) -> t.Expr:
    """Divide by multiples of b first; quotients of two float32 are below 2**280."""
    for step in range(9, -1, -1):
        divisor = code.let(b * 2.0 ** (28 * step), "d")
        a = _remainder(code, a / divisor, divisor, partial(_less_multiple, a, divisor))
    return a


Function = Callable[..., t.Expr]


def _by_dtype(single_function: Function, double_function: Function) -> Function:
    return lambda code, x: single_function(code, x) if x.dtype == "float32" else double_function(code, x)


def _in_double(double_function: Function) -> Function:
    return lambda code, x: t.cast(double_function(code, t.cast(x, "float64")), x.dtype)


OWN: dict[Op, Function] = {
    ops.exp: _by_dtype(exp, double.exp),
    ops.log: _by_dtype(log, double.log),
    ops.log1p: _by_dtype(log1p, double.log1p),
    ops.expm1: _by_dtype(expm1, double.expm1),
    ops.tanh: _by_dtype(tanh, double.tanh),
    ops.erf: _by_dtype(erf, double.erf),
    ops.sin: _by_dtype(sin, double.sin),
    ops.cos: _by_dtype(cos, double.cos),
    ops.asin: asin,
    ops.acos: acos,
    ops.atan: atan,
    ops.sinh: _in_double(double.sinh),
    ops.cosh: _in_double(double.cosh),
    ops.asinh: _in_double(double.asinh),
    ops.acosh: _in_double(double.acosh),
    ops.atanh: _by_dtype(atanh, double.atanh),
    ops.atan2: atan2,
    ops.pow: pow,
}
