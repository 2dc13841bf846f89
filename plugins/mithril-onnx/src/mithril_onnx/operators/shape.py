"""Shapes: reshape, transpose, slices, concatenation, padding, and constants."""

from __future__ import annotations

import math

import numpy as np

from mithril import ops
from mithril.graph import Dim, OperationError, Value, equal, floordiv, is_static, normalize_axis, product
from mithril_importing.arrays import is_sizes, sizes_array
from mithril_importing.folding import check_constant
from mithril_onnx.operators.common import axes_of, require, scalar
from mithril_onnx.table import Item, Known, Sizes, operator
from mithril_onnx.tensors import dtype_of_code
from mithril_onnx.values import NotConstantError


@operator(folds=False)
def Constant(*, value=None, value_float=None, value_floats=None, value_int=None, value_ints=None, sparse_value=None):
    for item, dtype in (
        (value, None), (sparse_value, None), (value_float, np.float32), (value_floats, np.float32),
        (value_int, np.int64), (value_ints, np.int64),
    ):  # fmt: skip
        if item is not None:
            return np.asarray(item, dtype)
    raise OperationError("a Constant has no value")


@operator(folds=False)
def Shape(x: Item, *, start=0, end=None):
    rank = len(x.shape)
    return sizes_array(tuple(x.shape)[slice(*slice(start, end).indices(rank))])


@operator(folds=False)
def Size(x: Item):
    return sizes_array(product(x.shape))


@operator
def Reshape(x, shape: Sizes, *, allowzero=0):
    target = tuple(x.shape[k] if type(n) is int and n == 0 and not allowzero else n for k, n in enumerate(shape))
    unknown = [k for k, n in enumerate(target) if type(n) is int and n == -1]
    if len(unknown) == 1:
        target = _inferred(tuple(x.shape), target, unknown[0])
    return ops.reshape(x, shape=target)


def _inferred(old, target, k):
    """Replace the -1, also where the other sizes are 0 or symbolic."""
    left, right = list(old), [n for i, n in enumerate(target) if i != k]
    for n in list(right):
        if isinstance(n, Dim) and n in left:
            left.remove(n)
            right.remove(n)
    rest = product(right)
    if type(rest) is int and rest == 0:
        return tuple(0 if i == k else n for i, n in enumerate(target))
    total = product(left)
    if type(total) is int and type(rest) is int and total % rest:
        return target  # reshape reports the mistake
    return tuple(floordiv(total, rest) if i == k else n for i, n in enumerate(target))


@operator
def Flatten(x, *, axis=1):
    axis = axis + x.ndim if axis < 0 else axis
    return ops.reshape(x, shape=(product(x.shape[:axis]), product(x.shape[axis:])))


@operator
def Squeeze(x, axes: Sizes = None):
    if axes is not None:
        return ops.squeeze(x, axis=tuple(axes))
    for axis, d in enumerate(x.shape):
        if type(d) is not int:
            require(2, "<=", d, f"Squeeze without axes keeps axis {axis}, whose size is open; "
                    "fix a size of 1: ml.compile(model, shapes={...})")  # fmt: skip
    return ops.squeeze(x)


@operator
def Unsqueeze(x, axes: Sizes):
    return ops.unsqueeze(x, axis=tuple(axes))


@operator
def Transpose(x, *, perm=None):
    return ops.transpose(x, perm=perm)


@operator
def Expand(x, shape: Sizes):
    lead = len(shape) - x.ndim
    sizes = (1,) * max(lead, 0) + tuple(x.shape)
    full_shape = (1,) * max(-lead, 0) + tuple(shape)
    target = tuple(n if type(m) is int and m == 1 else m for n, m in zip(sizes, full_shape, strict=True))
    return ops.broadcast_to(x, shape=target)


@operator
def Concat(*xs, axis=1):
    return ops.concat(*xs, axis=axis) if len(xs) > 1 else xs[0]


@operator
def Split(x, split: Sizes = None, *, axis=0, num_outputs=None, context):
    axis = normalize_axis(axis, x.ndim)
    sizes = split
    if sizes is None:
        count = num_outputs or len(context.node.output)
        n = x.shape[axis]
        part = -(-n // count) if type(n) is int else floordiv(n, count)
        last = n - part * (count - 1)
        sizes = (part,) * (count - 1) + (last,)
    results = ops.split(x, sizes=tuple(sizes), axis=axis)
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


@operator
def Slice(x, starts: Item, ends: Item, axes: Sizes = None, steps: Sizes = None, *, context):
    if (computed := _slice_at_computed_place(x, starts, ends, axes, steps, context)) is not None:
        return computed
    starts, ends = context.importer.sizes(starts), context.importer.sizes(ends)
    axes = tuple(range(len(starts))) if axes is None else tuple(axes)
    steps = (1,) * len(starts) if steps is None else tuple(steps)
    begins, stops = [], []
    for start, end, step, axis in zip(starts, ends, steps, axes, strict=True):
        size = x.shape[normalize_axis(axis, x.ndim)]
        begins.append(_position(start, size, step))
        stops.append(_position(end, size, step))
    return ops.slice(x, starts=tuple(begins), stops=tuple(stops), steps=steps, axes=axes)


def _slice_at_computed_place(x, starts, ends, axes, steps, context):
    """Return the slice that the export writes for ``dynamic_slice``, whose starts are in bounds; None for others."""
    producer, elements = context.importer.knowledge.producer, context.importer.sizes
    end = producer(ends)
    if end is None or end.op is not ops.add or end.operands[0] is not starts or axes != tuple(range(x.ndim)) or steps:
        return None
    start, sizes = producer(starts), elements(end.operands[1])
    if start is None or start.op is not ops.minimum or (place := producer(start.operands[0])) is None:
        return None
    limit = tuple(n - size for n, size in zip(x.shape, sizes, strict=True))
    if place.op is not ops.maximum or set(elements(place.operands[1])) != {0} or elements(start.operands[1]) != limit:
        return None
    return ops.dynamic_slice(x, starts, sizes=sizes)


END = 2**63 - 1  # the end of an axis, for ops.slice
LONG = 1 << 31  # exporters write such numbers for the end of an axis


def _position(position, size, step):
    """Return a position for ``ops.slice``, clamped to the axis."""
    if type(position) is not int:
        return position
    if position >= LONG - 1:
        return END
    if position <= -LONG + 1:
        return -END
    if step < 0 and position < 0 and type(size) is int and position < -size:
        return -END
    return position


@operator
def Tile(x, repeats: Sizes):
    counts = tuple(repeats)
    if all(type(n) is int for n in counts):
        return ops.tile(x, repeats=counts)
    pairs = list(zip(counts, x.shape, strict=True))
    y = ops.reshape(x, shape=tuple(n for _, size in pairs for n in (1, size)))
    y = ops.broadcast_to(y, shape=tuple(n for pair in pairs for n in pair))
    return ops.reshape(y, shape=tuple(count * size for count, size in pairs))


@operator(folds=False)
def ConstantOfShape(shape: Sizes, *, value=None):
    element = np.zeros(1, np.float32) if value is None else np.asarray(value).reshape(-1)
    sizes = tuple(shape)
    # As an array, operators that need constants can read it; larger ones would fill the memory of the importer.
    if is_static(sizes) and math.prod(sizes) <= 1 << 20:
        return np.full(sizes, element[0])
    check_constant(sizes)
    return ops.full(shape=sizes, value=element[0].item(), dtype=element.dtype)


@operator(folds=False)
def Range(start: Item, limit: Item, delta: Item, *, context):
    try:
        a, b, step = (context.importer.sizes(v)[0] if _whole(v) else None for v in (start, limit, delta))
    except NotConstantError:
        a = b = step = None
    if a is None or b is None or type(step) is not int:
        values = [context.known(v, "an operand") for v in (start, limit, delta)]
        check_constant((int(max((values[1].item() - values[0].item()) / values[2].item(), 0)) + 1,))
        return np.arange(*(v.item() for v in values)).astype(values[0].dtype)
    if step == 0:
        raise OperationError("the step of Range is 0")
    span = b - a
    count = -(-span // step) if type(span) is int else floordiv(span + step - 1, step)
    if type(count) is int:
        count = max(count, 0)
        check_constant((count,))
        if type(a) is int:
            return np.arange(a, a + count * step, step).astype(
                np.int64 if is_sizes(start) else start.dtype.numpy if isinstance(start, Value) else start.dtype
            )
    kind = next((v.dtype for v in (start, limit, delta) if not is_sizes(v)), np.dtype(np.int64))
    y = ops.iota(shape=(count,), dtype=kind)
    y = y * scalar(step, y) if step != 1 else y
    return (
        y + (scalar(a, y) if type(a) is int else ops.cast(ops.size_value(value=a), dtype=kind))
        if equal(a, 0) is not True
        else y
    )


def _whole(v):
    kind = v.dtype
    return is_sizes(v) or str(kind) in ("int64", "int32", "int16")


@operator
def Pad(x, pads: Sizes, value: Item = None, axes: Sizes = None, *, mode="constant"):
    value = 0 if value is None else value
    selected = axes_of(axes, x.ndim) if axes is not None else tuple(range(x.ndim))
    count = len(selected)
    if len(pads) != 2 * count:
        raise OperationError(f"Pad has {len(pads)} pads for {count} axes")
    widths = [(0, 0)] * x.ndim
    for k, axis in enumerate(selected):
        widths[axis] = (pads[k], pads[k + count])
    x = _cropped(x, widths)
    widths = [(a if type(a) is not int else max(a, 0), b if type(b) is not int else max(b, 0)) for a, b in widths]
    if all(pair == (0, 0) for pair in widths):
        return x
    if mode == "wrap":
        return _wrapped(x, widths)
    if mode == "reflect":
        return _reflected(x, widths)
    if mode != "constant":
        return ops.pad(x, widths=tuple(widths), mode=mode)
    if not isinstance(value, Value):
        number = np.asarray(value).reshape(-1)[:1]
        plain = number[0].item() if number.size else 0
        return ops.pad(
            x, widths=tuple(widths), value=plain if x.dtype.is_float else bool(plain) if x.dtype.is_bool else int(plain)
        )
    in_bounds = ops.pad(ops.full(shape=x.shape, value=True, dtype="bool"), widths=tuple(widths), value=False)
    return ops.where(in_bounds, ops.pad(x, widths=tuple(widths)), ops.reshape(value, shape=()))


def _cropped(x, widths):
    rows = [(k, a, b) for k, (a, b) in enumerate(widths) if (type(a) is int and a < 0) or (type(b) is int and b < 0)]
    for k, a, b in rows:
        x = ops.slice(x, starts=(max(-a, 0),), stops=(x.shape[k] - max(-b, 0),), steps=(1,), axes=(k,))
    return x


def _wrapped(x, widths):
    for k, (before, after) in enumerate(widths):
        if before or after:
            size = x.shape[k]
            x = ops.take(x, np.arange(-before, size + after) % size, axis=k)
    return x


def _reflected(x, widths):
    """Reflect also by more than the size of an axis."""
    if all(type(n) is not int or max(pair) < n for n, pair in zip(x.shape, widths, strict=True)):
        return ops.pad(x, widths=tuple(widths), mode="reflect")
    for k, (before, after) in enumerate(widths):
        if before or after:
            size = x.shape[k]
            period = max(2 * (size - 1), 1)
            place = np.abs(np.arange(-before, size + after)) % period
            x = ops.take(x, np.minimum(place, period - place), axis=k)
    return x


@operator
def DepthToSpace(x, *, blocksize, mode="DCR"):
    n, c, h, w = x.shape
    b = blocksize
    if mode == "DCR":
        y = ops.transpose(ops.reshape(x, shape=(n, b, b, c // (b * b), h, w)), perm=(0, 3, 4, 1, 5, 2))
    else:
        y = ops.transpose(ops.reshape(x, shape=(n, c // (b * b), b, b, h, w)), perm=(0, 1, 4, 2, 5, 3))
    return ops.reshape(y, shape=(n, c // (b * b), h * b, w * b))


@operator
def SpaceToDepth(x, *, blocksize, mode="DCR"):
    n, c, h, w = x.shape
    b = blocksize
    y = ops.reshape(x, shape=(n, c, h // b, b, w // b, b))
    y = ops.transpose(y, perm=(0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4))
    return ops.reshape(y, shape=(n, c * b * b, h // b, w // b))


@operator
def Trilu(x, k: Known = None, *, upper=1):
    diagonal = 0 if k is None else int(np.asarray(k).reshape(-1)[0])
    sizes = [n for n in x.shape[-2:] if type(n) is int]
    if len(sizes) == 2:
        diagonal = max(min(diagonal, sum(sizes) + 1), -sum(sizes) - 1)
    return ops.triu(x, k=diagonal) if upper else ops.tril(x, k=diagonal)


@operator
def EyeLike(x, *, k=0, dtype=None):
    kind = x.dtype if dtype is None else dtype_of_code(dtype)
    return ops.eye(n=x.shape[0], m=x.shape[1], k=k, dtype=kind)


@operator
def ReverseSequence(x, lengths, *, batch_axis=1, time_axis=0):
    order = (batch_axis, time_axis, *(a for a in range(x.ndim) if a not in (batch_axis, time_axis)))
    y = ops.transpose(x, perm=order)
    batch, time = y.shape[:2]
    place = ops.iota(shape=(batch, time), axis=1, dtype=lengths.dtype)
    length = ops.unsqueeze(lengths, axis=(1,))
    source = ops.where(ops.less(place, length), length - place - scalar(1, lengths), place)
    y = ops.gather_nd(y, ops.unsqueeze(source, axis=(2,)), batch_dims=1)
    inverse = tuple(order.index(a) for a in range(x.ndim))
    return ops.transpose(y, perm=inverse)


@operator
def CenterCropPad(x, shape: Sizes, *, axes=None):
    axes = axes_of(axes, x.ndim) if axes is not None else tuple(range(x.ndim))
    widths = [(0, 0)] * x.ndim
    for axis, target in zip(axes, shape, strict=True):
        size = x.shape[axis]
        if target < size:
            start = (size - target) // 2
            x = ops.slice(x, starts=(start,), stops=(start + target,), steps=(1,), axes=(axis,))
        else:
            before = (target - size) // 2
            widths[axis] = (before, target - size - before)
    return ops.pad(x, widths=tuple(widths)) if any(pair != (0, 0) for pair in widths) else x
