"""Operators of one element each, comparisons, conversions and selections."""

from __future__ import annotations

from mithril import ops
from mithril.graph import Builder
from mithril_tflite.table import Stored, Weight, operator


def number(value, x):
    """Return a number as a scalar of the dtype of x."""
    return Builder.current().constant(value, x.dtype)


def _binary(name, function):
    def compute(a: Weight, b: Weight):
        return function(a, b)

    operator(compute, name=name)


def _unary(name, function):
    operator(lambda x: function(x), name=name)


_binary("ADD", ops.add)
_binary("SUB", ops.sub)
_binary("MUL", ops.mul)
_binary("MAXIMUM", ops.maximum)
_binary("MINIMUM", ops.minimum)
_binary("POW", ops.pow)
_binary("ATAN2", ops.atan2)
_binary("FLOOR_DIV", ops.floordiv)
_binary("FLOOR_MOD", ops.mod)
_binary("EQUAL", ops.equal)
_binary("NOT_EQUAL", ops.not_equal)
_binary("LESS", ops.less)
_binary("LESS_EQUAL", ops.less_equal)
_binary("GREATER", ops.greater)
_binary("GREATER_EQUAL", ops.greater_equal)
_binary("LOGICAL_AND", ops.logical_and)
_binary("LOGICAL_OR", ops.logical_or)
_binary("BITWISE_XOR", ops.bitwise_xor)
_binary("RIGHT_SHIFT", ops.shift_right)
_unary("LOGICAL_NOT", ops.logical_not)
_unary("ABS", ops.abs)
_unary("NEG", ops.neg)
_unary("EXP", ops.exp)
_unary("LOG", ops.log)
_unary("SQRT", ops.sqrt)
_unary("RSQRT", ops.rsqrt)
_unary("SIN", ops.sin)
_unary("COS", ops.cos)
_unary("SQUARE", ops.square)
_unary("FLOOR", ops.floor)
_unary("CEIL", ops.ceil)
_unary("ROUND", ops.round)
_unary("SIGN", ops.sign)
_unary("ZEROS_LIKE", ops.zeros_like)


@operator
def DIV(a: Weight, b: Weight):
    if a.dtype.is_float:
        return a / b
    quotient = ops.floordiv(ops.abs(a), ops.abs(b))  # integers are rounded towards zero
    return ops.where(ops.less(ops.sign(a) * ops.sign(b), number(0, a)), -quotient, quotient)


@operator
def SQUARED_DIFFERENCE(a: Weight, b: Weight):
    return ops.square(a - b)


@operator
def ADD_N(*xs):
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


@operator(moves=True)
def SELECT(condition: Stored, a, b):
    if condition.ndim == 1 and a.ndim > 1:  # one condition per row
        condition = ops.reshape(condition, shape=(-1, *[1] * (a.ndim - 1)))
    return ops.where(condition, a, b)


@operator(moves=True)
def SELECT_V2(condition: Stored, a, b):
    return ops.where(condition, a, b)


@operator
def CAST(x: Stored, *, context):
    return ops.cast(x, dtype=context.dtype())


# Operands arrive as real numbers, and results are stored as their tensors declare.
@operator(folds=False)
def DEQUANTIZE(x: Weight, *, context):
    return ops.cast(x, dtype=context.dtype())


@operator(folds=False)
def QUANTIZE(x):
    return x


@operator(folds=False, moves=True)
def DENSIFY(x: Weight):
    return x  # sparse tensors have all their elements when they are read


@operator
def FAKE_QUANT(x, *, min, max, num_bits, narrow_range):
    levels = float(2**num_bits - 1 - narrow_range)
    scale = (max - min) / levels
    # The range is moved so that 0 is a quantum.
    low = -scale * _nearest(-min / scale, levels)
    steps = ops.round((ops.clip(x, low=low, high=low + scale * levels) - low) / scale)
    return steps * scale + low


def _nearest(x, highest):
    return float(min(max(int(x + 0.5), 0), highest))
