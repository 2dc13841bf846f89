"""Arithmetic, comparisons, logic and activations."""

from __future__ import annotations

import math

import numpy as np

from mithril import ops
from mithril.graph import OperationError, promote
from mithril_onnx.operators.common import like, scalar
from mithril_onnx.table import Item, Known, Weight, operator
from mithril_onnx.tensors import dtype_of_code

UNARY = {
    "Abs": ops.abs, "Acos": ops.acos, "Acosh": ops.acosh, "Asin": ops.asin, "Asinh": ops.asinh, "Atan": ops.atan,
    "Atanh": ops.atanh, "BitwiseNot": ops.bitwise_not, "Ceil": ops.ceil, "Cos": ops.cos, "Cosh": ops.cosh,
    "Erf": ops.erf, "Exp": ops.exp, "Floor": ops.floor, "HardSwish": ops.hard_swish, "IsNaN": ops.isnan,
    "Log": ops.log, "Mish": ops.mish, "Neg": ops.neg, "Not": ops.logical_not, "Reciprocal": ops.reciprocal,
    "Round": ops.round, "Sigmoid": ops.sigmoid, "Sign": ops.sign, "Sin": ops.sin, "Sinh": ops.sinh,
    "Softplus": ops.softplus, "Softsign": ops.softsign, "Sqrt": ops.sqrt, "Tan": ops.tan, "Tanh": ops.tanh,
}  # fmt: skip
BINARY = {
    "Add": ops.add, "Sub": ops.sub, "Mul": ops.mul, "And": ops.logical_and, "Or": ops.logical_or,
    "Xor": ops.logical_xor, "Equal": ops.equal, "Less": ops.less, "LessOrEqual": ops.less_equal,
    "Greater": ops.greater, "GreaterOrEqual": ops.greater_equal, "BitwiseAnd": ops.bitwise_and,
    "BitwiseOr": ops.bitwise_or, "BitwiseXor": ops.bitwise_xor,
}  # fmt: skip


def older_operand(a, b, axis):
    """Align the axes of b with those of a from ``axis`` on: the broadcasting before opset 7."""
    if axis is None or b.ndim == 0:
        return b
    return ops.reshape(b, shape=(*b.shape, *[1] * (a.ndim - axis % a.ndim - b.ndim)))


def _unary(name, op):
    def apply(x):
        return op(x)

    operator(apply, name=name)


def _binary(name, op):
    def apply(a, b, *, axis=None, broadcast=0):
        return op(a, older_operand(a, b, axis))

    operator(apply, name=name)


for _name, _op in UNARY.items():
    _unary(_name, _op)
for _name, _two in BINARY.items():
    _binary(_name, _two)


@operator
def Identity(x: Item):
    return x


@operator
def Relu(x):
    return ops.relu(x) if x.dtype.is_float else ops.maximum(x, scalar(0, x))


@operator
def PRelu(x, slope: Weight):
    if slope.ndim == 1 and x.ndim > 2 and slope.shape[0] == x.shape[1]:  # one slope per channel, before opset 7
        slope = ops.reshape(slope, shape=(-1, *[1] * (x.ndim - 2)))
    return ops.where(ops.less(x, scalar(0, x)), slope * x, x)


@operator
def Div(a, b, *, axis=None, broadcast=0):
    b = older_operand(a, b, axis)
    if a.dtype.is_float:
        return ops.div(a, b)
    quotient = ops.floordiv(a, b)
    if a.dtype.kind == "uint":
        return quotient
    # The standard's division of integers rounds toward zero, floordiv downwards.
    remainder = a - quotient * b
    inexact = ops.logical_and(ops.not_equal(remainder, scalar(0, a)), ops.less(quotient, scalar(0, a)))
    return quotient + ops.cast(inexact, dtype=a.dtype)


@operator
def Mod(a, b, *, fmod=0):
    if not fmod:
        return ops.mod(a, b)
    # The result of fmod has the sign of the dividend, that of mod the sign of the divisor.
    size = ops.mod(ops.abs(a), ops.abs(b)) if a.dtype.kind != "uint" else ops.mod(a, b)
    return size if a.dtype.kind == "uint" else ops.where(ops.less(a, scalar(0, a)), ops.neg(size), size)


@operator
def Pow(a, b, *, axis=None, broadcast=0):
    b = older_operand(a, b, axis)
    if a.dtype is b.dtype:
        return ops.pow(a, b)
    wide_dtype = promote(a.dtype, b.dtype)
    return ops.cast(ops.pow(ops.cast(a, dtype=wide_dtype), ops.cast(b, dtype=wide_dtype)), dtype=a.dtype)


def _variadic(name, op):
    def apply(*xs):
        total = xs[0]
        for x in xs[1:]:
            total = op(total, x)
        return total

    operator(apply, name=name)


for _name, _op in {"Max": ops.maximum, "Min": ops.minimum, "Sum": ops.add}.items():
    _variadic(_name, _op)


@operator
def Mean(*xs):
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total / float(len(xs))


@operator
def BitShift(x, count, *, direction):
    bits = x.dtype.bits
    if direction != "LEFT" and x.dtype.kind == "int":
        return ops.shift_right(x, ops.minimum(count, scalar(bits - 1, x)))
    # A shift by all bits or more is undefined in C; here its result is 0.
    shifted = ops.shift_left(x, count) if direction == "LEFT" else ops.shift_right(x, count)
    return ops.where(ops.less(count, scalar(bits, x)), shifted, scalar(0, x))


@operator
def Where(condition, a, b):
    return ops.where(condition, a, b)


@operator
def IsInf(x, *, detect_negative=1, detect_positive=1):
    is_infinite = ops.isinf(x)
    if detect_negative and detect_positive:
        return is_infinite
    if not detect_negative and not detect_positive:
        return ops.logical_and(is_infinite, ops.logical_not(is_infinite))
    sign = ops.less(x, scalar(0.0, x)) if detect_negative else ops.greater(x, scalar(0.0, x))
    return ops.logical_and(is_infinite, sign)


@operator
def Cast(x, *, to, saturate=1, round_mode="up"):  # english: ok, an attribute of ONNX
    return _cast(x, dtype_of_code(to), to)


def _cast(x, dtype, code=None):
    if code in BITS:
        low, high = BITS[code]
        mask = high - low
        wrapped = ops.bitwise_and(ops.cast(x, dtype="int32"), mask)
        wrapped = ops.where(ops.greater(wrapped, high), wrapped - (mask + 1), wrapped)
        return ops.cast(wrapped, dtype=dtype)
    if x.dtype.is_integer and dtype.is_integer:
        return ops.cast(x, dtype=dtype)
    return ops.cast(x, dtype=dtype)


BITS: dict[int, tuple[int, int]] = {21: (0, 15), 22: (-8, 7), 25: (0, 3), 26: (-2, 1)}  # UINT4 INT4 UINT2 INT2


@operator
def CastLike(x, target, *, saturate=1, round_mode="up", context):
    return _cast(x, target.dtype, context.code(1))


@operator
def Clip(x, min: Item = None, max: Item = None):
    low, high = like(min, x), like(max, x)
    if low is not None:
        x = ops.maximum(x, low)
    return x if high is None else ops.minimum(x, high)


@operator
def LeakyRelu(x, *, alpha=0.01):
    return ops.leaky_relu(x, slope=alpha)


@operator
def Elu(x, *, alpha=1.0):
    return ops.elu(x, alpha=alpha)


@operator
def Celu(x, *, alpha=1.0):
    return ops.celu(x, alpha=alpha)


@operator
def Selu(x, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    return ops.where(
        ops.greater(x, scalar(0.0, x)), x * gamma, ops.expm1(ops.minimum(x, scalar(0.0, x))) * (alpha * gamma)
    )


@operator
def ThresholdedRelu(x, *, alpha=1.0):
    return ops.where(ops.greater(x, scalar(alpha, x)), x, scalar(0.0, x))


@operator
def HardSigmoid(x, *, alpha=0.2, beta=0.5):
    return ops.clip(x * alpha + beta, low=0.0, high=1.0)


@operator
def Gelu(x, *, approximate="none"):
    return ops.gelu(x, approximate=approximate)


@operator
def Swish(x, *, alpha=1.0):
    return ops.silu(x) if alpha == 1.0 else x * ops.sigmoid(x * alpha)


@operator
def Shrink(x, *, bias=0.0, lambd=0.5):
    zero = scalar(0, x)
    right = ops.where(ops.greater(x, scalar(lambd, x, is_wide=True)), x - like_number(bias, x), zero)
    return ops.where(ops.less(x, scalar(-lambd, x, is_wide=True)), x + like_number(bias, x), right)


def like_number(value, x):
    return scalar(value, x)


@operator(since=13)
def Softmax(x, *, axis=-1):
    return ops.softmax(x, axis=axis)


@operator(since=13)
def LogSoftmax(x, *, axis=-1):
    return ops.log_softmax(x, axis=axis)


def _hardmax(x, axis):
    axis %= x.ndim
    first = ops.unsqueeze(ops.argmax(x, axis=axis), axis=(axis,))
    place = ops.iota(shape=tuple(n if k == axis else 1 for k, n in enumerate(x.shape)), axis=axis)
    return ops.cast(ops.equal(first, place), dtype=x.dtype)


@operator(since=13)
def Hardmax(x, *, axis=-1):
    return _hardmax(x, axis)


def _flattened(name, function):
    """Register the meaning before opset 13: all axes from ``axis`` on are one."""

    def apply(x, *, axis=1):
        axis = axis % x.ndim if x.ndim else 0
        rows = math.prod(x.shape[:axis])
        columns = math.prod(x.shape[axis:])
        return ops.reshape(function(ops.reshape(x, shape=(rows, columns))), shape=x.shape)

    operator(apply, name=name, since=1)


_flattened("Softmax", lambda x: ops.softmax(x, axis=-1))
_flattened("LogSoftmax", lambda x: ops.log_softmax(x, axis=-1))
_flattened("Hardmax", lambda x: _hardmax(x, -1))


@operator(folds=False)
def BitCast(x: Known, *, to):  # english: ok, an attribute of ONNX
    kind = dtype_of_code(to).numpy
    if kind.itemsize != x.dtype.itemsize:
        raise OperationError(f"BitCast from {x.dtype} to {kind}: the sizes differ")
    return np.asarray(x, order="C").view(kind)
