"""NonZero and NonMaxSuppression: of known operands, or with a bound on the rows of the result."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril_onnx.operators.common import int64
from mithril_onnx.table import Item, Known, operator
from mithril_onnx.values import as_value


@operator(folds=False)
def NonZero(x: Item, *, context):
    size = context.bound
    if size is None:
        x = context.known(x, "the operand")
        return np.stack(np.nonzero(x)).astype(np.int64) if x.ndim else np.zeros((1 if x else 0, 0), np.int64)
    x = as_value(x)
    positions, _ = ops.nonzero(x, size=size)
    mask = x if x.dtype.is_bool else ops.not_equal(x, 0)
    number = ops.sum(ops.cast(mask, dtype="int32"))
    return context.bounded(ops.transpose(int64(positions), perm=(1, 0)), 1, number)


@operator(folds=False)
def NonMaxSuppression(
    boxes: Item,
    scores: Item,
    max_output_boxes_per_class: Known = None,
    iou_threshold: Known = None,
    score_threshold: Known = None,
    *,
    center_point_box=0,
    context,
):
    limit = 0 if max_output_boxes_per_class is None else int(np.ravel(max_output_boxes_per_class)[0])
    overlap = 0.0 if iou_threshold is None else float(np.ravel(iou_threshold)[0])
    lowest = -np.inf if score_threshold is None else float(np.ravel(score_threshold)[0])
    if context.bound is not None:
        corners = _corner_values(as_value(boxes), center_point_box)
        return _selected(context, corners, as_value(scores), limit, overlap, lowest)
    boxes, scores = context.known(boxes, "the boxes"), context.known(scores, "the scores")
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


# -- with a bound -------------------------------------------------------------------------------------------------
def _corner_values(boxes, center):
    """Return the least and largest coordinates, two values [batch, boxes, 2]."""
    first, second = boxes[:, :, :2], boxes[:, :, 2:]
    if center:
        return first - second * 0.5, first + second * 0.5
    return ops.minimum(first, second), ops.maximum(first, second)


def _selected(context, corners, scores, limit, overlap, lowest):
    """Select the best box of each class, step by step; boxes that overlap it leave the competition."""
    low, high = corners
    batch, classes, count = scores.shape
    limit = min(limit, count)
    if limit <= 0:  # the default of the operator
        rows = ops.full(shape=(context.bound, 3), value=-1, dtype="int32")
        return context.bounded(int64(rows), 0, ops.full(shape=(), value=0, dtype="int32"))
    area = ops.prod(high - low, axis=2)
    place = ops.iota(shape=(1, 1, count), axis=2, dtype="int32")

    def step(remaining, _):
        best = ops.cast(ops.argmax(remaining, axis=2), dtype="int32")
        valid = ops.greater(ops.max(remaining, axis=2), lowest)
        index = ops.unsqueeze(best, axis=(2,))
        a, b = (ops.unsqueeze(ops.gather_nd(c, index, batch_dims=1), axis=(2,)) for c in (low, high))
        best_area = ops.unsqueeze(ops.gather_nd(area, index, batch_dims=1), axis=(2,))
        sizes = ops.minimum(b, ops.unsqueeze(high, axis=(1,))) - ops.maximum(a, ops.unsqueeze(low, axis=(1,)))
        common = ops.prod(ops.maximum(sizes, 0.0), axis=3)
        union = best_area + ops.unsqueeze(area, axis=(1,)) - common
        leaves = ops.greater(
            ops.where(ops.greater(union, 0.0), common / ops.where(ops.greater(union, 0.0), union, 1.0), 0.0), overlap
        )
        leaves = ops.logical_or(leaves, ops.equal(place, index))
        return ops.where(leaves, float("-inf"), remaining), (best, valid)

    _, (best, valid) = ops.scan(step, scores, None, length=limit)
    shape = (batch * classes * limit,)
    best, valid = (ops.reshape(ops.transpose(v, perm=(1, 2, 0)), shape=shape) for v in (best, valid))
    positions, _ = ops.nonzero(valid, size=context.bound)
    positions = ops.reshape(positions, shape=(context.bound,))
    is_row = ops.unsqueeze(ops.greater_equal(positions, 0), axis=(1,))
    position = ops.maximum(positions, 0)
    group = ops.floordiv(position, limit)
    columns = (ops.floordiv(group, classes), ops.mod(group, classes), ops.take(best, position))
    rows = ops.where(is_row, ops.stack(*columns, axis=1), -1)
    return context.bounded(int64(rows), 0, ops.sum(ops.cast(valid, dtype="int32")))
