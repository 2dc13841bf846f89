"""Sequences and optional values: Python lists and None in the environment of the import."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.graph import OperationError
from mithril_onnx.table import Item, Known, operator
from mithril_onnx.values import as_value


def _list(x):
    if not isinstance(x, list):
        raise OperationError("the operand is a tensor, expected a sequence")
    return x


def _place(position, length, last):
    k = int(np.asarray(position).reshape(-1)[0])
    if not -length <= k < length + last:
        raise OperationError(f"position {k} is outside of a sequence of {length}")
    return k + length if k < 0 else k


@operator(folds=False)
def SequenceConstruct(*xs: Item):
    return list(xs)


@operator(folds=False)
def SequenceEmpty(*, dtype=1):
    return []


@operator(folds=False)
def SequenceAt(x: Item, position: Known):
    return _list(x)[_place(position, len(_list(x)), 0)]


@operator(folds=False)
def SequenceInsert(x: Item, item: Item, position: Known = None):
    items = list(_list(x))
    items.insert(len(items) if position is None else _place(position, len(items), 1), item)
    return items


@operator(folds=False)
def SequenceErase(x: Item, position: Known = None):
    items = list(_list(x))
    del items[-1 if position is None else _place(position, len(items), 0)]
    return items


@operator(folds=False)
def SequenceLength(x: Item):
    return np.asarray(len(_list(x)), np.int64)


@operator(folds=False)
def ConcatFromSequence(x: Item, *, axis, new_axis=0):
    values = [as_value(v) for v in _list(x)]
    return ops.stack(*values, axis=axis) if new_axis else ops.concat(*values, axis=axis)


@operator(folds=False)
def SplitToSequence(x: Item, split: Known = None, *, axis=0, keepdims=1):
    x = as_value(x)
    axis = axis % x.ndim
    size = x.shape[axis]
    if split is None or split.ndim == 0:
        if type(size) is not int:
            raise OperationError(f"SplitToSequence requires a static size or known sizes, axis {axis} is {size}")
        step = 1 if split is None else int(split)
        if step < 1:
            raise OperationError(f"SplitToSequence by {step}")
        sizes = [min(step, size - k) for k in range(0, size, step)]
    else:
        sizes = [int(n) for n in split]
        if type(size) is not int:  # known sizes fix it
            x = ops.reshape(x, shape=(*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :]))
    parts = list(ops.split(x, sizes=tuple(sizes), axis=axis))
    return parts if keepdims or split is not None else [ops.squeeze(p, axis=(axis,)) for p in parts]


@operator(folds=False)
def SequenceMap(x: Item, *more: Item, body):
    count = len(_list(x))
    rows = []
    for k in range(count):
        rows.append(body(x[k], *[m[k] if isinstance(m, list) else m for m in more]))
    return tuple([row[j] for row in rows] for j in range(body.results))


@operator(folds=False)
def Optional(x: Item = None, *, type=None):
    return x


@operator(folds=False)
def OptionalHasElement(x: Item = None):
    return np.asarray(x is not None)


@operator(folds=False)
def OptionalGetElement(x: Item = None):
    if x is None:
        raise OperationError("OptionalGetElement of nothing")
    return x
