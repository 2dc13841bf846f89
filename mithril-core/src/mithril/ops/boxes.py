"""Boxes x1, y1, x2, y2: overlaps, and the selection of boxes that do not overlap a better one."""

from __future__ import annotations

from typing import Any

from mithril.graph import ShapeError, assume, composite, exactly, sample, shape_text
from mithril.ops.basic import cast, downcast, upcast
from mithril.ops.control_flow import scan
from mithril.ops.counting import nonzero
from mithril.ops.creation import full, iota
from mithril.ops.elementwise import equal, greater, less, logical_and, logical_not, maximum, minimum, where
from mithril.ops.indexing import take
from mithril.ops.reduction import any as any_
from mithril.ops.shape import reshape, transpose, unsqueeze
from mithril.ops.slicing import narrow
from mithril.ops.sorting import argsort

BOXES = exactly(*(0.0, 0.0, 2.0, 2.0, 0.5, 0.0, 2.5, 2.25, 4.0, 4.0, 6.0, 5.0, 0.1, 0.2, 2.0, 2.0), shape=(4, 4))
OTHERS = exactly(*(1.0, 1.0, 3.0, 3.5, 4.5, 3.0, 5.0, 4.5), shape=(2, 4))


def _expect_boxes(op: str, boxes: Any) -> None:
    if len(boxes) != 2 or boxes[1] != 4:
        raise ShapeError(f"{op} requires boxes [count, 4] of x1, y1, x2, y2, got {shape_text(boxes)}")


@composite(promotes="float", samples=[sample(BOXES, OTHERS)])
def box_iou(a, b):
    """The overlap of each pair of boxes [n, 4] and [m, 4]: intersection over union [n, m], 0 for empty boxes."""
    _expect_boxes("box_iou", a.shape)
    _expect_boxes("box_iou", b.shape)
    left, right = upcast(a), transpose(upcast(b), perm=(1, 0))
    columns = [narrow(left, 1, k, k + 1) for k in range(4)]
    rows = [narrow(right, 0, k, k + 1) for k in range(4)]
    width = maximum(minimum(columns[2], rows[2]) - maximum(columns[0], rows[0]), 0.0)
    height = maximum(minimum(columns[3], rows[3]) - maximum(columns[1], rows[1]), 0.0)
    shared = width * height
    areas = [(x[2] - x[0]) * (x[3] - x[1]) for x in (columns, rows)]
    union = areas[0] + areas[1] - shared
    is_empty = equal(union, 0.0)
    return downcast(where(is_empty, 0.0, shared / where(is_empty, 1.0, union)), a)


@composite(
    results=("indices", "count"),
    promotes="float",
    promoted=("boxes", "scores"),
    samples=[
        sample(BOXES, exactly(0.5, 0.9, 0.3, 0.8), size=3),
        sample(BOXES, exactly(0.5, 0.9, 0.3, 0.8), exactly(0, 1, 0, 0, dtype="int32"), size=4, iou_threshold=0.7,
               score_threshold=0.4, label="classes"),
    ],
)  # fmt: skip
def nms(boxes, scores, classes=None, *, size: int, iou_threshold: float = 0.5, score_threshold: float | None = None):
    """The ``size`` best boxes (int32, best first, -1 beyond them) that overlap no better one, and their number.

    A box [count, 4] is left out if its intersection over union with a selected box is greater than ``iou_threshold``;
    with ``classes`` [count], only boxes of equal class compete.
    """
    _expect_boxes("nms", boxes.shape)
    for name, x in (("scores", scores), ("classes", classes)):
        if x is not None and (len(x.shape) != 1 or not assume(x.shape[0], "==", boxes.shape[0], f"'{name}' of 'nms'")):
            raise ShapeError(f"nms requires {name} {shape_text(boxes.shape[:1])}, got {shape_text(x.shape)}")
    if size < 1:
        raise ShapeError(f"nms: size={size} must be at least 1")
    count = boxes.shape[0]
    order = argsort(scores, descending=True)
    ordered = take(boxes, order)
    competes = greater(box_iou(ordered, ordered), iou_threshold)
    if classes is not None:
        group = take(classes, order)
        competes = logical_and(competes, equal(unsqueeze(group, axis=(0,)), unsqueeze(group, axis=(1,))))
    place = iota(shape=(count,), dtype="int32")
    candidates = full(shape=(count,), value=True, dtype="bool")
    if score_threshold is not None:
        candidates = greater(take(scores, order), score_threshold)

    def step(selected: Any, element: Any) -> tuple[Any, None]:
        row, number = element
        is_selected = any_(logical_and(selected, equal(place, number)))
        worse = logical_and(row, less(number, place))
        return logical_and(selected, logical_not(logical_and(worse, is_selected))), None

    selected, _ = scan(step, candidates, (competes, place))
    positions, number = nonzero(selected, size=size)
    positions = reshape(positions, shape=(size,))
    indices = where(less(positions, 0), -1, take(order, maximum(positions, 0)))
    return cast(indices, dtype="int32"), number


nms.no_vjp("positions have no derivative")

__all__ = ["box_iou", "nms"]
