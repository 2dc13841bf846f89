"""Elementwise operations: tables of name, reference, dtype, cost and gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril.graph import (
    Arr,
    Op,
    binary,
    boolean,
    bools,
    broadcast,
    composite,
    exactly,
    floating,
    integer,
    integral,
    ints,
    logical,
    numeric,
    op,
    operand,
    positive,
    same_shape,
    sample,
    unary,
)
from mithril.ops.basic import cast

Array = Any  # a NumPy array; the type hints of its operators are too narrow for dynamic dtypes
ANY = (sample((3, 4)), sample((), label="scalar"))
POSITIVE = (sample(positive((3, 4))),)
INSIDE = (sample(Arr((3, 4), low=-0.9, high=0.9)),)
PAIR = (sample((3, 4), (3, 4)), sample((2, 1, 4), (3, 1), label="broadcast"))
INT_PAIR = (sample(ints((3, 4), -5, 5), ints((3, 4), -3, 3), label="int"),)
NO_STEPS = "it is piecewise constant"


# -- references missing in NumPy ----------------------------------------------------------------------------------
_erf64, _erfc64 = np.frompyfunc(math.erf, 1, 1), np.frompyfunc(math.erfc, 1, 1)


def _erf(x: Array) -> Array:
    return np.asarray(_erf64(x.astype(np.float64)), dtype=np.float64).astype(x.dtype)


# Giles' approximation of the inverse error function for single precision: central and tail polynomial.
CENTRAL = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 2.1858087e-04, -1.25372503e-03,
            -4.17768164e-03, 2.46640727e-01, 1.50140941e00)  # fmt: skip
# Coefficients of the polynomial for the tail of erfinv, highest power first.
TAIL = (-2.00214257e-04, 1.00950558e-04, 1.34934322e-03, -3.67342844e-03, 5.73950773e-03, -7.6224613e-03,
         9.43887047e-03, 1.00167406e00, 2.83297682e00)  # fmt: skip


def _erfinv(x: Array) -> Array:
    kind = np.float64 if x.dtype == np.float64 else np.float32
    z = np.abs(x.astype(kind))
    # 1 - z is exact near 1, where 1 - z * z would lose digits.
    w = -np.log((kind(1) - z) * (kind(1) + z))
    central, tail = w - kind(2.5), np.sqrt(np.maximum(w, 0)) - kind(3)
    inner, outer = np.full_like(z, CENTRAL[0]), np.full_like(z, TAIL[0])
    for a, b in zip(CENTRAL[1:], TAIL[1:], strict=True):
        inner, outer = kind(a) + inner * central, kind(b) + outer * tail
    # Giles fitted one polynomial up to 5, and the other beyond.
    y = np.where(w < 5, inner, outer) * z
    if kind is np.float64:
        for _ in range(2):  # two Newton steps refine the single-precision result to double precision
            excess = np.where(z < 0.5, _erf(y) - z, (1 - z) - _erfc64(y).astype(np.float64))  # erf(y) - z
            y = y - np.where(np.isfinite(y), excess / (2 / math.sqrt(math.pi) * np.exp(-y * y)), 0)
    return np.asarray(np.copysign(np.where(z == 1, np.inf, y), x), dtype=x.dtype)


def _sign(x: Array) -> Array:
    return np.sign(x) + x.dtype.type(0)  # +0 for both zeros in every dtype


def _floordiv(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":
        # Libraries differ for integers divided by 0: NumPy warns and gives 0, C is undefined.
        return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b))).astype(a.dtype)
    return np.floor_divide(a, b)


def _mod(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":
        return np.where(b == 0, 0, np.mod(a, np.where(b == 0, 1, b))).astype(a.dtype)
    return np.mod(a, b)


def _pow(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        # materialized: for a scalar exponent 0.5 NumPy computes the square root.
        a, b = np.broadcast_arrays(a, b)
        return np.power(a, b.copy())
    power = np.power(a, np.maximum(b, 0))
    # NumPy raises for negative exponents; 1 and -1 are the only integers with integer reciprocals.
    unit = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b & 1), 0)) if a.dtype.kind == "i" else (a == 1)
    return np.where(b < 0, unit, power).astype(a.dtype)


def _shift_left(a: Array, b: Array) -> Array:
    bits = a.dtype.itemsize * 8
    in_range = (b >= 0) & (b < bits)
    return np.where(in_range, np.left_shift(a, np.where(in_range, b, 0)), 0).astype(a.dtype)


def _shift_right(a: Array, b: Array) -> Array:
    bits = a.dtype.itemsize * 8
    in_range = (b >= 0) & (b < bits)
    past = np.right_shift(a, np.asarray(bits - 1, a.dtype)) if a.dtype.kind == "i" else np.zeros_like(a)
    return np.where(in_range, np.right_shift(a, np.where(in_range, b, 0)), past).astype(a.dtype)


def _tie_gradient(a: Any, b: Any, g: Any, wins: Any) -> Any:
    """Return the gradient of one operand of maximum or minimum; in a tie both get half."""
    return g * where(equal(a, b), 0.5, cast(wins, dtype=g.dtype))


def _pow_vjp(g: Any, y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    # a**0 is 1 for every a: the slope is 0 also at a = 0, where b * a**(b - 1) would be 0 * inf.
    nothing = equal(b, 0.0)
    slope = where(nothing, 0.0, b * pow(a, where(nothing, 1.0, b - 1.0)))
    # 0**b stays 0 for b > 0: without the selection 0 * log(0) is nan.
    zero = equal(a, 0.0)
    return g * slope, g * where(zero, 0.0, y * log(where(zero, 1.0, a)))  # nan for a negative base


# -- one operand --------------------------------------------------------------------------------------------------
@composite(elementwise=True, promotes="float", samples=POSITIVE, flops=5)
def rsqrt(x):
    """1 / sqrt(x)"""
    return 1.0 / sqrt(x)


@rsqrt.vjp
def _(g, y, x):
    return (g * y / x * -0.5,)


#      name        reference      documentation                                       gradient
neg = unary("neg", np.negative, "-x", dtype=numeric, vjp=lambda g, y, x: -g, samples=ANY, linear="x")
abs = unary("abs", np.abs, "Absolute value; the gradient at 0 is 0.", dtype=numeric,
            vjp=lambda g, y, x: g * sign(x), samples=ANY)  # fmt: skip
sign: Op = unary("sign", _sign, "-1, 0 or 1; nan for nan.", dtype=numeric, no_vjp=NO_STEPS, samples=ANY)
exp = unary("exp", np.exp, "Exponential, e to the power of x.", flops=12, vjp=lambda g, y, x: g * y, samples=ANY)
expm1 = unary(
    "expm1", np.expm1, "exp(x) - 1, accurate near 0.", flops=14, vjp=lambda g, y, x: g * (y + 1.0), samples=ANY
)
log = unary("log", np.log, "Natural logarithm.", flops=12, vjp=lambda g, y, x: g / x, samples=POSITIVE)
log1p = unary("log1p", np.log1p, "log(1 + x), accurate near 0.", flops=14, vjp=lambda g, y, x: g / (x + 1.0),
              samples=(sample(Arr((3, 4), low=-0.5, high=3.0)),))  # fmt: skip
sqrt = unary("sqrt", np.sqrt, "Square root.", flops=4, vjp=lambda g, y, x: g * 0.5 / y, samples=POSITIVE)
sin = unary("sin", np.sin, "Sine.", flops=14, vjp=lambda g, y, x: g * cos(x), samples=ANY)
cos: Op = unary("cos", np.cos, "Cosine.", flops=14, vjp=lambda g, y, x: -(g * sin(x)), samples=ANY)
asin = unary("asin", np.arcsin, "Arc sine.", flops=16, vjp=lambda g, y, x: g * rsqrt(1.0 - x * x), samples=INSIDE)
acos = unary("acos", np.arccos, "Arc cosine.", flops=16, vjp=lambda g, y, x: -(g * rsqrt(1.0 - x * x)), samples=INSIDE)
atan = unary("atan", np.arctan, "Arc tangent.", flops=16, vjp=lambda g, y, x: g / (x * x + 1.0), samples=ANY)
sinh = unary("sinh", np.sinh, "Hyperbolic sine.", flops=16, vjp=lambda g, y, x: g * cosh(x), samples=ANY)
cosh: Op = unary("cosh", np.cosh, "Hyperbolic cosine.", flops=16, vjp=lambda g, y, x: g * sinh(x), samples=ANY)
tanh = unary(
    "tanh",
    np.tanh,
    "Hyperbolic tangent.",
    flops=14,
    vjp=lambda g, y, x: g * (1.0 - y * y),
    samples=ANY,
    precision="follow",
    activation="tanh",
)
asinh = unary("asinh", np.arcsinh, "Inverse hyperbolic sine.", flops=18,
              vjp=lambda g, y, x: g * rsqrt(x * x + 1.0), samples=ANY)  # fmt: skip
acosh = unary("acosh", np.arccosh, "Inverse hyperbolic cosine.", flops=18,
              vjp=lambda g, y, x: g * rsqrt(x * x - 1.0), samples=(sample(positive((3, 4), 1.2, 4.0)),))  # fmt: skip
atanh = unary("atanh", np.arctanh, "Inverse hyperbolic tangent.", flops=18,
              vjp=lambda g, y, x: g / (1.0 - x * x), samples=INSIDE)  # fmt: skip
erf = unary("erf", _erf, "Error function.", flops=20,
            vjp=lambda g, y, x: g * exp(-(x * x)) * (2.0 / math.sqrt(math.pi)), samples=ANY)  # fmt: skip
erfinv = unary("erfinv", _erfinv, "Inverse of the error function on (-1, 1).", flops=30, tolerance=4.0,
               vjp=lambda g, y, x: g * exp(y * y) * (math.sqrt(math.pi) / 2.0), samples=INSIDE)  # fmt: skip
floor = unary("floor", np.floor, "Largest integer not above x.", no_vjp=NO_STEPS, samples=ANY)
ceil = unary("ceil", np.ceil, "Smallest integer not below x.", no_vjp=NO_STEPS, samples=ANY)
round = unary("round", np.round, "Nearest integer; halves round to even.", no_vjp=NO_STEPS, samples=ANY)
trunc = unary("trunc", np.trunc, "Integer part: rounding towards zero.", no_vjp=NO_STEPS, samples=ANY)
isnan = unary("isnan", np.isnan, "Whether x is nan.", dtype=boolean, no_vjp="its result is a bool", samples=ANY)
logical_not = unary("logical_not", np.logical_not, "not x, for bools.", dtype=logical, no_vjp="its result is a bool",
                    samples=(sample(bools((3, 4))),))  # fmt: skip
bitwise_not = unary(
    "bitwise_not",
    np.invert,
    "All bits inverted; not x for bools.",
    dtype=integral,
    no_vjp="its results are integers",
    samples=(sample(ints((3, 4), -9, 9)), sample(bools((3, 4)))),
)

# -- two operands -------------------------------------------------------------------------------------------------
add = binary("add", np.add, "a + b", dtype=numeric, commutative=True, linear="a b", vjp=lambda g, y, a, b: (g, g),
             samples=PAIR + INT_PAIR)  # fmt: skip
sub = binary("sub", np.subtract, "a - b", dtype=numeric, vjp=lambda g, y, a, b: (g, -g), samples=PAIR + INT_PAIR,
             linear="a b")  # fmt: skip
mul = binary("mul", np.multiply, "a * b", dtype=numeric, commutative=True, vjp=lambda g, y, a, b: (g * b, g * a),
             linear="a | b", samples=PAIR + INT_PAIR)  # fmt: skip
div = binary("div", np.divide, "a / b, for floats.", dtype=floating, promotes="float", flops=4, linear="a",
             vjp=lambda g, y, a, b: (g / b, -(g * y / b)), samples=(sample((3, 4), positive((3, 4))),
             sample((2, 1, 4), positive((3, 1)), label="broadcast")))  # fmt: skip
floordiv = binary("floordiv", _floordiv, "a // b, rounded towards minus infinity; 0 for integers divided by 0.",
                  dtype=numeric, no_vjp=NO_STEPS, flops=5,
                  samples=(sample((3, 4), positive((3, 4))), *INT_PAIR))  # fmt: skip
mod = binary("mod", _mod, "Remainder of floordiv, with the sign of b; 0 for integers modulo 0.", dtype=numeric, flops=6,
             vjp=lambda g, y, a, b: (g, -(g * floordiv(a, b))),
             samples=(sample((3, 4), positive((3, 4), 0.7, 1.3)), *INT_PAIR))  # fmt: skip
pow = binary("pow", _pow, "a to the power of b; for negative integer exponents 0, except for bases 1 and -1.",
             dtype=numeric, flops=24, vjp=_pow_vjp, tolerance=4.0,
             samples=(sample(positive((3, 4)), (3, 4)), sample(ints((3, 4), -3, 3), ints((3, 4), -2, 3), label="int"),
                      sample((3, 4), exactly(2.0, shape=()), label="square")))  # fmt: skip
atan2 = binary("atan2", np.arctan2, "Angle of the point (b, a).", dtype=floating, promotes="float", flops=20,
               vjp=lambda g, y, a, b: (g * b / (a * a + b * b), -(g * a / (a * a + b * b))), samples=PAIR)  # fmt: skip
maximum = binary("maximum", np.maximum, "max(a, b); nan propagates. Ties split the gradient evenly.", commutative=True,
                 vjp=lambda g, y, a, b: (_tie_gradient(a, b, g, greater(a, b)), _tie_gradient(a, b, g, less(a, b))),
                 samples=PAIR + INT_PAIR)  # fmt: skip
minimum = binary("minimum", np.minimum, "min(a, b); nan propagates. Ties split the gradient evenly.", commutative=True,
                 vjp=lambda g, y, a, b: (_tie_gradient(a, b, g, less(a, b)), _tie_gradient(a, b, g, greater(a, b))),
                 samples=PAIR + INT_PAIR)  # fmt: skip


def _comparison(name: str, reference: Any, doc: str, commutative: bool = False) -> Any:
    return binary(name, reference, doc, dtype=boolean, commutative=commutative, no_vjp="its result is a bool",
                  samples=PAIR + INT_PAIR)  # fmt: skip


equal = _comparison("equal", np.equal, "a == b", commutative=True)
not_equal = _comparison("not_equal", np.not_equal, "a != b", commutative=True)
less: Op = _comparison("less", np.less, "a < b")
less_equal = _comparison("less_equal", np.less_equal, "a <= b")
greater: Op = _comparison("greater", np.greater, "a > b")
greater_equal = _comparison("greater_equal", np.greater_equal, "a >= b")


def _bools(name: str, reference: Any, doc: str) -> Any:
    return binary(name, reference, doc, dtype=logical, commutative=True, no_vjp="its result is a bool",
                  samples=(sample(bools((3, 4)), bools((1, 4))),))  # fmt: skip


logical_and = _bools("logical_and", np.logical_and, "a and b, for bools.")
logical_or = _bools("logical_or", np.logical_or, "a or b, for bools.")
logical_xor = _bools("logical_xor", np.logical_xor, "Exactly one of a and b, for bools.")


def _bits(name: str, reference: Any, doc: str, commutative: bool = True) -> Any:
    rule = integral if commutative else integer
    samples = (sample(ints((3, 4), 0, 9), ints((3, 4), 0, 5)),)
    return binary(
        name, reference, doc, dtype=rule, commutative=commutative, no_vjp="its results are integers", samples=samples
    )


bitwise_and = _bits("bitwise_and", np.bitwise_and, "Bits set in both.")
bitwise_or = _bits("bitwise_or", np.bitwise_or, "Bits set in either.")
bitwise_xor = _bits("bitwise_xor", np.bitwise_xor, "Bits set in exactly one operand.")
shift_left = _bits("shift_left", _shift_left, "Left shift; 0 for shifts beyond the width.", commutative=False)
shift_right = _bits("shift_right", _shift_right, "Right shift, arithmetic for signed integers.", commutative=False)


# -- with a condition or attributes -------------------------------------------------------------------------------
def _where_dtype(dtypes: Any, attributes: Any) -> Any:
    logical(dtypes, attributes)
    return operand(1)(dtypes, attributes)


@op(
    shape=broadcast,
    dtype=_where_dtype,
    flops=1,
    promotes="same",
    promoted=("a", "b"),
    samples=[sample(bools((3, 4)), (3, 4), (3, 4)), sample(bools((3, 1)), (4,), (1, 4), label="broadcast")],
)
def where(condition, a, b):
    """a where the condition is True, else b."""
    return np.where(condition, a, b)


where.elementwise = True


@where.vjp
def _(g, y, condition, a, b):
    return None, where(condition, g, 0.0), where(condition, 0.0, g)


@op(
    shape=same_shape,
    dtype=numeric,
    flops=2,
    promotes="same",
    samples=[
        sample((3, 4), low=-0.5, high=1.0),
        sample((3, 4), high=0.25, label="high"),
        sample(ints((3, 4), -5, 5), low=0.0),
        sample((3, 4), label="unbounded"),
    ],
    precision="follow",
)
def clip(x, *, low: float | None = None, high: float | None = None):
    """min(max(x, low), high); nan propagates. The gradient at the bounds is 1."""
    kind = x.dtype.type
    out = x if low is None else np.maximum(x, kind(low))
    return out if high is None else np.minimum(out, kind(high))


clip.elementwise = True


@clip.vjp
def _(g, y, x, *, low, high):
    masked = g
    if low is not None:
        masked = where(less(x, low), 0.0, masked)
    if high is not None:
        masked = where(greater(x, high), 0.0, masked)
    return (masked,)


# -- composites ---------------------------------------------------------------------------------------------------
@composite(elementwise=True, promotes="same", samples=ANY, flops=1, precision="full")
def square(x):
    """x * x"""
    return x * x


@composite(elementwise=True, promotes="float", samples=POSITIVE, flops=4)
def reciprocal(x):
    """1 / x"""
    return 1.0 / x


@composite(elementwise=True, promotes="float", samples=ANY, flops=20)
def tan(x):
    """Tangent."""
    return sin(x) / cos(x)


@composite(elementwise=True, promotes="float", samples=POSITIVE, flops=13)
def log2(x):
    """Logarithm to base 2."""
    return log(x) * (1.0 / math.log(2.0))


@composite(elementwise=True, promotes="float", samples=ANY, flops=1)
def isinf(x):
    """Whether x is infinite."""
    return equal(abs(x), math.inf)


@composite(elementwise=True, promotes="float", samples=ANY, flops=1)
def isfinite(x):
    """Whether x is neither infinite nor nan."""
    return less(abs(x), math.inf)


isinf.no_vjp("its result is a bool")
isfinite.no_vjp("its result is a bool")
