"""Products, convolutions, normalizations, dropout."""

from __future__ import annotations

import math

import numpy as np

from mithril import ops
from mithril.graph import OperationError, is_static, product
from mithril_onnx.operators.common import axes_of, float32_or_wider, scalar, spatial
from mithril_onnx.table import Item, Known, State, Weight, operator
from mithril_onnx.values import as_value


@operator
def MatMul(a: Weight, b: Weight):
    return ops.cast(ops.matmul(a, b), dtype=a.dtype)


@operator
def Gemm(a: Weight, b: Weight, c: Weight = None, *, alpha=1.0, beta=1.0, transA=0, transB=0, broadcast=0):
    if (
        alpha == beta == 1.0
        and transB
        and not transA
        and c is not None
        and c.ndim == 1
        and c.shape[0] == b.shape[0]
        and a.dtype.is_float
    ):
        return ops.linear(a, b, c)
    a = ops.transpose(a) if transA else a
    b = ops.transpose(b) if transB else b
    y = ops.cast(ops.matmul(a, b), dtype=a.dtype)
    if alpha != 1.0:
        y = y * scalar(alpha, y)
    if c is None:
        return y
    return y + (c * scalar(beta, c) if beta != 1.0 else c)


@operator
def Einsum(*xs, equation):
    text = equation.replace(" ", "")
    if len(xs) == 0:
        raise OperationError("Einsum has no operands")
    return ops.einsum(*xs, equation=text)


def paddings(x, kernel, strides, dilations, auto_pad, pads, ceil=False):
    """Return explicit (before, after) pairs for the spatial axes."""
    count = len(kernel)
    if auto_pad in ("NOTSET", "VALID"):
        flat = [0] * 2 * count if auto_pad == "VALID" or not pads else list(pads)
        if len(flat) != 2 * count:
            raise OperationError(f"pads has {len(flat)} entries for {count} spatial axes")
        return [(flat[k], flat[k + count]) for k in range(count)]
    pairs = []
    for k in range(count):
        size = x.shape[2 + k]
        reach = (kernel[k] - 1) * dilations[k] + 1
        # This padding does not depend on the size of the axis, which may be open.
        if strides[k] == 1:
            total = reach - 1
        else:
            if type(size) is not int:
                raise OperationError(f"auto_pad={auto_pad} with strides requires static sizes, axis {k} is {size}")
            total = max((-(-size // strides[k]) - 1) * strides[k] + reach - size, 0)
        low = total // 2
        pairs.append((low, total - low) if auto_pad == "SAME_UPPER" else (total - low, low))
    return pairs


def _biased(y, b):
    return y if b is None else y + ops.reshape(b, shape=(1, -1, *[1] * (y.ndim - 2)))


@operator
def Conv(
    x, w: Weight, b: Weight = None, *,
    auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    count = x.ndim - 2
    strides, dilations = spatial(strides, count, 1), spatial(dilations, count, 1)
    pairs = paddings(x, w.shape[2:], strides, dilations, auto_pad, pads)
    if any(n < 0 for pair in pairs for n in pair):
        raise OperationError(f"Conv has negative pads {pads}")
    return _biased(ops.conv(x, w, stride=strides, padding=tuple(pairs), dilation=dilations, groups=group), b)


@operator
def ConvTranspose(
    x, w: Weight, b: Weight = None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None,
    output_padding=None, output_shape=None, pads=None, strides=None,
):  # fmt: skip
    count = x.ndim - 2
    strides, dilations = spatial(strides, count, 1), spatial(dilations, count, 1)
    extra = list(spatial(output_padding, count, 0))
    pairs = paddings(x, w.shape[2:], strides, dilations, "NOTSET", pads)
    if output_shape or auto_pad.startswith("SAME"):
        pairs = []
        for k in range(count):
            reach = (w.shape[2 + k] - 1) * dilations[k] + 1
            full = (x.shape[2 + k] - 1) * strides[k] + reach + extra[k]
            target = output_shape[-count:][k] if output_shape else x.shape[2 + k] * strides[k]
            total = full - target
            if total < 0:
                extra[k] += -total
                total = 0
            low = total // 2
            pairs.append((low, total - low) if auto_pad == "SAME_UPPER" else (total - low, low))
    sizes = [
        (x.shape[2 + k] - 1) * strides[k] + (w.shape[2 + k] - 1) * dilations[k] + 1 + extra[k] - sum(pairs[k])
        for k in range(count)
    ]
    if all(e < s for e, s in zip(extra, strides)):
        y = ops.conv_transpose(
            x, w, stride=strides, padding=tuple(pairs), output_padding=tuple(extra), dilation=dilations, groups=group
        )
    else:  # zeros after the last window
        y = ops.conv_transpose(x, w, stride=strides, dilation=dilations, groups=group)
        y = ops.pad(y, widths=((0, 0), (0, 0), *((0, e) for e in extra)))
        y = ops.slice(
            y, starts=tuple(a for a, _ in pairs), stops=tuple(a + n for (a, _), n in zip(pairs, sizes)),
            steps=(1,) * count, axes=tuple(range(2, 2 + count)),
        )  # fmt: skip
    return _biased(y, b)


def _channels(v, x):
    return ops.reshape(v, shape=(1, -1, *[1] * (x.ndim - 2)))


@operator
def BatchNormalization(
    x, scale: Weight, b: Weight, mean: State, var: State, *,
    epsilon=1e-5, momentum=0.9, training_mode=0, spatial=1, is_test=1, context,
):  # fmt: skip
    names = context.statistic(3), context.statistic(4)
    trains = bool(training_mode) or (context.training and None not in names)
    if not trains:
        if all(v.dtype is x.dtype for v in (scale, b, mean, var)):
            return ops.batch_norm(x, scale, b, mean, var, eps=epsilon)
        upcast = [ops.cast(v, dtype="float32") for v in (x, scale, b, mean, var)]
        return ops.cast(ops.batch_norm(*upcast, eps=epsilon), dtype=x.dtype)
    axes = tuple(k for k in range(x.ndim) if k != 1)
    center = ops.mean(float32_or_wider(x), axis=axes)
    deviation = float32_or_wider(x) - _channels(center, x)
    # The standard's running variance is that of the population; PyTorch's has the divisor n - 1.
    spread = ops.mean(deviation * deviation, axis=axes)
    y = deviation / ops.sqrt(_channels(spread, x) + epsilon)
    y = ops.cast(y, dtype=x.dtype) * _channels(ops.cast(scale, dtype=x.dtype), x) + _channels(
        ops.cast(b, dtype=x.dtype), x
    )
    new_mean = ops.cast(mean * momentum + ops.cast(center, dtype=mean.dtype) * (1 - momentum), dtype=mean.dtype)
    new_var = ops.cast(var * momentum + ops.cast(spread, dtype=var.dtype) * (1 - momentum), dtype=var.dtype)
    if context.training and None not in names:
        context.importer.weights.update_statistic(names[0], new_mean)
        context.importer.weights.update_statistic(names[1], new_var)
    if training_mode:
        return y, new_mean, new_var
    return y


@operator
def InstanceNormalization(x, scale: Weight, b: Weight, *, epsilon=1e-5):
    return ops.instance_norm(x, scale, b, eps=epsilon)


@operator
def LayerNormalization(x, scale: Weight, b: Weight = None, *, axis=-1, epsilon=1e-5, stash_type=1, context):
    axes = tuple(range(axis % x.ndim, x.ndim))
    shape = tuple(x.shape[a] for a in axes)
    scale = _full(scale, shape)
    b = None if b is None else _full(b, shape)
    y = ops.layer_norm(x, scale, b, axes=axes, eps=epsilon)
    if context.results == 1:
        return y
    upcast = float32_or_wider(x)
    mean = ops.mean(upcast, axis=axes, keepdims=True)
    deviation = upcast - mean
    inverse = 1.0 / ops.sqrt(ops.mean(deviation * deviation, axis=axes, keepdims=True) + epsilon)
    return y, mean, inverse


def _full(v, shape):
    """Return a scale or bias with the shape of the normalized axes."""
    return v if tuple(v.shape) == shape else ops.broadcast_to(v, shape=shape)


@operator
def RMSNormalization(x, scale: Weight, *, axis=-1, epsilon=1e-5, stash_type=1):
    axis = axis % x.ndim
    if axis == x.ndim - 1 and scale.ndim == 1 and scale.dtype is x.dtype:
        return ops.rms_norm(x, scale, axis=-1, eps=epsilon)
    upcast = float32_or_wider(x)
    square = ops.mean(upcast * upcast, axis=tuple(range(axis, x.ndim)), keepdims=True)
    return ops.cast(upcast / ops.sqrt(square + epsilon), dtype=scale.dtype) * scale


@operator(since=21)
def GroupNormalization(x, scale: Weight, bias: Weight, *, num_groups, epsilon=1e-5, stash_type=1):
    return ops.group_norm(x, scale, bias, groups=num_groups, eps=epsilon)


@operator(name="GroupNormalization", since=18)
def _GroupNormalization18(x, scale: Weight, bias: Weight, *, num_groups, epsilon=1e-5):
    # Version 18 has a scale per group, version 21 one per channel.
    group_size = x.shape[1] // num_groups
    return ops.group_norm(
        x,
        ops.repeat(scale, repeats=group_size, axis=0),
        ops.repeat(bias, repeats=group_size, axis=0),
        groups=num_groups,
        eps=epsilon,
    )


@operator
def LRN(x, *, size, alpha=1e-4, beta=0.75, bias=1.0):
    before = (size - 1) // 2
    padded = ops.pad(x * x, widths=((0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)))
    total = None
    for k in range(size):
        part = ops.slice(padded, starts=(k,), stops=(k + x.shape[1],), steps=(1,), axes=(1,))
        total = part if total is None else total + part
    return x / ops.pow(total * (alpha / size) + bias, beta)


@operator(folds=False)
def Dropout(x, ratio: Known = None, training_mode: Known = None, *, seed=None, is_test=1, context):
    p = 0.5 if ratio is None else float(ratio.reshape(-1)[0])
    on = context.training if training_mode is None else bool(training_mode.reshape(-1)[0])
    everything = lambda: ops.full(shape=x.shape, value=True, dtype="bool")  # noqa: E731
    if not on or p == 0.0:
        return (x, everything()) if context.results > 1 else x
    if seed is not None and is_static(x.shape):  # the numbers of the standard's reference
        mask = np.random.RandomState(seed).uniform(0, 1, x.shape) >= p
    else:
        mask = ops.bernoulli(context.importer.weights.key(), shape=x.shape, p=1.0 - p)
    y = ops.where(mask, x / scalar(1.0 - p, x), scalar(0.0, x))
    return (y, as_value(mask)) if context.results > 1 else y


@operator
def Col2Im(x, image_shape: Known, block_shape: Known, *, dilations=None, pads=None, strides=None):
    image, block = (tuple(int(n) for n in v.reshape(-1)) for v in (image_shape, block_shape))
    count = len(image)
    strides, dilations = spatial(strides, count, 1), spatial(dilations, count, 1)
    pads = spatial(pads, 2 * count, 0)
    n, rows = x.shape[0], x.shape[1]
    channels = rows // math.prod(block)
    windows = [
        (image[k] + pads[k] + pads[k + count] - (block[k] - 1) * dilations[k] - 1) // strides[k] + 1
        for k in range(count)
    ]
    columns = ops.reshape(x, shape=(n * channels, math.prod(block), *windows))
    eye = ops.reshape(ops.eye(n=math.prod(block), dtype=x.dtype), shape=(math.prod(block), 1, *block))
    padding = tuple((pads[k], pads[k + count]) for k in range(count))
    # With a kernel of unit vectors, the gradient of a convolution adds each column to its place.
    y = ops.conv_input_grad(
        columns, eye, shape=(n * channels, 1, *image), stride=strides, padding=padding, dilation=dilations
    )
    return ops.reshape(y, shape=(n, channels, *image))


_ = (axes_of, is_static, product, Item)
