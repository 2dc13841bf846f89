"""Convolutions: of one to three axes, transposed, depthwise and separable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril import ops
from mithril_keras.layers.activations import activate
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor, channels_first, from_channels_first, pair
from mithril_keras.weights import Weights

STATIC = "pass static sizes: ml.compile(model, backend, shapes={{...}})"


def same_padding(weights: Weights, sizes: Any, kernel: Any, stride: Any, dilation: Any) -> tuple[tuple[int, int], ...]:
    """Return the padding for which the result has one element per stride, the larger part at the end."""
    pads = []
    for n, k, s, d in zip(sizes, kernel, stride, dilation, strict=True):
        reach = (k - 1) * d + 1
        if s == 1:
            total = reach - 1
        elif isinstance(n, int):
            total = max((-(-n // s) - 1) * s + reach - n, 0)
        else:
            raise weights.unsupported(f"padding='same' with stride {s} and an open size", STATIC)
        pads.append((total // 2, total - total // 2))
    return tuple(pads)


def padding_of(
    weights: Weights, padding: str, v: Any, kernel: Any, stride: Any, dilation: Any
) -> tuple[tuple[int, int], ...]:
    """Return the padding of a convolution or pool over the spatial axes of a value with the channels first."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        return same_padding(weights, v.shape[2:], kernel, stride, dilation)
    if padding == "causal" and len(kernel) == 1:
        return (((kernel[0] - 1) * dilation[0], 0),)
    raise weights.unsupported(f"padding='{padding}'")


def with_bias(weights: Weights, y: Any, channels: int, use_bias: bool) -> Any:
    if not use_bias:
        return y
    return y + ops.reshape(weights.param("bias", (channels,)), shape=(channels, *(1,) * (len(y.shape) - 2)))


@layer("Conv1D", "Conv2D", "Conv3D")
def conv(
    weights: Weights,
    x: Tensor,
    *,
    filters: int,
    kernel_size: Sequence[int],
    strides: Any = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Any = 1,
    groups: int = 1,
    activation: Any = None,
    use_bias: bool = True,
) -> Tensor:
    """Return a convolution; the parameter is [out, in / groups, *kernel]."""
    v = weights.cast(channels_first(x, data_format))
    count = len(v.shape) - 2
    kernel = pair(kernel_size, count)
    stride, dilation = pair(strides, count), pair(dilation_rate, count)
    shape = (*kernel, v.shape[1] // groups, filters)
    w = weights.param("kernel", shape, perm=(count + 1, count, *range(count)))
    pads = padding_of(weights, padding, v, kernel, stride, dilation)
    y = ops.conv(v, w, stride=stride, padding=pads, dilation=dilation, groups=groups)
    y = with_bias(weights, y, filters, use_bias)
    return activate(from_channels_first(y, data_format), activation, weights.label)


@layer("DepthwiseConv1D", "DepthwiseConv2D")
def depthwise_conv(
    weights: Weights,
    x: Tensor,
    *,
    kernel_size: Any,
    strides: Any = 1,
    padding: str = "valid",
    depth_multiplier: int = 1,
    data_format: str | None = None,
    dilation_rate: Any = 1,
    activation: Any = None,
    use_bias: bool = True,
) -> Tensor:
    """Return a convolution of each channel; the parameter is [channels * multiplier, 1, *kernel]."""
    v = weights.cast(channels_first(x, data_format))
    count = len(v.shape) - 2
    y = _depthwise(weights, "kernel", v, kernel_size, strides, padding, depth_multiplier, dilation_rate)
    y = with_bias(weights, y, v.shape[1] * depth_multiplier, use_bias)
    del count
    return activate(from_channels_first(y, data_format), activation, weights.label)


def _depthwise(
    weights: Weights, name: str, v: Any, kernel_size: Any, strides: Any, padding: str, multiplier: int, rate: Any
) -> Any:
    count, channels = len(v.shape) - 2, v.shape[1]
    kernel, stride, dilation = pair(kernel_size, count), pair(strides, count), pair(rate, count)
    shape = (*kernel, channels, multiplier)
    perm, new = (count, count + 1, *range(count)), (channels * multiplier, 1, *kernel)
    w = weights.param(name, shape, perm=perm, reshape=new)
    pads = padding_of(weights, padding, v, kernel, stride, dilation)
    return ops.conv(v, w, stride=stride, padding=pads, dilation=dilation, groups=channels)


@layer("SeparableConv1D", "SeparableConv2D")
def separable_conv(
    weights: Weights,
    x: Tensor,
    *,
    filters: int,
    kernel_size: Any,
    strides: Any = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Any = 1,
    depth_multiplier: int = 1,
    activation: Any = None,
    use_bias: bool = True,
) -> Tensor:
    """Return a convolution of each channel, and a product over channels."""
    v = weights.cast(channels_first(x, data_format))
    count = len(v.shape) - 2
    y = _depthwise(weights, "depthwise_kernel", v, kernel_size, strides, padding, depth_multiplier, dilation_rate)
    ones = (1,) * count
    w = weights.param("pointwise_kernel", (*ones, y.shape[1], filters), perm=(count + 1, count, *range(count)))
    y = ops.conv(y, w, stride=ones, padding=((0, 0),) * count, dilation=ones)
    y = with_bias(weights, y, filters, use_bias)
    return activate(from_channels_first(y, data_format), activation, weights.label)


@layer("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
def conv_transpose(
    weights: Weights,
    x: Tensor,
    *,
    filters: int,
    kernel_size: Sequence[int],
    strides: Any = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Any = 1,
    output_padding: Any = None,
    activation: Any = None,
    use_bias: bool = True,
) -> Tensor:
    """Return a transposed convolution; the parameter is [in, out, *kernel]."""
    v = weights.cast(channels_first(x, data_format))
    count = len(v.shape) - 2
    kernel = pair(kernel_size, count)
    stride, dilation = pair(strides, count), pair(dilation_rate, count)
    extra = (None,) * count if output_padding is None else pair(output_padding, count)
    w = weights.param("kernel", (*kernel, filters, v.shape[1]), perm=(count + 1, count, *range(count)))
    crops, grown = [], []
    for k, s, d, e in zip(kernel, stride, dilation, extra, strict=True):
        low, high = _cropped(weights, padding, (k - 1) * d + 1, s, e)
        crops.append((max(low, 0), max(high, 0)))
        grown.append((max(-low, 0), max(-high, 0)))
    y = ops.conv_transpose(v, w, stride=stride, padding=tuple(crops), output_padding=(0,) * count, dilation=dilation)
    if any(n for p in grown for n in p):
        y = ops.pad(y, widths=((0, 0), (0, 0), *grown))
    y = with_bias(weights, y, filters, use_bias)
    return activate(from_channels_first(y, data_format), activation, weights.label)


def _cropped(weights: Weights, padding: str, reach: int, stride: int, extra: int | None) -> tuple[int, int]:
    """Return the elements to remove from both ends of the full result; negative ones are zeros to add."""
    if padding == "valid":
        return 0, -(max(reach, stride) - reach if extra is None else extra)
    if padding != "same":
        raise weights.unsupported(f"padding='{padding}'")
    length = stride + reach - 2 if extra is None else reach + reach % 2 - 2 + extra
    left = min(length // 2 + length % 2, reach - 1)
    return reach - 1 - left, reach - 1 - (length - left)
