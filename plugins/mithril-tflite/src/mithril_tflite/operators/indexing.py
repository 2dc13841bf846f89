"""Gathering, scattering and one-hot rows."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.graph import normalize_axis
from mithril_tflite.operators.elementwise import number
from mithril_tflite.operators.reduction import only
from mithril_tflite.table import Known, Sizes, Stored, Weight, operator


@operator(moves=True)
def GATHER(x: Weight, indices: Stored, *, axis, batch_dims):
    axis = normalize_axis(axis, x.ndim)
    if not batch_dims:
        return ops.take(x, indices, axis=axis)
    b = batch_dims % indices.ndim if batch_dims < 0 else batch_dims
    x = ops.transpose(x, perm=(*range(b), axis, *(k for k in range(b, x.ndim) if k != axis)))
    y = ops.gather_nd(x, ops.unsqueeze(indices, axis=(-1,)), batch_dims=b)
    inner = indices.ndim - b  # axes of positions come after those in front of the axis
    before = axis - b
    order = (*range(b), *range(b + inner, b + inner + before), *range(b, b + inner), *range(b + inner + before, y.ndim))
    return ops.transpose(y, perm=order)


@operator(moves=True)
def GATHER_ND(x: Weight, indices: Stored):
    return ops.gather_nd(x, indices)


@operator
def SCATTER_ND(indices: Stored, updates, shape: Sizes):
    # Updates of one position add up.
    return ops.scatter_nd_add(ops.zeros(shape=shape, dtype=updates.dtype), indices, updates)


@operator
def ONE_HOT(indices: Stored, depth: Known, on, off, *, axis):
    count, rank = only(depth), indices.ndim + 1
    axis = axis % rank
    levels = ops.iota(shape=tuple(count if k == axis else 1 for k in range(rank)), axis=axis, dtype=indices.dtype)
    return ops.where(ops.equal(ops.unsqueeze(indices, axis=(axis,)), levels), on, off)


@operator(moves=True)
def DYNAMIC_UPDATE_SLICE(x, update, starts: Stored):
    return ops.dynamic_update_slice(x, update, starts)


@operator
def WHERE(condition: Known):
    return np.argwhere(condition).astype(np.int64)


@operator(moves=True)
def REVERSE_SEQUENCE(x, lengths: Stored, *, seq_dim, batch_dim):
    shape = [1] * x.ndim
    shape[batch_dim] = -1
    lengths = ops.reshape(lengths, shape=tuple(shape))
    place = ops.iota(shape=tuple(x.shape), axis=seq_dim, dtype=lengths.dtype)
    mirrored = lengths - number(1, lengths) - place
    return ops.take_along_axis(x, ops.where(ops.less(place, lengths), mirrored, place), axis=seq_dim)


def _segments(name, reduction, start):
    def compute(x, segments: Stored, count: Known):
        kind = x.dtype
        initial = start(kind)
        total = ops.full(shape=(only(count), *x.shape[segments.ndim :]), value=initial, dtype=kind)
        return ops.scatter_nd_reduce(total, ops.unsqueeze(segments, axis=(-1,)), x, reduction=reduction)

    operator(compute, name=name)


_segments("UNSORTED_SEGMENT_SUM", "add", lambda kind: 0)
_segments("UNSORTED_SEGMENT_PROD", "mul", lambda kind: 1)
_segments(
    "UNSORTED_SEGMENT_MAX", "max", lambda kind: np.finfo(kind.numpy).min.item() if kind.is_float else kind.limits[0]
)
_segments(
    "UNSORTED_SEGMENT_MIN", "min", lambda kind: np.finfo(kind.numpy).max.item() if kind.is_float else kind.limits[1]
)
