"""Resize and Upsample: one matrix of weights per axis, made by NumPy; nearest neighbors are positions.

On an axis of open size, the rows of that matrix repeat: each result is a sum of shifted operands.
"""

from __future__ import annotations

import functools

import numpy as np

from mithril import ops
from mithril.graph import OperationError, UnsupportedError, equal
from mithril_onnx.operators.common import axes_of
from mithril_onnx.table import Known, Sizes, operator

OF_ANY_SIZE = ("half_pixel", "asymmetric")  # coordinates that do not depend on the size of an axis
WHOLE = (*OF_ANY_SIZE, "pytorch_half_pixel", "half_pixel_symmetric")  # equal to half_pixel for whole factors
SAMPLE = 64  # size of an axis from whose middle the weights of an open axis are taken


@operator(since=11)
def Resize(
    x, roi: Known = None, scales: Known = None, sizes: Sizes = None, *,
    antialias=0, axes=None, coordinate_transformation_mode="half_pixel", cubic_coeff_a=-0.75, exclude_outside=0,
    extrapolation_value=0.0, keep_aspect_ratio_policy="stretch", mode="nearest", nearest_mode="round_prefer_floor",
):  # fmt: skip
    selected = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    if scales is not None and scales.size == 0:
        scales = None
    if not sizes:
        sizes = None
    old = [x.shape[a] for a in selected]
    targets, factors = _targets(old, scales, sizes, keep_aspect_ratio_policy)
    regions = np.asarray(roi, np.float64) if roi is not None and np.size(roi) else None
    for k, axis in enumerate(selected):
        region = None if regions is None else (regions[k], regions[k + len(selected)])
        if targets[k] == old[k] and factors[k] == 1.0 and coordinate_transformation_mode != "tf_crop_and_resize":
            continue
        if type(old[k]) is not int:
            x = _open(x, axis, targets[k], factors[k], coordinate_transformation_mode, mode, nearest_mode,
                      (cubic_coeff_a, exclude_outside, antialias))  # fmt: skip
            continue
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
    # Versions before 11 divide positions by the factor.
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
        return [_scaled(n, f) for n, f in zip(old, factors, strict=True)], factors
    new = list(sizes)
    if policy != "stretch":
        if any(type(n) is not int for n in (*new, *old)):
            raise _open_size("keep_aspect_ratio_policy", next(n for n in (*new, *old) if type(n) is not int))
        ratios = [n / o for n, o in zip(new, old, strict=True)]
        ratio = min(ratios) if policy == "not_larger" else max(ratios)
        return [int(np.floor(ratio * o + 0.5)) for o in old], [ratio] * len(old)
    return new, [_factor(n, o) for n, o in zip(new, old, strict=True)]


def _scaled(size, factor):
    """Return the new size of an axis; an open size has a whole factor, or is divided by one."""
    if factor == 1.0:
        return size
    if type(size) is int:
        return int(np.floor(size * factor))
    if factor == round(factor):
        return size * int(factor)
    if 1 / factor == round(1 / factor):
        return size // round(1 / factor)
    raise _open_size(f"the factor {factor:g}", size)


def _factor(new, old):
    """Return the factor between two sizes, of which open ones are related by a whole number."""
    if type(new) is int and type(old) is int:
        return new / old
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32):
        if equal(new, old * n):
            return float(n)
        if equal(old, new * n):
            return 1 / n
    raise _open_size(f"the size {new}", old)


def _open_size(description, size):
    return UnsupportedError(
        f"Resize with {description} requires a static size, but it is {size}",
        facts=["supported for open sizes: whole factors, and halves, thirds, ..., of coordinates without the size"],
        hint="fix the sizes: ml.compile(model, shapes={'INPUT': [...]})",
    )


def _open(x, axis, new, factor, coordinate_mode, mode, nearest_mode, settings):
    """Resize an axis of open size: the weights around each element are those in the middle of a sample."""
    if coordinate_mode not in (OF_ANY_SIZE if factor < 1 else WHOLE):
        raise _open_size(f"the coordinates '{coordinate_mode}'", x.shape[axis])
    phases, stride = (round(factor), 1) if factor > 1 else (1, round(1 / factor))
    place = coordinates(coordinate_mode, SAMPLE, round(SAMPLE * factor), factor, None)
    first = SAMPLE // 2 // stride * phases
    if mode == "nearest":
        rows = np.eye(SAMPLE)[_index(place, SAMPLE, nearest_mode)]
    else:
        rows = weights(mode, place, SAMPLE, factor, *settings)
        # Rows at the edges would have other weights than those in the middle.
        if settings[1]:
            raise _open_size("exclude_outside", x.shape[axis])
    base = first // phases * stride
    shifts = [{int(c) - base: float(row[c]) for c in np.flatnonzero(row)} for row in rows[first : first + phases]]
    if all(shift == {0: 1.0} for shift in shifts):
        return ops.repeat(x, repeats=phases, axis=axis) if stride == 1 else _shifted(x, axis, 0, new, stride)
    kind = x.dtype
    reach = [min(0, *map(min, shifts)), max(0, *map(max, shifts))]
    widths = [(0, 0)] * x.ndim
    widths[axis] = (-reach[0], reach[1])
    padded = ops.pad(x if mode == "nearest" else _float(x), widths=tuple(widths), mode="edge")
    parts, count = [], new if stride > 1 else x.shape[axis]
    for shift in shifts:
        pieces = {o: _shifted(padded, axis, o - reach[0], count, stride) for o in shift}
        terms = [piece if shift[o] == 1.0 else piece * shift[o] for o, piece in pieces.items()]
        parts.append(functools.reduce(ops.add, terms))
    y = parts[0] if phases == 1 else ops.reshape(
        ops.stack(*parts, axis=axis + 1), shape=(*x.shape[:axis], new, *x.shape[axis + 1 :])
    )  # fmt: skip
    return _rounded(y, kind)


def _shifted(x, axis, start, count, stride):
    """Return ``count`` elements of an axis from ``start``, each ``stride`` behind the last one."""
    return ops.slice(x, starts=(start,), stops=(start + (count - 1) * stride + 1,), steps=(stride,), axes=(axis,))


def coordinates(mode, old, new, factor, region):
    """Return the position in the old axis of each element of the new one."""
    x = np.arange(new, dtype=np.float64)
    length = old * factor
    if mode == "half_pixel":
        return (x + 0.5) / factor - 0.5
    if mode == "pytorch_half_pixel":
        # The text of the standard has 0 for a length of 1, its reference implementation -0.5.
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
    return ops.take(x, _index(place, old, mode), axis=axis)


def _index(place, old, mode):
    """Return the nearest element of each position."""
    if mode == "round_prefer_floor":
        index = np.ceil(place - 0.5)
    elif mode == "round_prefer_ceil":
        index = np.floor(place + 0.5)
    else:
        index = np.floor(place) if mode == "floor" else np.ceil(place)
    return np.clip(index, 0, old - 1).astype(np.int64)


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
    # Elements outside of the axis are those at its edge, whose weights add up.
    np.add.at(matrix, (np.arange(len(place))[:, None], np.clip(index, 0, old - 1)), w)
    return matrix


def _product(x, axis, matrix):
    kind = x.dtype
    work = _float(x)
    order = (*(k for k in range(x.ndim) if k != axis), axis)
    y = ops.matmul(ops.transpose(work, perm=order), matrix.T.astype(work.dtype.numpy))
    y = ops.transpose(y, perm=tuple(order.index(k) for k in range(x.ndim)))
    return _rounded(y, kind)


def _float(x):
    return x if x.dtype.is_float and x.dtype.bits >= 32 else ops.cast(x, dtype="float32")


def _rounded(y, kind):
    """Return interpolated numbers in the dtype of the operand."""
    if kind.is_integer and y.dtype is not kind:
        low, high = kind.limits
        y = ops.clip(ops.round(y), low=float(low), high=float(high))
    return ops.cast(y, dtype=kind)


def _extrapolated(x, axis, in_bounds, value):
    if in_bounds.all():
        return x
    mask = in_bounds.reshape([-1 if k == axis else 1 for k in range(x.ndim)])
    return ops.where(mask, x, ops.full(shape=(), value=value, dtype=x.dtype))
