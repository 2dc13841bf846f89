"""GridSample, RoiAlign, deformable convolution, affine grids, determinants."""

from __future__ import annotations

import itertools

import numpy as np

from mithril import ops
from mithril.graph import OperationError, UnsupportedError, product
from mithril_onnx.operators.common import scalar, spatial
from mithril_onnx.table import Sizes, Weight, operator


def sampled(x, places, in_bounds=None):
    """Return the elements of [batch, channels, *spatial] at integer places, a list of [batch, points] per axis."""
    n, c, *sizes = x.shape
    flat = None
    for place, size in zip(places, sizes, strict=True):
        bound = (
            scalar(size - 1, place)
            if type(size) is int
            else ops.cast(ops.size_value(value=size - 1), dtype=place.dtype)
        )
        place = ops.minimum(ops.maximum(place, scalar(0, place)), bound)
        step = scalar(size, place) if type(size) is int else ops.cast(ops.size_value(value=size), dtype=place.dtype)
        flat = place if flat is None else flat * step + place
    rows = ops.transpose(ops.reshape(x, shape=(n, c, product(sizes))), perm=(0, 2, 1))
    y = ops.gather_nd(rows, ops.unsqueeze(flat, axis=(2,)), batch_dims=1)  # [batch, points, channels]
    y = ops.transpose(y, perm=(0, 2, 1))
    return y if in_bounds is None else y * ops.cast(ops.unsqueeze(in_bounds, axis=(1,)), dtype=x.dtype)


def _inside(places, sizes):
    in_bounds = None
    for place, size in zip(places, sizes, strict=True):
        size_value = (
            scalar(size, place) if type(size) is int else ops.cast(ops.size_value(value=size), dtype=place.dtype)
        )
        in_axis = ops.logical_and(ops.greater_equal(place, scalar(0, place)), ops.less(place, size_value))
        in_bounds = in_axis if in_bounds is None else ops.logical_and(in_bounds, in_axis)
    return in_bounds


def bilinear(x, points):
    """Interpolate linearly at fractional positions, with zeros outside of the image."""
    base = [ops.floor(p) for p in points]
    total = None
    for corner in itertools.product((0, 1), repeat=len(points)):
        weight = None
        places = []
        for p, b, c in zip(points, base, corner, strict=True):
            part = p - b if c else 1.0 - (p - b)
            weight = part if weight is None else weight * part
            places.append(ops.cast(b, dtype="int64") + scalar(c, ops.cast(b, dtype="int64")))
        value = sampled(x, places, _inside(places, x.shape[2:])) * ops.unsqueeze(weight, axis=(1,))
        total = value if total is None else total + value
    return total


@operator
def GridSample(x, grid, *, align_corners=0, mode="linear", padding_mode="zeros"):
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return ops.grid_sample(x, grid, mode=mode, padding_mode=padding_mode, align_corners=bool(align_corners))


@operator
def AffineGrid(theta, size: Sizes, *, align_corners=0):
    return ops.affine_grid(theta, size=tuple(size)[2:], align_corners=bool(align_corners))


@operator
def RoiAlign(
    x, rois, batch_indices, *, coordinate_transformation_mode="half_pixel", mode="avg", output_height=1, output_width=1,
    sampling_ratio=0, spatial_scale=1.0,
):  # fmt: skip
    offset = 0.5 if coordinate_transformation_mode == "half_pixel" else 0.0
    if sampling_ratio > 0 and mode == "avg":
        settings = {"size": (output_height, output_width), "samples": sampling_ratio, "aligned": bool(offset)}
        return ops.roi_align(x, rois, batch_indices, scale=spatial_scale, **settings)
    boxes = rois * spatial_scale - offset
    x1, y1, x2, y2 = (ops.select(boxes, index=(k,), axes=(1,)) for k in range(4))
    height, width = y2 - y1, x2 - x1
    # As in the reference: without half pixels, boxes have at least one pixel.
    if not offset:
        height, width = ops.maximum(height, scalar(1.0, height)), ops.maximum(width, scalar(1.0, width))
    images = ops.take(x, batch_indices, axis=0)
    if sampling_ratio <= 0:
        corners, extents = (y1, x1), (height, width)
        return _adaptive_samples(images, corners, extents, (output_height, output_width), maximum=mode == "max")

    def line(start, size, bins, samples):
        steps = (np.arange(bins)[:, None] + (np.arange(samples) + 0.5) / samples).reshape(-1)
        return ops.unsqueeze(start, axis=(1,)) + ops.unsqueeze(size / float(bins), axis=(1,)) * steps.astype(np.float32)

    py, px = line(y1, height, output_height, sampling_ratio), line(x1, width, output_width, sampling_ratio)
    count, a, b = py.shape[0], output_height * sampling_ratio, output_width * sampling_ratio
    gy = ops.reshape(ops.broadcast_to(ops.unsqueeze(py, axis=(2,)), shape=(count, a, b)), shape=(count, a * b))
    gx = ops.reshape(ops.broadcast_to(ops.unsqueeze(px, axis=(1,)), shape=(count, a, b)), shape=(count, a * b))
    y = _clamped_bilinear(images, gy, gx, maximum=mode == "max")
    y = ops.reshape(y, shape=(count, x.shape[1], output_height, sampling_ratio, output_width, sampling_ratio))
    return ops.max(y, axis=(3, 5)) if mode == "max" else ops.mean(y, axis=(3, 5))


def _adaptive_samples(images, corners, extents, sizes, *, maximum):
    """Read as many samples per element as it covers pixels, which differs between boxes, in a loop."""
    count, channels = images.shape[:2]
    elements = sizes[0] * sizes[1]
    steps = [ops.unsqueeze(e / float(n), axis=(1,)) for e, n in zip(extents, sizes, strict=True)]
    numbers = [ops.maximum(ops.ceil(s), 0.0) for s in steps]  # of samples along an axis, [boxes, 1]
    longest = [ops.cast(ops.max(n), dtype="int32") for n in numbers]
    bins = [np.arange(n, dtype=np.float32) for n in sizes]

    def body(state):
        t, total = state
        indices = ops.floordiv(t, longest[1]), ops.mod(t, longest[1])
        grids, is_sample = [], None
        for k, (index, n) in enumerate(zip(indices, numbers, strict=True)):
            place = ops.cast(index, dtype="float32")
            within = ops.less(place, n)
            is_sample = within if is_sample is None else ops.logical_and(is_sample, within)
            offsets = bins[k] + (place + 0.5) / ops.maximum(n, 1.0)
            p = ops.unsqueeze(corners[k], axis=(1,)) + offsets * steps[k]
            p = ops.broadcast_to(ops.unsqueeze(p, axis=(2 - k,)), shape=(count, *sizes))
            grids.append(ops.reshape(p, shape=(count, elements)))
        y = _clamped_bilinear(images, grids[0], grids[1], maximum=maximum)
        new = ops.maximum(total, y) if maximum else total + y
        return t + np.int32(1), ops.where(ops.unsqueeze(is_sample, axis=(2,)), new, total)

    start = float("-inf") if maximum else 0.0
    first = ops.full(shape=(count, channels, elements), value=start, dtype=images.dtype)
    counter = ops.full(shape=(), value=0, dtype="int32")
    _, total = ops.while_loop(lambda state: ops.less(state[0], longest[0] * longest[1]), body, (counter, first))
    samples = ops.unsqueeze(numbers[0] * numbers[1], axis=(2,))
    total = ops.where(ops.greater(samples, 0.0), total if maximum else total / ops.maximum(samples, 1.0), 0.0)
    return ops.reshape(total, shape=(count, channels, *sizes))


def _clamped_bilinear(x, py, px, maximum):
    """Interpolate as RoiAlign does: positions up to one outside are moved to the edge, others are 0."""
    in_bounds, places, parts = None, [], []
    for p, size in ((py, x.shape[2]), (px, x.shape[3])):
        in_axis = ops.logical_and(ops.greater_equal(p, -1.0), ops.less_equal(p, float(size)))
        in_bounds = in_axis if in_bounds is None else ops.logical_and(in_bounds, in_axis)
        p = ops.maximum(p, scalar(0.0, p))
        low = ops.minimum(ops.floor(p), scalar(float(size - 1), p))
        at_edge = ops.greater_equal(low, float(size - 1))
        fraction = ops.where(at_edge, scalar(0.0, p), p - low)
        low = ops.cast(low, dtype="int64")
        places.append((low, ops.minimum(low + np.int64(1), scalar(size - 1, low))))
        parts.append((1.0 - fraction, fraction))
    total = None
    for i, j in itertools.product((0, 1), repeat=2):
        # The largest of the weighted corners, not of the interpolated values, as in the reference.
        value = sampled(x, [places[0][i], places[1][j]]) * ops.unsqueeze(parts[0][i] * parts[1][j], axis=(1,))
        total = value if total is None else ops.maximum(total, value) if maximum else total + value
    return total * ops.cast(ops.unsqueeze(in_bounds, axis=(1,)), dtype=x.dtype)


@operator
def DeformConv(
    x, w: Weight, offset, b: Weight = None, mask=None, *,
    dilations=None, group=1, kernel_shape=None, offset_group=1, pads=None, strides=None,
):  # fmt: skip
    if x.ndim != 4:
        raise UnsupportedError("DeformConv requires images [batch, channels, height, width]")
    strides, dilations = spatial(strides, 2, 1), spatial(dilations, 2, 1)
    pads = spatial(pads, 4, 0)
    n, c = x.shape[:2]
    kh, kw = w.shape[2:]
    oh, ow = offset.shape[2:]
    group_channels = c // offset_group
    taps = kh * kw
    offsets = ops.reshape(offset, shape=(n, offset_group, taps, 2, oh * ow))
    images = ops.reshape(x, shape=(n * offset_group, group_channels, *x.shape[2:]))
    gy, gx = (
        g.reshape(-1).astype(np.float32)
        for g in np.meshgrid(np.arange(oh) * strides[0] - pads[0], np.arange(ow) * strides[1] - pads[1], indexing="ij")
    )
    columns = []
    for k in range(taps):
        i, j = divmod(k, kw)
        dy, dx = (
            ops.reshape(ops.select(offsets, index=(k, d), axes=(2, 3)), shape=(n * offset_group, oh * ow))
            for d in (0, 1)
        )
        value = bilinear(images, [dy + (gy + i * dilations[0]), dx + (gx + j * dilations[1])])
        if mask is not None:
            m = ops.reshape(mask, shape=(n, offset_group, taps, oh * ow))
            m = ops.reshape(ops.select(m, index=(k,), axes=(2,)), shape=(n * offset_group, 1, oh * ow))
            value = value * m
        columns.append(ops.reshape(value, shape=(n, c, oh * ow)))
    stacked = ops.stack(*columns, axis=2)  # [batch, channels, taps, windows]
    stacked = ops.reshape(stacked, shape=(n, group, (c // group) * taps, oh * ow))
    kernels = ops.reshape(w, shape=(1, group, w.shape[0] // group, w.shape[1] * taps))
    y = ops.reshape(ops.matmul(kernels, stacked), shape=(n, w.shape[0], oh, ow))
    return y if b is None else y + ops.reshape(b, shape=(1, -1, 1, 1))


@operator
def Det(x):
    """Eliminate column by column with the largest pivot of each."""
    size = x.shape[-1]
    if type(size) is not int or size > 64:
        raise UnsupportedError(f"Det requires matrices of static size up to 64, got {size}")
    sign = None
    total = None
    rows = np.arange(size)
    for k in range(size):
        column = ops.select(x, index=(k,), axes=(x.ndim - 1,))
        pivot = ops.argmax(ops.where(rows >= k, ops.abs(column), scalar(-1.0, x)), axis=-1)
        selected = ops.unsqueeze(
            ops.cast(ops.equal(ops.unsqueeze(pivot, axis=(-1,)), rows.astype(np.int32)), dtype=x.dtype), axis=(-1,)
        )
        current = (rows == k).astype(x.dtype.numpy)[:, None]
        pivot_row = ops.sum(x * selected, axis=-2, keepdims=True)
        old_row = ops.sum(x * current, axis=-2, keepdims=True)
        x = x + selected * (old_row - pivot_row) + current * (pivot_row - old_row)
        swapped = ops.where(ops.equal(pivot, k), scalar(1.0, x), scalar(-1.0, x))
        sign = swapped if sign is None else sign * swapped
        head = ops.select(pivot_row, index=(0, k), axes=(x.ndim - 2, x.ndim - 1))
        total = head if total is None else total * head
        safe = ops.where(ops.equal(head, 0.0), scalar(1.0, x), head)
        factor = ops.slice(x, starts=(k,), stops=(k + 1,), steps=(1,), axes=(x.ndim - 1,)) / ops.unsqueeze(
            safe, axis=(-1, -2)
        )
        x = x - factor * (rows > k).astype(x.dtype.numpy)[:, None] * pivot_row
    if total is None:
        raise OperationError("Det of an empty matrix")
    return total * sign
