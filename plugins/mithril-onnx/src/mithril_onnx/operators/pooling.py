"""Pooling over windows."""

from __future__ import annotations

import math

import numpy as np

from mithril import ops
from mithril.graph import OperationError, is_static
from mithril_onnx.operators.common import int64, scalar, spatial
from mithril_onnx.operators.nn import paddings
from mithril_onnx.table import Sizes, operator


class Windows:
    """The windows of a pool: kernel, strides, dilations and explicit padding; ``extra`` only completes the last one."""

    def __init__(self, x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode):
        count = x.ndim - 2
        self.kernel = spatial(kernel_shape, count, 1)
        self.strides = spatial(strides, count, 1)
        self.dilations = spatial(dilations, count, 1)
        self.pads = paddings(x, self.kernel, self.strides, self.dilations, auto_pad, pads)
        negative = any(n < 0 for pair in self.pads for n in pair)
        if negative or min((*self.kernel, *self.strides, *self.dilations), default=1) < 1:
            raise OperationError("a pool has sizes below 1, or negative pads")
        self.extra = [0] * count
        if ceil_mode and auto_pad == "NOTSET":
            for k in range(count):
                self.extra[k] = self._missing(x.shape[2 + k], k)
        self.count = count

    def _missing(self, size, k):
        """Return the elements that the last window of ``ceil_mode`` lacks; none begins in the padding."""
        before, after = self.pads[k]
        reach = (self.kernel[k] - 1) * self.dilations[k] + 1
        span = size + before + after - reach
        step = self.strides[k]
        if type(span) is not int:
            if step == 1:
                return 0
            raise OperationError(f"ceil_mode requires static sizes, axis {k} is {size}")
        count = -(-span // step) + 1
        if (count - 1) * step >= size + before:
            count -= 1
        return max((count - 1) * step - span, 0)

    @property
    def padding(self):
        return tuple((a, b + e) for (a, b), e in zip(self.pads, self.extra, strict=True))

    def taps(self, x, value):
        """Yield the slice of the padded x at each position of the kernel, with the position."""
        widths = ((0, 0), (0, 0), *self.padding)
        padded = ops.pad(x, widths=widths, value=value) if any(p != (0, 0) for p in widths) else x
        sizes = [
            (n - (k - 1) * d - 1) // s + 1
            for n, k, d, s in zip(padded.shape[2:], self.kernel, self.dilations, self.strides, strict=True)
        ]
        for place in np.ndindex(*self.kernel):
            starts = tuple(p * d for p, d in zip(place, self.dilations, strict=True))
            stops = tuple(a + (n - 1) * s + 1 for a, n, s in zip(starts, sizes, self.strides, strict=True))
            axes = tuple(range(2, 2 + self.count))
            yield place, ops.slice(padded, starts=starts, stops=stops, steps=self.strides, axes=axes)


@operator
def AveragePool(
    x, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None, pads=None, strides=None
):
    w = Windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    if not any(w.extra) and all(d == 1 for d in w.dilations) and all(max(p) < k for p, k in zip(w.pads, w.kernel)):
        return ops.avg_pool(
            x, kernel=w.kernel, stride=w.strides, padding=w.padding, count_include_pad=bool(count_include_pad)
        )
    total = _sum(part for _, part in w.taps(x, 0.0))
    ones = ops.full(shape=(1, 1, *x.shape[2:]), value=1.0, dtype=x.dtype)
    # Padding counts, but not the elements that only complete the last window.
    if count_include_pad:
        ones = ops.pad(ones, widths=((0, 0), (0, 0), *w.pads), value=1.0)
        w.pads = [(0, 0)] * w.count
    return total / _sum(part for _, part in w.taps(ones, 0.0))


def _sum(parts):
    total = None
    for part in parts:
        total = part if total is None else total + part
    return total


@operator
def LpPool(x, *, kernel_shape, p=2, auto_pad="NOTSET", ceil_mode=0, dilations=None, pads=None, strides=None):
    w = Windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    powers = ops.pow(ops.abs(x), float(p))
    return ops.pow(_sum(part for _, part in w.taps(powers, 0.0)), 1.0 / p)


@operator
def MaxPool(
    x,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations=None,
    pads=None,
    storage_order=0,
    strides=None,
    context,
):
    w = Windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    if context.results > 1:
        return _with_positions(x, w, storage_order)
    reach = [(k - 1) * d + 1 for k, d in zip(w.kernel, w.dilations)]
    if x.dtype.is_float and all(max(p) < r for p, r in zip(w.padding, reach)):
        return ops.max_pool(x, kernel=w.kernel, stride=w.strides, padding=w.padding, dilation=w.dilations)
    return _largest(x, w)[0]


def _lowest(x):
    return -float("inf") if x.dtype.is_float else x.dtype.limits[0]


def _largest(x, w, positions=None):
    best = best_place = None
    places = iter(w.taps(positions, -1)) if positions is not None else None
    for _, part in w.taps(x, _lowest(x)):
        place = next(places)[1] if places is not None else None
        if best is None:
            best, best_place = part, place
            continue
        if place is not None:
            better = ops.logical_or(ops.greater(part, best), ops.less(best_place, scalar(0, place)))
            better = ops.logical_and(better, ops.greater_equal(place, scalar(0, place)))
            best_place = ops.where(better, place, best_place)
        best = ops.maximum(best, part)
    return best, best_place


def _with_positions(x, w, storage_order):
    spatial_shape = x.shape[2:]
    order = range(w.count) if not storage_order else range(w.count - 1, -1, -1)
    place = None
    for k in order:
        line = ops.iota(shape=(1, 1, *spatial_shape), axis=2 + k, dtype="int64")
        place = line if place is None else place * scalar(spatial_shape[k], line) + line
    n, c = x.shape[:2]
    # Positions are those in the flat tensor of all images and channels.
    images = ops.iota(shape=(n, c, *[1] * w.count), axis=0, dtype="int64") * scalar(c, place)
    images = images + ops.iota(shape=(n, c, *[1] * w.count), axis=1, dtype="int64")
    size = 1
    for d in spatial_shape:
        size = size * d
    place = ops.broadcast_to(place + images * scalar(size, place), shape=x.shape)
    best, best_place = _largest(x, w, place)
    return best, int64(best_place)


@operator
def MaxUnpool(x, indices, output_shape: Sizes = None, *, kernel_shape, pads=None, strides=None):
    count = x.ndim - 2
    kernel, strides = spatial(kernel_shape, count, 1), spatial(strides, count, 1)
    pads = spatial(pads, 2 * count, 0)
    natural = tuple((x.shape[2 + k] - 1) * strides[k] + kernel[k] - pads[k] - pads[k + count] for k in range(count))
    shape = (*x.shape[:2], *natural)
    target = shape if output_shape is None else tuple(output_shape)
    if not is_static(shape) or not is_static(target):
        raise OperationError("MaxUnpool requires static sizes")
    total = math.prod(shape)
    flat = ops.full(shape=(total,), value=0, dtype=x.dtype)
    y = ops.scatter_nd(flat, ops.reshape(indices, shape=(-1, 1)), ops.reshape(x, shape=(-1,)))
    widths = tuple((0, max(n - m, 0)) for n, m in zip(target, shape, strict=True))
    return ops.pad(ops.reshape(y, shape=shape), widths=widths)
