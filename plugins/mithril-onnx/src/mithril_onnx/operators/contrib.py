"""Operators of the domain com.microsoft outside of attention: norms, activations, fused and quantized products."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.graph import Builder, OperationError, UnsupportedError, dtype as as_dtype
from mithril_onnx.operators import nn, pooling
from mithril_onnx.operators.common import float32_or_wider
from mithril_onnx.operators.elementwise import Gelu as standard_gelu
from mithril_onnx.operators.quantized import (
    DequantizeLinear,
    DynamicQuantizeLinear,
    MatMulInteger,
    QuantizeLinear,
    dequantized,
    quantized,
)
from mithril_onnx.table import Known, Weight, operator

MICROSOFT = "com.microsoft"


def contrib(function=None, **options):
    return operator(function, domain=MICROSOFT, **options)


contrib(standard_gelu, name="Gelu")
contrib(QuantizeLinear, name="QuantizeLinear")
contrib(DequantizeLinear, name="DequantizeLinear", folds=False)


@contrib
def BiasGelu(x, b: Weight):
    return ops.gelu(x + b)


@contrib
def FastGelu(x, bias: Weight = None):
    return ops.gelu(x if bias is None else x + bias, approximate="tanh")


@contrib
def QuickGelu(x, *, alpha=1.702):
    return x * ops.sigmoid(x * alpha)


# -- norms --------------------------------------------------------------------------------------------------------
def _simplified(x, scale, epsilon):
    return ops.rms_norm(x, scale, axis=-1, eps=epsilon)


@operator
def SimplifiedLayerNormalization(x, scale: Weight, *, axis=-1, epsilon=1e-5, stash_type=1, context):
    if axis % x.ndim != x.ndim - 1:
        raise UnsupportedError("SimplifiedLayerNormalization over several axes is not supported")
    y = _simplified(x, scale, epsilon)
    if context.results < 2:
        return y
    upcast = float32_or_wider(x)
    return y, ops.rsqrt(ops.mean(upcast * upcast, axis=-1, keepdims=True) + epsilon)


def _added(x, skip, bias):
    total = x + skip
    return total if bias is None else total + bias


@contrib
def SkipLayerNormalization(x, skip, gamma: Weight, beta: Weight = None, bias: Weight = None, *, epsilon=1e-12, context):
    total = _added(x, skip, bias)
    y = ops.layer_norm(total, gamma, beta, axes=(-1,), eps=epsilon)
    return _with_statistics(y, total, context, epsilon)


@contrib
def SkipSimplifiedLayerNormalization(x, skip, gamma: Weight, bias: Weight = None, *, epsilon=1e-12, context):
    total = _added(x, skip, bias)
    return _with_statistics(_simplified(total, gamma, epsilon), total, context, epsilon)


def _with_statistics(y, total, context, epsilon):
    """Return the result, and mean, inverse deviation and sum where the node names them."""
    names = [*context.node.output, "", "", ""][:4]
    if names[1] or names[2]:
        raise UnsupportedError(f"{context.node.op_type} with mean or deviation as results is not supported")
    return y, None, None, total


@contrib
def EmbedLayerNormalization(
    input_ids, segment_ids=None, word_embedding: Weight = None, position_embedding: Weight = None,
    segment_embedding: Weight = None, gamma: Weight = None, beta: Weight = None, mask=None, position_ids=None, *,
    epsilon=1e-12, mask_index_type=0,
):  # fmt: skip
    length = input_ids.shape[1]
    if position_ids is None:
        position_ids = ops.iota(shape=(1, length), axis=1)
    total = ops.take(word_embedding, input_ids, axis=0) + ops.take(position_embedding, position_ids, axis=0)
    if segment_embedding is not None and segment_ids is not None:
        total = total + ops.take(segment_embedding, segment_ids, axis=0)
    y = ops.layer_norm(total, gamma, beta, axes=(-1,), eps=epsilon)
    if mask is None:
        lengths = ops.full(shape=(input_ids.shape[0],), value=0, dtype="int32")
    else:
        lengths = ops.cast(ops.sum(mask, axis=1), dtype="int32")
    return y, lengths, total


# -- products -----------------------------------------------------------------------------------------------------
def _turned(x, matrix, batch):
    """Apply the transpositions of FusedMatMul: of the batch axes with the rows, and of the last two."""
    order = list(range(x.ndim))
    if batch and x.ndim > 2:
        order = [*range(1, x.ndim - 1), 0, x.ndim - 1]
    if matrix and x.ndim > 1:
        order[-1], order[-2] = order[-2], order[-1]
    return x if order == list(range(x.ndim)) else ops.transpose(x, perm=tuple(order))


@contrib
def FusedMatMul(a: Weight, b: Weight, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
    y = ops.matmul(_turned(a, transA, transBatchA), _turned(b, transB, transBatchB))
    return y if alpha == 1.0 else y * alpha


ACTIVATIONS = {
    "": lambda x, p: x,
    "Relu": lambda x, p: ops.relu(x),
    "Tanh": lambda x, p: ops.tanh(x),
    "Sigmoid": lambda x, p: ops.sigmoid(x),
    "LeakyRelu": lambda x, p: ops.leaky_relu(x, slope=p[0] if p else 0.01),
    "Clip": lambda x, p: ops.clip(x, low=p[0], high=p[1]),
    "HardSigmoid": lambda x, p: ops.clip(x * p[0] + p[1], low=0.0, high=1.0),
}


def _activated(y, activation, params):
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"the fused activation '{activation}' is not supported")
    return ACTIVATIONS[activation](y, params or ())


@contrib
def FusedConv(
    x, w: Weight, b: Weight = None, z=None, *, activation="", activation_params=None, auto_pad="NOTSET",
    dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    y = nn.Conv(x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides)
    return _activated(y if z is None else y + z, activation, activation_params)


@contrib
def FusedGemm(
    a: Weight, b: Weight, c: Weight = None, *, activation="", activation_alpha=None, activation_beta=None,
    activation_gamma=None, alpha=1.0, beta=1.0, transA=0, transB=0,
):  # fmt: skip
    params = tuple(v for v in (activation_alpha, activation_beta, activation_gamma) if v is not None)
    return _activated(nn.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB), activation, params)


@contrib(folds=False)
def MatMulNBits(
    a, b: Known, scales: Weight, zero_points: Known = None, g_idx: Known = None, bias: Weight = None, *,
    K, N, bits=4, block_size, accuracy_level=0, weight_prepacked=0,
):  # fmt: skip
    """Multiply by a matrix of 2-, 4- or 8-bit integers with a scale per block, kept as integers."""
    if weight_prepacked or bits not in (2, 4, 8) or block_size < 1 or K < 1 or N < 1:
        raise UnsupportedError(f"MatMulNBits of {bits} bits, block_size {block_size}, prepacked {weight_prepacked}")
    blocks = -(-K // block_size)
    q = unpacked(b, bits)
    if q.size != N * blocks * block_size:
        raise OperationError(f"MatMulNBits has {q.size} weights, expected {N} x {blocks} x {block_size}")
    s = ops.reshape(scales, shape=(N, blocks))
    zero = _block_zero(zero_points, bits, N, blocks)
    if bits == 4 and g_idx is None and blocks * block_size == K:
        weights = _in_groups(np.asarray(b, np.uint8).reshape(N, K // 2), s, zero)
        y = ops.matmul(a, ops.transpose(ops.cast(weights, dtype=a.dtype)))
        return y if bias is None else y + bias
    q = q.reshape(N, blocks * block_size)[:, :K]
    if g_idx is not None:
        order = np.asarray(g_idx).astype(np.int64)
        s, zero = ops.take(s, order, axis=1), np.take(zero, order, axis=1)
    else:
        s = ops.slice(ops.repeat(s, repeats=block_size, axis=1), starts=(0,), stops=(K,), steps=(1,), axes=(1,))
        zero = np.repeat(zero, block_size, axis=1)[:, :K]
    if zero.dtype == np.uint8:
        q, zero = (q.astype(np.int16) - zero.astype(np.int16)).astype(np.int16), None
        if q.size and q.min() >= -128 and q.max() <= 127:
            q = q.astype(np.int8)
    weights = ops.cast(q, dtype=s.dtype)
    weights = weights * s if zero is None else (weights - zero.astype(s.dtype.numpy)) * s
    y = ops.matmul(a, ops.transpose(ops.cast(weights, dtype=a.dtype)))
    return y if bias is None else y + bias


def _in_groups(packed, scale, zero):
    """Return the numbers of 4-bit values, two per byte, as backends with kernels for them read them."""
    # s * (q - zero) = s * (q - 8) + s * (8 - zero): the table has the first term, the offset is the
    # second.
    table = np.arange(-8, 8, dtype=np.float32)
    offset = None if (zero == 8).all() else scale * (8 - zero.astype(np.float32)).astype(scale.dtype.numpy)
    builder = Builder.current()
    return ops.dequantize_groups(
        builder.constant(packed, name="packed"), builder.constant(table, name="table"), scale, offset
    )


def unpacked(b, bits):
    """Return packed integers as bytes; the lowest bits come first."""
    flat = np.asarray(b, np.uint8).reshape(-1)
    if bits == 8:
        return flat
    return np.stack([(flat >> k) & ((1 << bits) - 1) for k in range(0, 8, bits)], -1).reshape(-1)


def _block_zero(zero_points, bits, rows, blocks):
    """Return the zero point of each block: uint8, or floats."""
    if zero_points is None:
        return np.full((rows, blocks), 1 << (bits - 1), np.uint8)
    if as_dtype(zero_points.dtype).is_float:
        return zero_points.reshape(rows, blocks)
    return unpacked(zero_points, bits).reshape(rows, -1)[:, :blocks]


# -- quantized ----------------------------------------------------------------------------------------------------
def _real(x, scale, zero):
    return dequantized(x, ops.reshape(scale, shape=()), None if zero is None else ops.reshape(zero, shape=()))


def _whole(y, scale, zero, like):
    kind = zero.dtype if zero is not None else like.dtype
    return quantized(y, scale, zero, kind, kind.limits)


@contrib
def QLinearAdd(a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point=None):
    y = _real(a, a_scale, a_zero_point) + _real(b, b_scale, b_zero_point)
    return _whole(y, c_scale, c_zero_point, a)


@contrib
def QLinearMul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point=None):
    y = _real(a, a_scale, a_zero_point) * _real(b, b_scale, b_zero_point)
    return _whole(y, c_scale, c_zero_point, a)


@contrib
def QLinearSigmoid(x, x_scale, x_zero_point=None, y_scale=None, y_zero_point=None):
    return _whole(ops.sigmoid(_real(x, x_scale, x_zero_point)), y_scale, y_zero_point, x)


@contrib
def QLinearLeakyRelu(x, x_scale, x_zero_point=None, y_scale=None, y_zero_point=None, *, alpha=0.01):
    return _whole(ops.leaky_relu(_real(x, x_scale, x_zero_point), slope=alpha), y_scale, y_zero_point, x)


@contrib
def QLinearSoftmax(x, x_scale, x_zero_point=None, y_scale=None, y_zero_point=None, *, axis=-1, opset):
    real = _real(x, x_scale, x_zero_point)
    # Softmax flattened all axes from ``axis`` on before opset 13.
    if opset < 13:
        raise UnsupportedError("QLinearSoftmax of an opset before 13 is not supported")
    return _whole(ops.softmax(real, axis=axis), y_scale, y_zero_point, x)


@contrib
def QLinearConcat(y_scale, y_zero_point, *rest, axis):
    triples = [rest[k : k + 3] for k in range(0, len(rest), 3)]
    return _whole(ops.concat(*[_real(*t) for t in triples], axis=axis), y_scale, y_zero_point, triples[0][0])


@contrib
def QLinearGlobalAveragePool(x, x_scale, x_zero_point, y_scale, y_zero_point, *, channels_last=0):
    axes = tuple(range(1, x.ndim - 1)) if channels_last else tuple(range(2, x.ndim))
    return _whole(ops.mean(_real(x, x_scale, x_zero_point), axis=axes, keepdims=True), y_scale, y_zero_point, x)


@contrib
def QLinearAveragePool(
    x, x_scale, x_zero_point=None, y_scale=None, y_zero_point=None, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0,
    channels_last=0, count_include_pad=0, pads=None, strides=None,
):  # fmt: skip
    if channels_last:
        raise UnsupportedError("QLinearAveragePool with channels_last is not supported")
    y = pooling.AveragePool(
        _real(x, x_scale, x_zero_point), kernel_shape=kernel_shape, auto_pad=auto_pad, ceil_mode=ceil_mode,
        count_include_pad=count_include_pad, pads=pads, strides=strides,
    )  # fmt: skip
    return _whole(y, y_scale, y_zero_point, x)


@contrib
def QGemm(
    a, a_scale, a_zero_point, b, b_scale, b_zero_point, c=None, y_scale=None, y_zero_point=None, *,
    alpha=1.0, transA=0, transB=0,
):  # fmt: skip
    left, right = (ops.transpose(a) if transA else a), (ops.transpose(b) if transB else b)
    total = MatMulInteger(left, right, a_zero_point, b_zero_point)
    if c is not None:
        total = total + c
    y = ops.cast(total, dtype="float32") * (a_scale * b_scale * alpha)
    return y if y_scale is None else _whole(y, y_scale, y_zero_point, a)


@contrib
def MatMulIntegerToFloat(a, b, a_scale, b_scale, a_zero_point=None, b_zero_point=None, bias=None):
    y = ops.cast(MatMulInteger(a, b, a_zero_point, b_zero_point), dtype="float32") * (a_scale * b_scale)
    return y if bias is None else y + bias


@contrib
def DynamicQuantizeMatMul(a, b, b_scale, b_zero_point=None, bias=None):
    q, scale, zero = DynamicQuantizeLinear(a)
    return MatMulIntegerToFloat(q, b, scale, b_scale, zero, b_zero_point, bias)
