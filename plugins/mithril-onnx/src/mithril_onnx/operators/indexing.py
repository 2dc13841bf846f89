"""Gather, scatter, one-hot, and operators whose results depend on data, for known operands."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril_onnx.operators.common import int64, like, scalar
from mithril_onnx.table import Item, Known, Weight, operator


@operator
def Gather(x: Weight, indices, *, axis=0):
    return ops.take(x, indices, axis=axis)


@operator
def GatherElements(x, indices, *, axis=0):
    axis = axis % x.ndim
    for k in range(x.ndim):  # other axes of the positions may be shorter
        if k != axis and x.shape[k] != indices.shape[k]:
            x = ops.slice(x, starts=(0,), stops=(indices.shape[k],), steps=(1,), axes=(k,))
    return ops.take_along_axis(x, indices, axis=axis)


@operator
def GatherND(x, indices, *, batch_dims=0):
    return ops.gather_nd(x, indices, batch_dims=batch_dims)


@operator
def ScatterND(x, indices, updates, *, reduction="none"):
    if reduction == "none":
        return ops.scatter_nd(x, indices, updates)
    return ops.scatter_nd_reduce(x, indices, updates, reduction=reduction)


@operator(name="ScatterElements")
def ScatterElements(x, indices, updates, *, axis=0, reduction="none"):
    axis = axis % x.ndim
    index = _element_positions(x, indices, axis)
    return ScatterND(x, index, updates, reduction=reduction)


operator(ScatterElements, name="Scatter")


def _element_positions(x, indices, axis):
    """Return the position of each update in all axes of x."""
    parts = [
        indices if k == axis else ops.iota(shape=indices.shape, axis=k, dtype=indices.dtype) for k in range(x.ndim)
    ]
    return ops.stack(*parts, axis=-1)


@operator
def OneHot(indices, depth: Known, values, *, axis=-1):
    count = int(np.asarray(depth).reshape(-1)[0])
    rank = indices.ndim + 1
    axis = axis % rank
    place = ops.unsqueeze(indices, axis=(axis,))
    if not place.dtype.is_integer:
        place = int64(place)
    place = ops.where(ops.less(place, scalar(0, place)), place + scalar(count, place), place)
    levels = ops.iota(shape=tuple(count if k == axis else 1 for k in range(rank)), axis=axis, dtype=place.dtype)
    off, on = (ops.select(values, index=(k,), axes=(0,)) for k in (0, 1))
    return ops.where(ops.equal(place, levels), on, off)


@operator
def Compress(x, condition: Known, *, axis=None):
    positions = np.flatnonzero(np.asarray(condition)).astype(np.int64)
    if axis is None:
        x = ops.reshape(x, shape=(-1,))
    return ops.take(x, positions, axis=axis or 0)


@operator(folds=False)
def Unique(x: Known, *, axis=None, sorted=1):
    values, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        values = np.take(values, order, axis=axis or 0)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        first, counts, inverse = first[order], counts[order], back[inverse]
    return values, *(v.astype(np.int64) for v in (first, inverse, counts))


@operator
def TensorScatter(past, update, write_indices=None, *, axis=-2, mode="linear"):
    axis = axis % past.ndim
    length, count = past.shape[axis], update.shape[axis]
    batch = past.shape[0]
    start = ops.full(shape=(batch,), value=0, dtype="int64") if write_indices is None else int64(write_indices)
    place = ops.unsqueeze(start, axis=(1,)) + ops.iota(shape=(1, count), axis=1, dtype="int64")
    if mode == "circular":
        place = ops.mod(place, scalar(length, place))
    shape = tuple(n if k in (0, axis) else 1 for k, n in enumerate(update.shape))
    positions = ops.broadcast_to(ops.reshape(place, shape=shape), shape=update.shape)
    return ops.scatter_along_axis(past, positions, update, axis=axis)


_ = (Item, like)
