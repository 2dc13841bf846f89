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


@operator(folds=False)
def NonZero(x: Known):
    return np.stack(np.nonzero(x)).astype(np.int64) if x.ndim else np.zeros((1 if x else 0, 0), np.int64)


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


@operator(folds=False)
def NonMaxSuppression(
    boxes: Known,
    scores: Known,
    max_output_boxes_per_class: Known = None,
    iou_threshold: Known = None,
    score_threshold: Known = None,
    *,
    center_point_box=0,
):
    limit = 0 if max_output_boxes_per_class is None else int(np.ravel(max_output_boxes_per_class)[0])
    overlap = 0.0 if iou_threshold is None else float(np.ravel(iou_threshold)[0])
    lowest = -np.inf if score_threshold is None else float(np.ravel(score_threshold)[0])
    rows = []
    for batch, classes in enumerate(scores):
        corners = _corners(boxes[batch], center_point_box)
        for kind, row in enumerate(classes):
            selected: list[int] = []
            for k in np.argsort(-row, kind="stable"):
                if len(selected) >= limit or row[k] <= lowest:
                    break
                if all(_overlap(corners[k], corners[other]) <= overlap for other in selected):
                    selected.append(int(k))
            rows += [(batch, kind, k) for k in selected]
    return np.asarray(rows, np.int64).reshape(-1, 3)


def _corners(boxes, center):
    if center:
        x, y, w, h = boxes.T
        return np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    a, b = boxes[:, :2], boxes[:, 2:]
    return np.concatenate([np.minimum(a, b), np.maximum(a, b)], -1)


def _overlap(a, b):
    size = np.maximum(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0)
    common = size[0] * size[1]
    union = np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - common
    return common / union if union > 0 else 0.0


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
