"""Convolutions and pools over [batch, height, width, channels]; ours have the channels in front of the sizes."""

from __future__ import annotations

from mithril import ops
from mithril.graph import OperationError, equal
from mithril_tflite.operators.activations import activated
from mithril_tflite.table import Sizes, Weight, operator
from mithril_tflite.values import transposed

SAME, VALID = 0, 1


def first(x):
    """Return x with its channels, the last axis, behind the batch."""
    return transposed(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


def last(y, activation=0):
    """Return y, after its activation, with its channels, the axis behind the batch, as the last axis."""
    y = activated(y, activation) if activation else y
    return ops.transpose(y, perm=(0, *range(2, y.ndim), 1))


def paddings(sizes, kernel, strides, dilations, padding):
    """Return (before, after) for each spatial axis; of an odd padding the larger half comes after."""
    if padding not in (SAME, VALID) or min((*kernel, *strides, *dilations)) < 1:
        raise OperationError(
            f"the padding is {padding}, strides are {strides}, dilations {dilations}, the kernel {kernel}"
        )
    pairs = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        reach = (k - 1) * dilation + 1
        if padding == VALID:
            total = 0
        elif stride == 1:  # does not depend on the size of the axis, which may be open
            total = reach - 1
        elif type(size) is int:
            total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        else:
            raise OperationError(
                f"the padding SAME with the stride {stride} requires a static size, not {size}",
                hint="fix the sizes: ml.compile(model, shapes={'INPUT': [...]})",
            )
        pairs.append((total // 2, total - total // 2))
    return tuple(pairs)


def _convolved(x, w, bias, padding, strides, dilations, activation):
    """Convolve x, with channels last, by w [out, in, ...]; its sizes tell the number of groups."""
    pairs = paddings(x.shape[1:-1], w.shape[2:], strides, dilations, padding)
    groups = x.shape[-1] // w.shape[1]
    y = ops.conv(first(x), w, stride=strides, padding=pairs, dilation=dilations, groups=groups)
    y = y if bias is None else y + ops.reshape(bias, shape=(1, -1, *[1] * (y.ndim - 2)))
    return last(y, activation)


@operator
def CONV_2D(
    x,
    weight: Weight,
    bias: Weight = None,
    *,
    padding,
    stride_w,
    stride_h,
    dilation_w_factor,
    dilation_h_factor,
    activation,
):
    return _convolved(
        x, first(weight), bias, padding, (stride_h, stride_w), (dilation_h_factor, dilation_w_factor), activation
    )


@operator
def DEPTHWISE_CONV_2D(
    x, weight: Weight, bias: Weight = None, *,
    padding, stride_w, stride_h, depth_multiplier, dilation_w_factor, dilation_h_factor, activation,
):  # fmt: skip
    w = transposed(weight, (3, 0, 1, 2))
    return _convolved(x, w, bias, padding, (stride_h, stride_w), (dilation_h_factor, dilation_w_factor), activation)


@operator
def CONV_3D(
    x, weight: Weight, bias: Weight = None, *,
    padding, stride_d, stride_w, stride_h, dilation_d_factor, dilation_w_factor, dilation_h_factor, activation,
):  # fmt: skip
    w = transposed(weight, (4, 3, 0, 1, 2))
    strides, dilations = (stride_d, stride_h, stride_w), (dilation_d_factor, dilation_h_factor, dilation_w_factor)
    return _convolved(x, w, bias, padding, strides, dilations, activation)


@operator
def TRANSPOSE_CONV(size: Sizes, weight: Weight, x, bias: Weight = None, *, padding, stride_w, stride_h, activation):
    strides, kernel, target = (stride_h, stride_w), weight.shape[1:3], size[1:3]
    complete = [(n - 1) * s + k for n, s, k in zip(x.shape[1:3], strides, kernel, strict=True)]
    pairs, extra = [], []
    for full_size, new_size in zip(complete, target, strict=True):
        excess = full_size - new_size
        before = max(excess, 0) // 2 if padding == SAME else 0
        pairs.append((before, max(excess - before, 0)))
        extra.append(max(-excess, 0))
    w = transposed(weight, (3, 0, 1, 2))  # [in, out, height, width]
    y = ops.conv_transpose(first(x), w, stride=strides, padding=tuple(pairs), output_padding=tuple(extra))
    y = y if bias is None else y + ops.reshape(bias, shape=(1, -1, 1, 1))
    return last(y, activation)


@operator
def AVERAGE_POOL_2D(x, *, padding, stride_w, stride_h, filter_width, filter_height):
    kernel, strides = (filter_height, filter_width), (stride_h, stride_w)
    pairs = paddings(x.shape[1:3], kernel, strides, (1, 1), padding)
    if not any(map(any, pairs)) and all(equal(n, k) for n, k in zip(x.shape[1:3], kernel, strict=True)):
        return ops.mean(x, axis=(1, 2), keepdims=True)
    return last(ops.avg_pool(first(x), kernel=kernel, stride=strides, padding=pairs, count_include_pad=False))


@operator
def MAX_POOL_2D(x, *, padding, stride_w, stride_h, filter_width, filter_height):
    kernel, strides = (filter_height, filter_width), (stride_h, stride_w)
    pairs = paddings(x.shape[1:3], kernel, strides, (1, 1), padding)
    return last(ops.max_pool(first(x), kernel=kernel, stride=strides, padding=pairs))


@operator
def L2_POOL_2D(x, *, padding, stride_w, stride_h, filter_width, filter_height):
    options = {"padding": padding, "stride_w": stride_w, "stride_h": stride_h}
    return ops.sqrt(AVERAGE_POOL_2D(x * x, filter_width=filter_width, filter_height=filter_height, **options))
