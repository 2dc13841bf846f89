"""Element-wise operations on single elements: one function per operation, exact to the reference semantics."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import DType, Op, Registry, dtype as as_dtype
from mithril.ops import CENTRAL, TAIL
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import vector_math as m
from mithril_cbackend.lowering.element.double_math import erf_parts, with_sign
from mithril_cbackend.lowering.element.storage_dtypes import computed
from mithril_cbackend.lowering.int8x4.byte_operations import byte_limits, quantize_bytes

# A rule gets the code builder, the operands, the dtype of the first operand, and the attributes.
Rule = Callable[..., t.Expr]
RULES: Registry[Rule] = Registry("element-wise arithmetic in C")
rule = RULES


def one(dtype: DType, value: Any) -> t.Expr:
    return t.const(value, computed(dtype))


def function(code: t.Code, op: Op, *operands: t.Expr) -> t.Expr:
    """Evaluate an elementary function; the languages of devices have their own."""
    return m.OWN[op](code, *operands) if code.own_functions else t.libm(op.name, *operands)


# -- arithmetic ---------------------------------------------------------------------------------------------------
def _wrapping(operation: Callable[[Any, Any], Any], a: t.Expr, b: t.Expr, dtype: DType) -> t.Expr:
    """Apply an operation with wrap-around for integers.

    LLVM may assume that signed arithmetic never overflows, so integers are computed in 64 bits and truncated.
    """
    if not dtype.is_integer:
        result: t.Expr = operation(a, b)
        return result
    return t.cast(operation(t.cast(a, "int64"), t.cast(b, "int64")), dtype.name)


@rule(ops.add)
def add(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return _wrapping(operator.add, a, b, dtype)


@rule(ops.sub)
def sub(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return _wrapping(operator.sub, a, b, dtype)


@rule(ops.mul)
def mul(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return _wrapping(operator.mul, a, b, dtype)


@rule(ops.div)
def _div(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return a / b


@rule(ops.neg)
def _neg(code: t.Code, x: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    if dtype.is_float:
        return x * one(dtype, -1.0)
    return sub(code, one(dtype, 0), x, dtype)


@rule(ops.abs)
def _abs(code: t.Code, x: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    if dtype.is_float:
        return t.intrinsic("abs", x)
    if dtype.kind == "uint":
        return x
    return t.select(x < one(dtype, 0), _neg(code, x, dtype), x)


@rule(ops.sign)
def _sign(code: t.Code, x: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    up = x > one(dtype, 0)
    if dtype.kind == "uint":
        return t.cast(up, dtype.name)
    neither = t.select(t.isnan(x), x, one(dtype, 0)) if dtype.is_float else one(dtype, 0)  # +0 of both zeros
    return t.select(up, one(dtype, 1), t.select(x < one(dtype, 0), one(dtype, -1), neither))


@rule(ops.maximum)
def _maximum(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return extreme("gt", a, b, dtype)


@rule(ops.minimum)
def _minimum(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return extreme("lt", a, b, dtype)


def extreme(wins: str, a: t.Expr, b: t.Expr, dtype: DType) -> t.Expr:
    """Return the maximum or minimum by the comparison `wins`; nan propagates."""
    if dtype.is_bool:
        return t.binary("or" if wins == "gt" else "and", a, b)
    better = t.select(t.binary(wins, a, b), a, b)
    return t.select(t.isnan(a), a, better) if dtype.is_float else better


@rule(ops.clip)
def _clip(code: t.Code, x: t.Expr, dtype: DType, *, low: float | None, high: float | None, **_: Any) -> t.Expr:
    def bound(value: float) -> t.Expr:
        return one(dtype, value if dtype.is_float else max(min(int(value), dtype.limits[1]), dtype.limits[0]))

    if low is not None:
        x = code.let(extreme("gt", x, bound(low), dtype))
    return x if high is None else extreme("lt", x, bound(high), dtype)


def _truncated(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType) -> tuple[t.Expr, t.Expr, t.Expr]:
    """Return a divisor that cannot trap, the quotient rounded towards zero, and the remainder."""
    zero = t.equal(b, one(dtype, 0))
    # x86 raises a signal for a division by 0, and for the smallest number divided by -1.
    bad = zero | t.equal(b, one(dtype, -1)) if dtype.kind == "int" else zero
    safe = code.let(t.select(bad, one(dtype, 1), b), "d")
    quotient = code.let(a / safe, "q")
    return safe, quotient, code.let(a % safe, "r")


@rule(ops.floordiv)
def _floordiv(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    a, b = code.let(a), code.let(b)
    if dtype.is_float:
        return _divmod(code, a, b, dtype)[0]
    safe, quotient, rest = _truncated(code, a, b, dtype)
    if dtype.kind == "int":
        zero = one(dtype, 0)
        signs_differ = (rest < zero) ^ (safe < zero)
        down = t.not_equal(rest, zero) & signs_differ
        quotient = quotient - t.cast(down, dtype.name)
        quotient = t.select(t.equal(b, one(dtype, -1)), _neg(code, a, dtype), quotient)
    return t.select(t.equal(b, one(dtype, 0)), one(dtype, 0), quotient)


@rule(ops.mod)
def _mod(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    a, b = code.let(a), code.let(b)
    if dtype.is_float:
        return _divmod(code, a, b, dtype)[1]
    safe, _quotient, rest = _truncated(code, a, b, dtype)
    if dtype.kind == "int":
        zero = one(dtype, 0)
        signs_differ = (rest < zero) ^ (safe < zero)
        needs_shift = t.not_equal(rest, zero) & signs_differ
        rest = t.select(needs_shift, rest + safe, rest)
        rest = t.select(t.equal(b, one(dtype, -1)), zero, rest)
    return t.select(t.equal(b, one(dtype, 0)), one(dtype, 0), rest)


def _divmod(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType) -> tuple[t.Expr, t.Expr]:
    """Return Python's quotient, rounded towards minus infinity, and remainder, with the divisor's sign."""
    zero = one(dtype, 0.0)
    # As CPython and NumPy do: the rounded quotient may be one off, the remainder of fmod is exact.
    exact = rest = code.let(m.fmod(code, a, b) if code.own_functions else t.libm("fmod", a, b), "r")
    quotient = code.let((a - rest) / b, "q")
    signs_differ = (b < zero) ^ (rest < zero)
    needs_shift = code.let(t.not_equal(rest, zero) & signs_differ)
    signed_zero = with_sign(code, zero, b)
    rest = t.select(t.equal(rest, zero), signed_zero, t.select(needs_shift, rest + b, rest))
    quotient = code.let(t.select(needs_shift, quotient - one(dtype, 1.0), quotient))
    down = code.let(t.intrinsic("floor", quotient))
    half = quotient - down > one(dtype, 0.5)
    down = t.select(half, down + one(dtype, 1.0), down)
    down = t.select(t.equal(quotient, zero), with_sign(code, zero, a / b), down)
    by_zero = t.equal(b, zero)
    return t.select(by_zero, a / b, down), t.select(by_zero, exact, rest)


@rule(ops.pow)
def _pow(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    if dtype.is_float:
        return function(code, ops.pow, a, b)
    a, b = code.let(a), code.let(b)
    zero, unit = one(dtype, 0), one(dtype, 1)
    base, exponent, power = a, b, unit
    # A fixed number of steps without branches, so that the loop around it remains a vector loop.
    for _step in range(dtype.bits - (dtype.kind == "int")):  # binary exponentiation, wrapping around
        odd = t.not_equal(exponent & unit, zero)
        power = code.let(t.select(odd, mul(code, power, base, dtype), power))
        base = code.let(mul(code, base, base, dtype))
        exponent = code.let(exponent >> unit)
    if dtype.kind == "uint":
        return power
    odd = t.not_equal(b & unit, zero)
    negative = t.select(t.equal(a, one(dtype, -1)), t.select(odd, one(dtype, -1), unit), zero)
    return t.select(b < zero, t.select(t.equal(a, unit), unit, negative), power)


# -- functions of floats ------------------------------------------------------------------------------------------
_op: Op  # of the loops below
for _op in m.OWN:
    if _op is not ops.pow:

        def _function(code: t.Code, *operands: Any, _op: Op = _op, **_: Any) -> t.Expr:
            return function(code, _op, *operands[:-1])  # the last is the dtype

        rule(_op)(_function)


@rule(ops.sqrt)
def _sqrt(code: t.Code, x: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return t.intrinsic("sqrt", x)


for _op, _intrinsic in ((ops.floor, "floor"), (ops.ceil, "ceil"), (ops.trunc, "trunc"), (ops.round, "nearbyint")):

    def _stepped(code: t.Code, x: t.Expr, dtype: DType, _intrinsic: str = _intrinsic, **_: Any) -> t.Expr:
        return t.intrinsic(_intrinsic, x) if dtype.is_float else x

    rule(_op)(_stepped)


@rule(ops.erfinv)
def _erfinv(code: t.Code, x: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    """Evaluate Giles' polynomials, refined to full precision by two Newton steps in float64."""
    kind = as_dtype("float64") if dtype.name == "float64" else as_dtype("float32")
    x = code.let(x)

    def c(value: float) -> t.Expr:
        return one(kind, value)

    z = code.let(t.intrinsic("abs", x), "z")
    # 1 - z is exact near 1, where 1 - z * z would lose digits.
    product = (c(1.0) - z) * (c(1.0) + z)
    w = code.let(apply(code, ops.log, [product], kind, {}) * c(-1.0), "w")
    central = code.let(w - c(2.5))
    positive = t.select(w > c(0.0), w, c(0.0))
    tail = code.let(t.intrinsic("sqrt", positive) - c(3.0))
    inner, outer = c(CENTRAL[0]), c(TAIL[0])
    for a, b in zip(CENTRAL[1:], TAIL[1:], strict=True):
        inner = c(a) + inner * central
        outer = c(b) + outer * tail
    y = code.let(t.select(w < c(5.0), inner, outer) * z, "y")
    if kind.bits == 64:
        for _step in range(2):
            if code.own_functions:
                central, complement, slope = erf_parts(code, y)
            else:
                central, complement, slope = t.libm("erf", y), t.libm("erfc", y), t.libm("exp", y * c(-1.0) * y)
            excess = t.select(z < c(0.5), central - z, (c(1.0) - z) - complement)  # erf(y) - z
            step = excess / (c(1.1283791670955126) * slope)
            finite = t.intrinsic("abs", y) < c(float("inf"))
            y = code.let(y - t.select(finite, step, c(0.0)), "y")
    y = t.select(t.equal(z, c(1.0)), c(float("inf")), y)
    y = t.select(x < c(0.0), y * c(-1.0), t.select(t.equal(x, c(0.0)), x, y))
    return t.select(z > c(1.0), c(float("nan")), t.select(t.isnan(x), x, y))


# -- comparisons, logic, bits -------------------------------------------------------------------------------------
for _op, _sign_ in {
    ops.equal: "eq",
    ops.not_equal: "ne",
    ops.less: "lt",
    ops.less_equal: "le",
    ops.greater: "gt",
    ops.greater_equal: "ge",
}.items():

    def _compare(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, _sign_: str = _sign_, **_: Any) -> t.Expr:
        if dtype.is_bool:
            a, b = t.cast(a, "uint8"), t.cast(b, "uint8")
        if _sign_ == "ne" and dtype.is_float:
            return ~t.equal(a, b)  # TVM's != is false for nan
        return t.binary(_sign_, a, b)

    rule(_op)(_compare)


@rule(ops.isnan)
def _isnan(code: t.Code, x: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return t.isnan(x) if dtype.is_float else t.const(False, "bool")


@rule(ops.where)
def _where(code: t.Code, condition: t.Expr, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return t.select(condition, a, b)


@rule(ops.logical_not)
def _logical_not(code: t.Code, x: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return ~x


@rule(ops.logical_and)
def _and(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return a & b


@rule(ops.logical_or)
def _or(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return a | b


@rule(ops.logical_xor)
def _xor(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return a ^ b


@rule(ops.bitwise_not)
def _bitwise_not(code: t.Code, x: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    return ~x


for _op, _name in ((ops.bitwise_and, "and"), (ops.bitwise_or, "or"), (ops.bitwise_xor, "xor")):

    def _bits(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, _name: str = _name, **_: Any) -> t.Expr:
        return t.binary(_name, a, b)

    rule(_op)(_bits)


def _within_width(code: t.Code, b: t.Expr, dtype: DType) -> tuple[t.Expr, t.Expr]:
    b = code.let(b)
    is_valid = b < one(dtype, dtype.bits)
    if dtype.kind == "int":
        is_valid = (b >= one(dtype, 0)) & is_valid
    is_valid = code.let(is_valid)
    return is_valid, t.select(is_valid, b, one(dtype, 0))


@rule(ops.shift_left)
def _shift_left(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    is_valid, amount = _within_width(code, b, dtype)
    free = f"uint{dtype.bits}"
    shifted = t.cast(t.cast(a, free) << t.cast(amount, free), dtype.name)
    return t.select(is_valid, shifted, one(dtype, 0))


@rule(ops.shift_right)
def _shift_right(code: t.Code, a: t.Expr, b: t.Expr, dtype: DType, **_: Any) -> t.Expr:
    a = code.let(a)
    is_valid, amount = _within_width(code, b, dtype)
    past = a >> one(dtype, dtype.bits - 1) if dtype.kind == "int" else one(dtype, 0)
    return t.select(is_valid, a >> amount, past)


# -- casts --------------------------------------------------------------------------------------------------------
def convert(code: t.Code, x: t.Expr, source: DType, target: DType) -> t.Expr:
    """Convert between dtypes: floats to integers round towards zero and saturate, nan becomes 0; integers wrap."""
    if source is target:
        return x
    if target.is_bool:
        return ~t.equal(x, one(source, 0))
    if target.is_float or not source.is_float:
        return t.cast(x, computed(target))
    x = code.let(x)
    low, high = target.limits
    if target.bits <= 16:  # floats have both limits: convert once, without branches
        zero, lowest, highest = (one(source, float(limit)) for limit in (0, low, high))
        x = code.let(t.select(t.isnan(x), zero, x))
        x = code.let(t.select(x < lowest, lowest, x))
        x = code.let(t.select(x > highest, highest, x))
        return t.cast(t.cast(x, "int32"), target.name)
    over = x >= one(source, float(high))
    under = x <= one(source, float(low))
    is_outside = over | under | t.isnan(x)
    converted = t.cast(t.select(is_outside, one(source, 0.0), x), target.name)
    return t.select(over, one(target, high), t.select(under, one(target, low), converted))


@rule(ops.cast)
def _cast(code: t.Code, x: t.Expr, source: DType, *, dtype: DType, **_: Any) -> t.Expr:
    return convert(code, x, source, dtype)


@rule(quantize_bytes)
def _quantize_bytes(code: t.Code, x: t.Expr, dtype: DType, *, scale: float, zero: int, **_: Any) -> t.Expr:
    low, high = (one(dtype, float(limit)) for limit in byte_limits(scale, zero))
    x = code.let(t.select(x > low, x, low))
    x = code.let(t.select(x < high, x, high))
    q = t.intrinsic("nearbyint", x * one(dtype, float(np.float32(1) / np.float32(scale)))) + one(dtype, float(zero))
    return t.cast(t.cast(q, "int32"), "uint8")


def apply(code: t.Code, op: Op, operands: list[t.Expr], kind: DType, attributes: Mapping[str, Any]) -> t.Expr:
    """Apply an operation to single elements; `kind` is the dtype of the first."""
    return RULES[op.name](code, *operands, kind, **attributes)
