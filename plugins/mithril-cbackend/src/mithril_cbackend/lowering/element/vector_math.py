"""Vectorizable exp, log, log1p, expm1, tanh and erf in float32.

Tests bound the largest errors in ulp against float64: exp 2, log 2, log1p 4, expm1 6, tanh 5, erf 6. Float64 and other
functions use the C library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mithril import ops
from mithril.graph import Op
from mithril_cbackend import tir as t

INF = float("inf")


def f(value: float) -> t.Expr:
    return t.const(value, "float32")


def i(value: int) -> t.Expr:
    return t.const(value, "int32")


def polynomial(code: t.Code, x: t.Expr, factors: Sequence[float]) -> t.Expr:
    """Evaluate a polynomial by Horner's rule, highest power first."""
    total = f(factors[0])
    for factor in factors[1:]:
        total = total * x + factor
    return code.let(total, "p")


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
    # Beyond these the result is infinite or 0; clamped first, because the exponent would overflow
    # into the sign.
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
    tiny = code.let(x < 1.17549435e-38, "tiny")
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
    u = code.let(exp(code, x), "u")
    less = code.let(u - 1.0, "l")
    y = less * (x / log(code, u))
    far = (x > 17.0) | (x < -17.0)
    y = t.select(far, less, y)
    return t.select(t.equal(u, 1.0), x, t.select(t.isnan(x), x, y))


TANH = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
        1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
TANH_BELOW = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def tanh(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    c = clamped(code, x, -7.90531110763549805, 7.90531110763549805)
    z = code.let(c * c, "z")
    y = c * polynomial(code, z, TANH) / polynomial(code, z, TANH_BELOW)
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


Function = Callable[[t.Code, t.Expr], t.Expr]
OWN: dict[Op, Function] = {
    ops.exp: exp,
    ops.log: log,
    ops.log1p: log1p,
    ops.expm1: expm1,
    ops.tanh: tanh,
    ops.erf: erf,
}
