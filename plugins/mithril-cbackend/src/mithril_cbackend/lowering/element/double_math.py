"""Vectorizable elementary functions of float64; the largest error is 3 ulp.

Reductions and polynomials without another source are those of fdlibm (Sun Microsystems, 1993), with selections in place
of branches. Parts of constants have trailing zero bits where their products must be exact.
"""

from __future__ import annotations

import math

from mithril_cbackend import tir as t

INF = float("inf")
ROUNDING = 6755399441055744.0  # adding it to a moderate number leaves the nearest integer in the low bits
ROUNDING_BITS = 0x4338000000000000  # of ROUNDING, 1.5 * 2**52
TWO_OVER_PI = 2 / math.pi


def d(value: float) -> t.Expr:
    return t.const(value, "float64")


def q(value: int) -> t.Expr:
    return t.const(value, "int64")


def polynomial(code: t.Code, x: t.Expr, factors: tuple[float, ...]) -> t.Expr:
    """Evaluate a polynomial by Horner's rule, highest power first."""
    total = t.const(factors[0], x.dtype)
    for factor in factors[1:]:
        total = total * x + factor
    return code.let(total, "p")


def absolute(code: t.Code, x: t.Expr) -> t.Expr:
    return code.let(t.intrinsic("abs", x), "a")


def with_sign(code: t.Code, x: t.Expr, sign: t.Expr) -> t.Expr:
    """Return |x| with the sign of another number, also of zero."""
    integer, top = ("int64", q(63)) if x.dtype == "float64" else ("int32", t.const(31, "int32"))
    magnitude = t.bits(t.intrinsic("abs", x), integer)
    return t.bits(magnitude | t.bits(sign, integer) >> top << top, x.dtype)


def upper(x: t.Expr) -> t.Expr:
    """Return the first 21 bits of the mantissa: products of two such numbers are exact."""
    return t.bits(t.bits(x, "int64") & q(-(1 << 32)), "float64")


# -- exponentials -------------------------------------------------------------------------------------------------
LOG2_E = 1.4426950408889634
LN2, LN2_REST = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Chebyshev fit of (exp(r) - 1 - r) / r**2.
EXP = (2.5100375832561234e-08, 2.7620075879983367e-07, 2.7557268480310024e-06, 2.4801521322368692e-05,
       0.00019841269863040545, 0.0013888888917196719, 0.008333333333330065, 0.041666666666624164, 0.16666666666666669,
       0.5000000000000001)  # fmt: skip


def power_of_two(k: t.Expr) -> t.Expr:
    return t.bits(k + q(1023) << q(52), "float64")


def _reduced(code: t.Code, x: t.Expr, low: float, high: float) -> tuple[t.Expr, t.Expr]:
    """Return exp(r) - 1 and k with exp(x) = exp(r) 2**k, for x clamped to a range; nan stays."""
    c = code.let(t.select(x > high, d(high), x), "c")
    c = code.let(t.select(c < low, d(low), c), "c")
    biased = code.let(c * LOG2_E + ROUNDING, "k")
    n = code.let(biased - ROUNDING, "n")
    r = code.let(c - n * LN2 - n * LN2_REST, "r")
    less_one = code.let(polynomial(code, r, EXP) * (r * r) + r, "e")
    return less_one, code.let(t.bits(biased, "int64") - q(ROUNDING_BITS), "k")


def exp(code: t.Code, x: t.Expr) -> t.Expr:
    less_one, k = _reduced(code, code.let(x, "x"), -746.0, 710.0)
    # Two factors, since 2**k may be no normal number where the result is one, or rounds to one.
    half = code.let(k >> q(1), "h")
    return (less_one + 1.0) * power_of_two(half) * power_of_two(k - half)


def half_expm1(code: t.Code, x: t.Expr) -> t.Expr:
    """Compute (exp(x) - 1) / 2, which does not overflow where sinh does not."""
    less_one, k = _reduced(code, x, -40.0, 710.5)
    one = code.let(power_of_two(q(0) - t.select(k < q(60), k, q(60))), "o")  # 1 / 2**k, as far as it counts
    return code.let((less_one + (d(1.0) - one)) * power_of_two(k - q(2)) * 2.0, "h")


def expm1(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    return t.select(t.equal(x, 0.0), x, half_expm1(code, x) * 2.0)  # of -0 it is -0


def tanh(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    less_one = code.let(half_expm1(code, absolute(code, x) * -2.0) * 2.0, "e")
    return with_sign(code, less_one / (less_one + 2.0), x)


def sinh(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    half = half_expm1(code, absolute(code, x))
    far = half > 1e30  # where the sum is half, and infinity over infinity no number
    return with_sign(code, t.select(far, half, half + half / (half * 2.0 + 1.0)), x)


def cosh(code: t.Code, x: t.Expr) -> t.Expr:
    half = code.let(half_expm1(code, absolute(code, code.let(x, "x"))) + 0.5, "h")
    return half + d(0.25) / half


# -- logarithms ---------------------------------------------------------------------------------------------------
LOG = (1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
       2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01)  # fmt: skip


def _mantissa(code: t.Code, x: t.Expr, largest: float) -> tuple[t.Expr, t.Expr]:
    """Return m in [largest / 2, largest) and k, as numbers, with x = m 2**k; x is positive and finite."""
    # Below the least normal number the exponent field is 0: these are scaled first.
    tiny = code.let(x < 2.2250738585072014e-308, "tiny")
    word = code.let(t.bits(t.select(tiny, x * 2.0**54, x), "int64"), "w")
    m = code.let(t.bits(word & q((1 << 52) - 1) | q(1023 << 52), "float64"), "m")
    large = code.let(m >= largest, "large")
    exponent = (word >> q(52)) - t.select(tiny, q(1023 + 54), q(1023)) + t.select(large, q(1), q(0))
    k = code.let(t.bits(exponent + q(ROUNDING_BITS), "float64") - ROUNDING, "k")
    return code.let(t.select(large, m * 0.5, m), "m"), k


def log(code: t.Code, x: t.Expr, rest: t.Expr | None = None) -> t.Expr:
    """Compute log(x) + rest, for a small rest."""
    x = code.let(x, "x")
    m, k = _mantissa(code, x, math.sqrt(2))
    r = code.let(m - 1.0, "r")
    s = code.let(r / (r + 2.0), "s")
    z = code.let(s * s, "z")
    half_square = code.let(r * r * 0.5, "h")
    low = k * LN2_REST if rest is None else k * LN2_REST + rest
    y = k * LN2 - ((half_square - (s * (half_square + polynomial(code, z, LOG) * z) + low)) - r)
    y = t.select(x > 0.0, y, t.select(t.equal(x, 0.0), d(-INF), d(math.nan)))
    return t.select(x < INF, y, x)  # infinity and nan are unchanged


def log1p(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    u = code.let(x + 1.0, "u")
    # The rounding error of the sum, to first order.
    lost = code.let(t.select(x < 1.0, x - (u - 1.0), d(1.0) - (u - x)) / u, "l")
    y = log(code, u, lost)
    return t.select(t.equal(x, 0.0), x, y)


def asinh(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    a = absolute(code, x)
    square = code.let(a * a, "z")
    return with_sign(code, _log1p_or_log(code, a, a + square / (t.intrinsic("sqrt", square + 1.0) + 1.0)), x)


def acosh(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    less = code.let(x - 1.0, "l")
    return t.select(x < 1.0, d(math.nan), _log1p_or_log(code, x, less + t.intrinsic("sqrt", less * (less + 2.0))))


def _log1p_or_log(code: t.Code, x: t.Expr, y: t.Expr) -> t.Expr:
    """Return log(1 + y), and log(2 x) for large x, whose square is infinite or swallows 1."""
    # From 2**27 on the square swallows 1, from 2**512 on it is infinite: any limit between serves.
    far = code.let(x > 2.0**60, "far")
    return log1p(code, t.select(far, x, y)) + t.select(far, d(math.log(2)), d(0.0))


def atanh(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    a = absolute(code, x)
    y = code.let(log1p(code, (a + a) / (d(1.0) - a)) * 0.5, "y")
    return with_sign(code, y, x)


# -- power --------------------------------------------------------------------------------------------------------
POW = (2.06975017800338417784e-01, 2.30660745775561754067e-01, 2.72728123808534006489e-01, 3.33333329818377432918e-01,
       4.28571428578550184252e-01, 5.99999999999994648725e-01)  # fmt: skip
OVER_LN2, OVER_LN2_UPPER, OVER_LN2_LOWER = (
    9.61796693925975554329e-01,
    9.61796700954437255859e-01,
    -7.02846165095275826516e-09,
)
LOG2_15, LOG2_15_REST = 5.84962487220764160156e-01, 1.35003920212974897128e-08
LN2_UPPER, LN2_LOWER = 6.93147182464599609375e-01, -1.90465429995776804525e-09


def magnitude_of_power(code: t.Code, a: t.Expr, y: t.Expr) -> t.Expr:
    """Compute a**y for positive a: a logarithm to base 2 of about 66 bits, and the exponential of its product."""
    finite = code.let(t.select((a > 0.0) & (a < INF), a, d(1.0)), "f")
    m, n = _mantissa(code, finite, math.sqrt(3))
    # As in fdlibm, the logarithm of m or of m / 1.5, whichever is nearer to 0: the series in s is short.
    high = code.let(m > math.sqrt(1.5), "high")
    nearest = code.let(t.select(high, d(1.5), d(1.0)), "nearest")
    u, v = code.let(m - nearest, "u"), code.let(d(1.0) / (m + nearest), "v")
    s = code.let(u * v, "s")
    s_upper = code.let(upper(s), "s_upper")
    sum_upper = code.let(upper(m + nearest), "sum_upper")
    s_lower = code.let(v * ((u - s_upper * sum_upper) - s_upper * (m - (sum_upper - nearest))), "s_lower")
    z = code.let(s * s, "z")
    r = code.let(z * z * polynomial(code, z, POW) + s_lower * (s_upper + s), "r")
    square = code.let(s_upper * s_upper, "square")
    t_upper = code.let(upper(square + 3.0 + r), "t_upper")
    t_lower = r - ((t_upper - 3.0) - square)
    u, v = code.let(s_upper * t_upper, "u"), code.let(s_lower * t_upper + t_lower * s, "v")
    p_upper = code.let(upper(u + v), "p_upper")
    p_lower = v - (p_upper - u)
    z_upper = code.let(p_upper * OVER_LN2_UPPER, "z_upper")
    z_lower = p_upper * OVER_LN2_LOWER + p_lower * OVER_LN2 + t.select(high, d(LOG2_15_REST), d(0.0))
    z_lower = code.let(z_lower, "z_lower")
    base = code.let(t.select(high, d(LOG2_15), d(0.0)), "base")
    log_upper = code.let(upper(z_upper + z_lower + base + n), "log_upper")
    log_lower = code.let(z_lower - (((log_upper - n) - base) - z_upper), "log_lower")
    # Past these exponents every power but that of 1 is infinite or 0.
    y = code.let(t.select(y > 2.0**80, d(2.0**80), y), "y")
    y = code.let(t.select(y < -(2.0**80), d(-(2.0**80)), y), "y")
    y_upper = code.let(upper(y), "y_upper")
    lower = code.let((y - y_upper) * log_upper + y * log_lower, "lower")
    higher = code.let(y_upper * log_upper, "higher")
    beyond = code.let(lower + higher, "e")
    # From 2**1024 on results are infinite, from 2**-1075 down 0, which the products at the end give near these
    # limits; far exponents would leave their field.
    over, under = code.let(beyond > 1025.0, "over"), code.let(beyond < -1076.0, "under")
    out_of_range = over | under
    lower, higher = (code.let(t.select(out_of_range, d(0.0), part), "part") for part in (lower, higher))
    biased = code.let(lower + higher + ROUNDING, "k")
    higher = code.let(higher - (biased - ROUNDING), "part")
    fraction = code.let(upper(lower + higher), "fraction")
    u = code.let(fraction * LN2_UPPER, "u")
    v = code.let((lower - (fraction - higher)) * math.log(2) + fraction * LN2_LOWER, "v")
    r = code.let(u + v, "r")
    rest = code.let(v - (r - u), "w")
    result = code.let((polynomial(code, r, EXP) * (r * r) + (rest + r * rest)) + r + 1.0, "p")
    k = code.let(t.bits(biased, "int64") - q(ROUNDING_BITS), "k")
    half = code.let(k >> q(1), "h")
    result = result * power_of_two(half) * power_of_two(k - half)
    result = t.select(over, d(INF), t.select(under, d(0.0), result))
    grows = (y > 0.0) ^ (a < 1.0)
    result = t.select(t.equal(a, 0.0) | t.equal(a, INF), t.select(grows, d(INF), d(0.0)), result)
    return t.select(t.isnan(a), a, result)


# -- trigonometry -------------------------------------------------------------------------------------------------
HALF_PI = (
    1.57079632673412561417e00,
    6.07710050630396597660e-11,
    2.02226624871116645580e-21,
    8.47842766036889956997e-32,
)
FAR = 2.0**20  # up to it, products of the quotient with the first parts above are exact
SIN = (1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
       8.33333333332248946124e-03)  # fmt: skip
SIN_CUBE = -1.66666666666666324348e-01
COS = (-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
       2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02)  # fmt: skip


def exact_difference(code: t.Code, a: t.Expr, b: t.Expr) -> tuple[t.Expr, t.Expr]:
    """Return the difference and its rounding error."""
    difference = code.let(a - b, "r")
    lost = code.let(a - difference, "v")
    return difference, code.let((a - (difference + lost)) + (lost - b), "e")


def _sin_or_cos(code: t.Code, x: t.Expr, name: str, turn: int) -> t.Expr:
    """Compute the sine of x + turn * pi / 2."""
    x = code.let(x, "x")
    biased = code.let(x * TWO_OVER_PI + ROUNDING, "k")
    n = code.let(biased - ROUNDING, "n")
    r, lost = exact_difference(code, code.let(x - n * HALF_PI[0], "r"), code.let(n * HALF_PI[1], "b"))
    r, more = exact_difference(code, r, code.let(n * HALF_PI[2], "b"))
    lost = code.let(lost + more - n * HALF_PI[3], "l")
    y = code.let(r + lost, "y")
    rest = code.let((r - y) + lost, "w")
    z = code.let(y * y, "z")
    cube = code.let(z * y, "c")
    sine = y - ((z * (rest * 0.5 - cube * polynomial(code, z, SIN)) - rest) - cube * SIN_CUBE)
    half = code.let(z * 0.5, "h")
    less = code.let(d(1.0) - half, "l")
    cosine = less + (((d(1.0) - less) - half) + (z * z * polynomial(code, z, COS) - y * rest))
    quadrant = code.let(t.bits(biased, "int64") + q(turn), "q")
    result = t.select(t.equal(quadrant & q(1), q(0)), sine, cosine)
    result = code.let(t.select(t.equal(quadrant & q(2), q(0)), result, result * -1.0), "s")
    if turn == 0:
        result = t.select(t.equal(x, 0.0), x, result)
    return code.rarely(t.intrinsic("abs", x), FAR, result, lambda: t.libm(name, x))


def sin(code: t.Code, x: t.Expr) -> t.Expr:
    return _sin_or_cos(code, x, "sin", 0)


def cos(code: t.Code, x: t.Expr) -> t.Expr:
    return _sin_or_cos(code, x, "cos", 1)


ATAN = (1.62858201153657823623e-02, -3.65315727442169155270e-02, 4.97687799461593236017e-02,
        -5.83357013379057348645e-02, 6.66107313738753120669e-02, -7.69187620504482999495e-02,
        9.09088713343650656196e-02, -1.11111104054623557880e-01, 1.42857142725034663711e-01,
        -1.99999999998764832476e-01, 3.33333333333329318027e-01)  # fmt: skip
ASIN = (3.47933107596021167570e-05, 7.91534994289814532176e-04, -4.00555345006794114027e-02, 2.01212532134862925881e-01,
        -3.25565818622400915405e-01, 1.66666666666666657415e-01)  # fmt: skip
ASIN_BELOW = (7.70381505559019352791e-02, -6.88283971605453293030e-01, 2.02094576023350569471e00,
              -2.40339491173441421878e00, 1.0)  # fmt: skip
PI_REST = 1.2246467991473532e-16  # pi is this plus the float64


def atan_terms(code: t.Code, z: t.Expr) -> t.Expr:
    return polynomial(code, z, ATAN) * z * -1.0


def asin_terms(code: t.Code, z: t.Expr) -> t.Expr:
    return polynomial(code, z, ASIN) / polynomial(code, z, ASIN_BELOW) * z


# -- error function -----------------------------------------------------------------------------------------------
# Chebyshev fits: of erf(x) / x in x**2 up to 1, and of erfc(x) exp(x**2) in (x - 3) / (x + 3) from 0.5 to 6.5.
ERF = (5.957176147748911e-11, -1.1372848856791674e-09, 1.4659775274047436e-08, -1.6350312701054695e-07,
       1.6461000484121368e-06, -1.4925595266831182e-05, 0.0001205533111164271, -0.000854832698083379,
       0.0052239776248180145, -0.026866170645076792, 0.11283791670954879, -0.3761263890318375,
       1.1283791670955126)  # fmt: skip
ERFC = (1.1194750397588592e-08, 4.8166160711984854e-08, 2.3989621496205506e-08, -2.368984697778651e-07,
        -2.93393156151863e-07, 1.2530996464860833e-06, 2.1200496367247808e-06, -7.9782016517972e-06,
        -1.2860514419738883e-05, 6.405655870596479e-05, 4.5255300418742827e-05, -0.0005970619485115896,
        0.0007077464388178581, 0.004269136332832787, -0.024392499318669054, 0.07166583719797834,
        -0.15011593650077723, 0.24560380171233087, -0.3262335600430372, 0.17900115118138996)  # fmt: skip


def erf_parts(code: t.Code, y: t.Expr) -> tuple[t.Expr, t.Expr, t.Expr]:
    """Return erf(y) for y up to 1, erfc(y) for y from 0.5, and exp(-y * y); y is not negative."""
    y = code.let(t.select(y > 6.5, d(6.5), y), "y")  # where erf rounds to 1
    square = code.let(y * y, "z")
    slope = code.let(exp(code, square * -1.0), "g")
    scaled = code.let((y - 3.0) / (y + 3.0), "u")
    return y * polynomial(code, square, ERF), slope * polynomial(code, scaled, ERFC), slope


def erf(code: t.Code, x: t.Expr) -> t.Expr:
    x = code.let(x, "x")
    a = absolute(code, x)
    central, tail, _ = erf_parts(code, a)
    return with_sign(code, t.select(a < 1.0, central, d(1.0) - tail), x)
