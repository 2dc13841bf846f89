"""Quantization: QuantizeLinear, DequantizeLinear, and products of quantized tensors."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.graph import OperationError, dtype as as_dtype
from mithril_onnx.operators.common import scalar, spatial
from mithril_onnx.operators.nn import paddings
from mithril_onnx.table import operator
from mithril_onnx.tensors import PACKED, dtype_of_code


def spread(p, x, axis, block):
    """Return scales or zero points with a shape that broadcasts against x."""
    if p is None or p.ndim == 0 or (p.ndim == 1 and p.shape[0] == 1):
        return None if p is None else ops.reshape(p, shape=())
    axis = axis % x.ndim
    if not block:
        return ops.reshape(p, shape=tuple(x.shape[k] if k == axis else 1 for k in range(x.ndim)))
    repeated = ops.repeat(p, repeats=block, axis=axis)
    if repeated.shape[axis] != x.shape[axis]:
        repeated = ops.slice(repeated, starts=(0,), stops=(x.shape[axis],), steps=(1,), axes=(axis,))
    return repeated


def limits(dtype, code):
    """Return the smallest and largest value of an element type."""
    if code in PACKED:
        name, bits = PACKED[code]
        return (0, (1 << bits) - 1) if name == "uint8" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return dtype.limits


@operator
def QuantizeLinear(
    x, scale, zero_point=None, *, axis=1, block_size=0, output_dtype=0, precision=0, saturate=1, context
):
    # Code 2 is uint8, the standard's default.
    code = output_dtype or (context.code(2) if zero_point is not None else 2)
    if zero_point is not None and not (code in PACKED or output_dtype):
        kind = zero_point.dtype
    else:
        kind = dtype_of_code(code or 2)
    return quantized(x, scale, zero_point, kind, limits(kind, code), axis, block_size)


def quantized(x, scale, zero_point, kind, bounds, axis=1, block=0):
    if not kind.is_integer:
        raise OperationError(f"QuantizeLinear to {kind} is not supported")
    if x.dtype is as_dtype("float32") and not block and kind.bits == 8 and tuple(bounds) == tuple(kind.limits):
        return rounded(x, scale, zero_point, kind, axis)
    work = as_dtype("float32") if x.dtype.bits <= 32 else x.dtype
    s = spread(ops.cast(scale, dtype=x.dtype if x.dtype.is_float else work), x, axis, block)
    y = ops.cast(x, dtype=s.dtype) / s
    y = ops.round(ops.cast(y, dtype=work))
    if zero_point is not None:
        y = y + ops.cast(spread(zero_point, x, axis, block), dtype=work)
    return ops.cast(ops.clip(y, low=float(bounds[0]), high=float(bounds[1])), dtype=kind)


def rounded(x, scale, zero_point, kind, axis):
    """Round to bytes by the operation that backends with integer kernels know."""
    one = scale.ndim == 0 or scale.shape[0] == 1
    s, z = (p if p is None or not one else ops.reshape(p, shape=()) for p in (scale, zero_point))
    return ops.quantize(x, ops.cast(s, dtype=x.dtype), z, dtype=kind, axis=None if one else axis % x.ndim)


@operator(folds=False)
def DequantizeLinear(x, scale, zero_point=None, *, axis=1, block_size=0, output_dtype=0):
    kind = dtype_of_code(output_dtype) if output_dtype else scale.dtype
    y = dequantized(x, scale, zero_point, axis, block_size)
    return ops.cast(y, dtype=kind)


def dequantized(x, scale, zero_point, axis=1, block=0):
    plain = not block and (scale.ndim == 0 or scale.ndim == 1)
    if plain and scale.dtype.is_float and x.dtype.bits <= 16:
        one = scale.ndim == 0 or scale.shape[0] == 1
        s = ops.reshape(scale, shape=()) if one else scale
        z = zero_point if zero_point is None or not one else ops.reshape(zero_point, shape=())
        return ops.dequantize(x, s, z, axis=None if one else axis % x.ndim)
    work = "float32"
    s = ops.cast(spread(scale, x, axis, block), dtype=work)
    y = ops.cast(x, dtype=work)
    # float32 has 24 bits: integers of 32 are subtracted before they are rounded.
    if x.dtype.bits == 32 and zero_point is not None:
        y = ops.cast(x - spread(zero_point, x, axis, block), dtype=work)
    elif zero_point is not None:
        y = y - ops.cast(spread(zero_point, x, axis, block), dtype=work)
    return ops.cast(y * s, dtype=scale.dtype)


@operator
def DynamicQuantizeLinear(x):
    zero = scalar(0.0, x)
    low, high = ops.minimum(ops.min(x), zero), ops.maximum(ops.max(x), zero)
    scale = (high - low) / 255.0
    point = ops.cast(ops.clip(ops.round(-low / scale), low=0.0, high=255.0), dtype="uint8")
    return quantized(x, scale, point, as_dtype("uint8"), (0, 255)), scale, point


# -- products -----------------------------------------------------------------------------------------------------
def _shifted(x, zero_point, dtype):
    """Return x minus its zero point, a number or one per row."""
    y = ops.cast(x, dtype=dtype)
    return y if zero_point is None else y - ops.cast(zero_point, dtype=dtype)


def _per_row(p, rank):
    """Return zero points of the rows of a left operand as a column."""
    return ops.unsqueeze(p, axis=(-1,)) if p is not None and p.ndim == 1 and p.shape[0] != 1 and rank > 1 else p


@operator
def MatMulInteger(a, b, a_zero_point=None, b_zero_point=None):
    left = _shifted(a, _per_row(a_zero_point, a.ndim), "int32")
    return ops.cast(ops.matmul(left, _shifted(b, b_zero_point, "int32")), dtype="int32")


@operator
def QLinearMatMul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point):
    total = ops.matmul(_shifted(a, _per_row(a_zero_point, a.ndim), "int32"), _shifted(b, b_zero_point, "int32"))
    factor = _per_row(ops.cast(a_scale, dtype="float32"), a.ndim) * ops.cast(b_scale, dtype="float32")
    factor = factor / ops.cast(y_scale, dtype="float32")
    y = ops.round(ops.cast(total, dtype="float32") * factor) + ops.cast(y_zero_point, dtype="float32")
    low, high = y_zero_point.dtype.limits
    return ops.cast(ops.clip(y, low=float(low), high=float(high)), dtype=y_zero_point.dtype)


def _integer_conv(x, w, x_zero, w_zero, auto_pad, dilations, group, pads, strides):
    """Return the exact sums of 8-bit products as floats of a dtype that represents them."""
    count = x.ndim - 2
    strides, dilations = spatial(strides, count, 1), spatial(dilations, count, 1)
    pairs = paddings(x, w.shape[2:], strides, dilations, auto_pad, pads)
    if w_zero is not None and w_zero.ndim == 1 and w_zero.shape[0] != 1:
        w_zero = ops.reshape(w_zero, shape=(-1, *[1] * (w.ndim - 1)))
    elif w_zero is not None:
        w_zero = ops.reshape(w_zero, shape=())
    x_zero = None if x_zero is None else ops.reshape(x_zero, shape=())
    terms = int(np.prod([int(n) for n in w.shape[1:]]))
    # float32 represents all integers to 2^24.
    kind = "float32" if terms * 255 * 255 < 1 << 24 else "float64"
    return ops.conv(
        _shifted(x, x_zero, kind), _shifted(w, w_zero, kind),
        stride=strides, padding=tuple(pairs), dilation=dilations, groups=group,
    )  # fmt: skip


@operator
def ConvInteger(
    x, w, x_zero_point=None, w_zero_point=None, *,
    auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    y = _integer_conv(x, w, x_zero_point, w_zero_point, auto_pad, dilations, group, pads, strides)
    return ops.cast(y, dtype="int32")


@operator
def QLinearConv(
    x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, b=None, *,
    auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    total = _integer_conv(x, w, x_zero_point, w_zero_point, auto_pad, dilations, group, pads, strides)
    column = (1, -1, *[1] * (x.ndim - 2))
    if b is not None:
        # The scale of the bias is that of the products, and its zero point 0.
        total = total + ops.reshape(ops.cast(b, dtype=total.dtype), shape=column)
    factor = ops.reshape(x_scale, shape=()) * w_scale / ops.reshape(y_scale, shape=())
    if factor.ndim == 1:
        factor = ops.reshape(factor, shape=column)
    y = ops.round(ops.cast(total, dtype="float32") * factor)
    y = y + ops.cast(ops.reshape(y_zero_point, shape=()), dtype="float32")
    low, high = y_zero_point.dtype.limits
    return ops.cast(ops.clip(y, low=float(low), high=float(high)), dtype=y_zero_point.dtype)
