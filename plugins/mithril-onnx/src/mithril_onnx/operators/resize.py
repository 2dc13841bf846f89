"""Resize and Upsample: one matrix of weights per axis, made by NumPy; nearest neighbors are positions."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.base import OperationError, UnsupportedError
from mithril_onnx.operators.common import axes_of
from mithril_onnx.table import Known, operator


@operator(since=11)
def Resize(
    x, roi: Known = None, scales: Known = None, sizes: Known = None, *,
    antialias=0, axes=None, coordinate_transformation_mode="half_pixel", cubic_coeff_a=-0.75, exclude_outside=0,
    extrapolation_value=0.0, keep_aspect_ratio_policy="stretch", mode="nearest", nearest_mode="round_prefer_floor",
):  # fmt: skip
    selected = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    if scales is not None and scales.size == 0:
        scales = None
    if sizes is not None and sizes.size == 0:
        sizes = None
    old = [x.shape[a] for a in selected]
    targets, factors = _targets(old, scales, sizes, keep_aspect_ratio_policy)
    regions = np.asarray(roi, np.float64) if roi is not None and np.size(roi) else None
    for k, axis in enumerate(selected):
        region = None if regions is None else (regions[k], regions[k + len(selected)])
        if targets[k] == old[k] and factors[k] == 1.0 and coordinate_transformation_mode != "tf_crop_and_resize":
            continue
        if type(old[k]) is not int:
            raise UnsupportedError(f"Resize of axis {axis} requires a static size, it is {old[k]}")
        place = coordinates(coordinate_transformation_mode, old[k], targets[k], factors[k], region)
        if mode == "nearest":
            x = _nearest(x, axis, place, old[k], nearest_mode)
        else:
            matrix = weights(mode, place, old[k], factors[k], cubic_coeff_a, exclude_outside, antialias)
            x = _product(x, axis, matrix)
        if coordinate_transformation_mode == "tf_crop_and_resize":
            x = _extrapolated(x, axis, (place >= 0) & (place <= old[k] - 1), extrapolation_value)
    return x


@operator(name="Resize", since=10)
def _Resize10(x, scales: Known, *, mode="nearest"):
    return Resize(x, scales=scales, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")


operator(_Resize10, name="Upsample", since=7)


def _targets(old, scales, sizes, policy):
    """Return the new sizes and the factors."""
    if (scales is None) == (sizes is None):
        raise OperationError("Resize requires either scales or sizes")
    if scales is not None:
        factors = [float(s) for s in scales]
        if len(factors) != len(old) or any(not 0 < f < 1e6 for f in factors):
            raise OperationError(f"Resize has the scales {factors}")
        return [n if f == 1.0 else int(np.floor(n * f)) for n, f in zip(old, factors, strict=True)], factors
    new = [int(n) for n in sizes]
    if policy != "stretch":
        ratios = [n / o for n, o in zip(new, old, strict=True)]
        ratio = min(ratios) if policy == "not_larger" else max(ratios)
        return [int(np.floor(ratio * o + 0.5)) for o in old], [ratio] * len(old)
    return new, [1.0 if type(o) is not int else n / o for n, o in zip(new, old, strict=True)]


def coordinates(mode, old, new, factor, region):
    """Return the position in the old axis of each element of the new one."""
    x = np.arange(new, dtype=np.float64)
    length = old * factor
    if mode == "half_pixel":
        return (x + 0.5) / factor - 0.5
    if mode == "pytorch_half_pixel":
        return (x + 0.5) / factor - 0.5 if length > 1 else np.full(new, -0.5)
    if mode == "half_pixel_symmetric":
        return old / 2 * (1 - new / length) + (x + 0.5) / factor - 0.5
    if mode == "align_corners":
        return x * (old - 1) / (length - 1) if length != 1 else np.zeros(new)
    if mode == "asymmetric":
        return x / factor
    if mode == "tf_crop_and_resize" and region is not None:
        start, end = region
        if length > 1:
            return start * (old - 1) + x * (end - start) * (old - 1) / (length - 1)
        return np.full(new, 0.5 * (start + end) * (old - 1))
    raise OperationError(f"Resize has the coordinate_transformation_mode '{mode}'")


def _nearest(x, axis, place, old, mode):
    if mode == "round_prefer_floor":
        index = np.ceil(place - 0.5)
    elif mode == "round_prefer_ceil":
        index = np.floor(place + 0.5)
    else:
        index = np.floor(place) if mode == "floor" else np.ceil(place)
    return ops.take(x, np.clip(index, 0, old - 1).astype(np.int64), axis=axis)


def _cubic(d, a):
    d = np.abs(d)
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, inner, np.where(d < 2, far, 0.0))


def weights(mode, place, old, factor, a, exclude_outside, antialias):
    """Return the matrix [new, old] of an interpolation."""
    stretch = min(factor, 1.0) if antialias else 1.0
    reach = (1 if mode == "linear" else 2) / stretch
    first = np.floor(place - reach).astype(int) + 1
    count = int(np.ceil(2 * reach)) + 1
    index = first[:, None] + np.arange(count)
    distance = (index - place[:, None]) * stretch
    w = np.maximum(1 - np.abs(distance), 0) if mode == "linear" else _cubic(distance, a)
    if exclude_outside:
        w = np.where((index < 0) | (index >= old), 0, w)
    total = w.sum(1, keepdims=True)
    if exclude_outside or antialias:
        w = w / np.where(total == 0, 1, total)
    matrix = np.zeros((len(place), old))
    np.add.at(matrix, (np.arange(len(place))[:, None], np.clip(index, 0, old - 1)), w)
    return matrix


def _product(x, axis, matrix):
    kind = x.dtype
    work = x if kind.is_float and kind.bits >= 32 else ops.cast(x, dtype="float32")
    order = (*(k for k in range(x.ndim) if k != axis), axis)
    y = ops.matmul(ops.transpose(work, perm=order), matrix.T.astype(work.dtype.numpy))
    y = ops.transpose(y, perm=tuple(order.index(k) for k in range(x.ndim)))
    if kind.is_integer:
        low, high = kind.limits
        y = ops.clip(ops.round(y), low=float(low), high=float(high))
    return ops.cast(y, dtype=kind)


def _extrapolated(x, axis, in_bounds, value):
    if in_bounds.all():
        return x
    mask = in_bounds.reshape([-1 if k == axis else 1 for k in range(x.ndim)])
    return ops.where(mask, x, ops.full(shape=(), value=value, dtype=x.dtype))
