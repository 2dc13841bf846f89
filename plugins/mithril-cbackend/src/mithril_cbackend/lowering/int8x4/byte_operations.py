"""Operations of kernels of int8x4 groups: rounding to bytes, and convolutions and pools of images with channels last.

An image is uint8 or bfloat16 [batch, height, width, channels], or int8x4 groups of four or two channels as uint32, of
which a pixel has as many as its channels need.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Ints, Pairs, Shape, dtype as as_dtype, float32, int8, int32, op, uint8, uint32

INT8X4 = 4  # bytes of an int8x4 group
NO_AXES = "it exists in programs of this backend"


def _int32(dtypes: Any, attributes: Any) -> Any:
    return int32


def _uint32(dtypes: Any, attributes: Any) -> Any:
    return uint32


def _uint8(dtypes: Any, attributes: Any) -> Any:
    return uint8


def _same_shape(x: Any, **_: Any) -> Any:
    return x


def _int8x4_shape(x: Any, *, per: int) -> Any:
    return (x[0], *x[2:], -(-x[1] // per))


@op(name="c.int8x4_of_pixels", shape=_int8x4_shape, dtype=_uint32, opaque=True, no_axes=NO_AXES)
def int8x4_of_pixels(x, *, per: int):  # type: ignore[no-untyped-def]
    """The int8x4 groups of ``per`` channels of the pixels of an image with channels first; missing channels are 0."""
    channels = x.shape[1]
    pixels = np.zeros((x.shape[0], *x.shape[2:], -(-channels // per) * per), x.dtype)
    pixels[..., :channels] = np.moveaxis(x, 1, -1)
    return pixels.view(np.uint32)


def _conv_shape(image: Any, weights: Any, *, stride: Any, padding: Any, dilation: Any, groups: int, zero: int) -> Any:
    spatial = [
        (n + sum(p) - (k - 1) * d - 1) // s + 1
        for n, k, s, p, d in zip(image[1:3], weights[:2], stride, padding, dilation, strict=True)
    ]
    return (image[0], *spatial, weights[3])


def _sums(dtypes: Any, attributes: Any) -> Any:
    return int32 if dtypes[1] is int8 else float32


@op(name="c.conv_int8x4", shape=_conv_shape, dtype=_sums, opaque=True, no_axes=NO_AXES)
def conv_int8x4(image, weights, *, stride: Ints, padding: Pairs, dilation: Ints, groups: int, zero: int):  # type: ignore[no-untyped-def]
    """Sums of the bytes of an image times signed bytes [height, width, channels / groups, results], or of bfloat16.

    The image is padded with ``zero``.
    """
    is_bytes = weights.dtype == np.int8
    pixels = image.view(np.uint8 if is_bytes else weights.dtype)[..., : weights.shape[2] * groups]
    pixels = pixels.astype(np.float64)  # in which all sums of bytes are exact
    widths: Any = ((0, 0), *padding, (0, 0))
    pixels = np.pad(pixels, widths, constant_values=zero)
    settings: dict[str, Any] = {"stride": stride, "padding": ((0, 0), (0, 0)), "dilation": dilation, "groups": groups}
    y = ops.conv(np.moveaxis(pixels, -1, 1), weights.transpose(3, 2, 0, 1).astype(np.float64), **settings)
    return np.moveaxis(y, 1, -1).astype(np.int32 if is_bytes else np.float32)


def _pool_shape(image: Any, *, kernel: Any, stride: Any, padding: Any, **_: Any) -> Any:
    spatial = [(n + sum(p) - k) // s + 1 for n, k, s, p in zip(image[1:3], kernel, stride, padding, strict=True)]
    return (image[0], *spatial, image[3])


def _windows(image: Any, kernel: Any, stride: Any, padding: Any, value: Any) -> Any:
    padded = np.pad(image, ((0, 0), *padding, (0, 0)), constant_values=value)
    view = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(1, 2))
    return view[:, :: stride[0], :: stride[1]]


def _same(dtypes: Any, attributes: Any) -> Any:
    return dtypes[0]


@op(name="c.max_pool_last", shape=_pool_shape, dtype=_same, opaque=True, no_axes=NO_AXES)
def max_pool_last(image, *, kernel: Ints, stride: Ints, padding: Pairs):  # type: ignore[no-untyped-def]
    """The largest element of each window of an image with channels last."""
    kind = as_dtype(image.dtype)
    lowest = -np.inf if kind.is_float else kind.limits[0]
    return _windows(image, kernel, stride, padding, lowest).max(axis=(-2, -1))


@op(name="c.sum_pool_bytes", shape=_pool_shape, dtype=_int32, opaque=True, no_axes=NO_AXES)
def sum_pool_bytes(image, *, kernel: Shape, stride: Ints, padding: Pairs, zero: int):  # type: ignore[no-untyped-def]
    """The int32 sum of each window of an image with channels last, which is padded with ``zero``."""
    return _windows(image, kernel, stride, padding, zero).sum(axis=(-2, -1), dtype=np.int32)


@op(name="c.quantize_bytes", shape=_same_shape, dtype=_uint8, opaque=True, no_axes=NO_AXES)
def quantize_bytes(x, *, scale: float, zero: int):  # type: ignore[no-untyped-def]
    """x times 1 / scale, rounded to even, plus ``zero``, saturating; nan is the lowest byte."""
    low, high = byte_limits(scale, zero)
    x = np.where(x > low, x, low)
    x = np.where(x < high, x, high)
    return (np.rint(x * (np.float32(1) / np.float32(scale))) + np.float32(zero)).astype(np.uint8)


def byte_limits(scale: float, zero: int) -> tuple[np.float32, np.float32]:
    """Return the smallest and largest number that a byte represents."""
    return np.float32(-zero * np.float32(scale)), np.float32((255 - zero) * np.float32(scale))
