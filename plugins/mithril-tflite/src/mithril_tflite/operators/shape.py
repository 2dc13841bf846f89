"""Shapes: reshapes, transposes, slices, concatenation, padding, and tensors of sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Dim, OperationError, floordiv, normalize_axis, product
from mithril_importing.arrays import sizes_array
from mithril_importing.folding import check_constant
from mithril_tflite.operators.reduction import only
from mithril_tflite.table import Known, Sizes, Stored, operator


@operator(folds=False)
def SHAPE(x, *, context):
    return sizes_array(x.shape, context.dtype())


@operator(folds=False)
def RANK(x):
    return np.asarray(x.ndim, np.int32)


@operator(moves=True)
def RESHAPE(x, shape: Sizes = None, *, new_shape):
    target = tuple(new_shape if shape is None else shape)
    unknown = [k for k, n in enumerate(target) if type(n) is int and n == -1]
    if len(unknown) == 1:
        k = unknown[0]
        rest, total = product([n for i, n in enumerate(target) if i != k]), product(x.shape)
        if type(rest) is not int or rest:
            target = (*target[:k], floordiv(total, rest), *target[k + 1 :])
    return ops.reshape(x, shape=target)


@operator(moves=True)
def SQUEEZE(x, *, squeeze_dims):
    return ops.squeeze(x, axis=tuple(squeeze_dims) or None)


@operator(moves=True)
def EXPAND_DIMS(x, axis: Known):
    return ops.unsqueeze(x, axis=(only(axis),))


@operator(moves=True)
def TRANSPOSE(x, perm: Known):
    return ops.transpose(x, perm=tuple(perm.reshape(-1).tolist()))


@operator(moves=True)
def CONCATENATION(*xs, axis):
    return ops.concat(*xs, axis=axis)


@operator(moves=True)
def PACK(*xs, axis):
    return ops.stack(*xs, axis=axis)


@operator(moves=True)
def UNPACK(x, *, num, axis):
    axis = normalize_axis(axis, x.ndim)
    if num != x.shape[axis]:
        raise OperationError(f"UNPACK has {num} results for {x.shape[axis]} elements of axis {axis}")
    return tuple(ops.select(x, index=(k,), axes=(axis,)) for k in range(num))


@operator(moves=True)
def SPLIT(axis: Known, x, *, context):
    axis = normalize_axis(only(axis), x.ndim)
    part = floordiv(x.shape[axis], context.results)
    return ops.split(x, sizes=(part,) * context.results, axis=axis)


@operator(moves=True)
def SPLIT_V(x, sizes: Sizes, axis: Known):
    axis = normalize_axis(only(axis), x.ndim)
    if -1 in sizes:
        rest = x.shape[axis] - sum(n for n in sizes if n != -1)
        sizes = tuple(rest if n == -1 else n for n in sizes)
    return ops.split(x, sizes=sizes, axis=axis)


@operator(moves=True)
def SLICE(x, begin: Stored, size: Sizes, *, context):
    if context.constant(1) is None:
        sizes = tuple(m if n == -1 else n for n, m in zip(size, x.shape, strict=True))
        return ops.dynamic_slice(x, begin, sizes=sizes)
    starts = context.constant(1).reshape(-1).tolist()
    stops = tuple(m if n == -1 else a + n for a, n, m in zip(starts, size, x.shape, strict=True))
    return ops.slice(x, starts=tuple(starts), stops=stops, steps=(1,) * x.ndim, axes=tuple(range(x.ndim)))


def slice_index(
    rank, begin, end, strides, *, begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask, offset
):
    """Return the index of a strided slice, as NumPy takes it; bit k of a mask belongs to entry k."""
    count = len(begin)
    if ellipsis_mask & (ellipsis_mask - 1) or not len(begin) == len(end) == len(strides):
        raise OperationError("a strided slice has two ellipses, or entries of different number")
    index: list[Any] = []
    for k in range(count):
        bit = 1 << k
        if ellipsis_mask & bit:
            index.append(Ellipsis)
        elif new_axis_mask & bit:
            index.append(None)
        elif shrink_axis_mask & bit:
            index.append(begin[k])
        else:
            step = int(strides[k])
            stop = None if end_mask & bit else begin[k] + end[k] if offset else end[k]
            index.append(slice(None if begin_mask & bit else begin[k], stop, step))
    used = sum(i is not None and i is not Ellipsis for i in index)
    if used > rank:
        raise OperationError(f"a strided slice of {used} axes, but the operand has {rank}")
    if Ellipsis not in index:
        index.append(Ellipsis)
    return tuple(index)


END = 2**63 - 1  # the end of an axis, for ops.slice


@operator(moves=True)
def STRIDED_SLICE(x, begin: Sizes, end: Sizes, strides: Sizes, **masks):
    index = slice_index(x.ndim, begin, end, strides, **masks)
    used = sum(i is not None and i is not Ellipsis for i in index)
    axis, rows, dropped, added = 0, [], set(), []
    for entry in index:
        if entry is Ellipsis:
            axis += x.ndim - used
            continue
        if entry is None:
            added.append(axis)
            continue
        if isinstance(entry, slice):
            first = entry.start if entry.start is not None else (0 if entry.step > 0 else END)
            stop = entry.stop if entry.stop is not None else (END if entry.step > 0 else -END)
            if (first, stop, entry.step) != (0, END, 1):
                rows.append((first, _limited(stop, x.shape[axis], entry.step), entry.step, axis))
        else:
            rows.append((entry, END if type(entry) is int and entry == -1 else entry + 1, 1, axis))
            dropped.add(axis)
        axis += 1
    if rows:
        starts, stops, steps, axes = zip(*rows, strict=True)
        x = ops.slice(x, starts=starts, stops=stops, steps=steps, axes=axes)
    if not dropped and not added:
        return x
    shape = []
    for a in range(x.ndim + 1):
        shape += [1] * added.count(a)
        if a < x.ndim and a not in dropped:
            shape.append(x.shape[a])
    return ops.reshape(x, shape=tuple(shape))


def _limited(stop, size, step):
    """Return a stop for ``ops.slice``: one before the first element stays there for negative steps."""
    is_before = step < 0 and type(stop) is int and type(size) is int and stop < -size
    return -END if is_before else stop


def _widths(paddings, x):
    pairs = tuple((int(a), int(b)) for a, b in paddings.reshape(-1, 2))
    if len(pairs) != x.ndim or any(n < 0 for pair in pairs for n in pair):
        raise OperationError(f"paddings are {list(pairs)} for {x.ndim} axes")
    return pairs


@operator(moves=True)
def PAD(x, paddings: Known, *, context):
    return ops.pad(x, widths=_widths(paddings, x), value=context.zero)


@operator(moves=True)
def PADV2(x, paddings: Known, value, *, context):
    array = context.constant(2)
    if array is not None and (context.is_stored or array.dtype.kind == "f"):
        return ops.pad(x, widths=_widths(paddings, x), value=array.reshape(-1)[0].item())
    widths = _widths(paddings, x)
    is_element = ops.pad(ops.full(shape=tuple(x.shape), value=True, dtype="bool"), widths=widths, value=False)
    return ops.where(is_element, ops.pad(x, widths=widths), ops.reshape(value, shape=()))


@operator(moves=True)
def MIRROR_PAD(x, paddings: Known, *, mode):
    return ops.pad(x, widths=_widths(paddings, x), mode="symmetric" if mode else "reflect")


@operator(moves=True)
def TILE(x, repeats: Sizes):
    return ops.tile(x, repeats=repeats)


@operator(moves=True)
def BROADCAST_TO(x, shape: Sizes):
    return ops.broadcast_to(x, shape=shape)


@operator
def BROADCAST_ARGS(a: Known, b: Known):
    return np.asarray(np.broadcast_shapes(tuple(a.tolist()), tuple(b.tolist())), a.dtype)


@operator(moves=True)
def FILL(shape: Sizes, value):
    check_constant(shape)
    return ops.broadcast_to(value, shape=shape)


@operator
def RANGE(start: Sizes, limit: Sizes, delta: Sizes, *, context):
    dtype = context.dtype()
    if dtype.is_float:
        start, limit, delta = (context.constant(k).item() for k in range(3))
    else:
        (start,), (limit,), (delta,) = start, limit, delta
    if type(delta) is Dim or delta == 0:
        raise OperationError(f"the step of RANGE is {delta}")
    span = limit - start
    count = floordiv(span + delta - 1, delta) if type(span) is Dim else max(math.ceil(span / delta), 0)
    check_constant((count,))
    y = ops.iota(shape=(count,), dtype=dtype)
    y = y if delta == 1 else y * np.asarray(delta, dtype.numpy)
    if type(start) is Dim:
        return y + ops.cast(ops.size_value(value=start), dtype=dtype)
    return y + np.asarray(start, dtype.numpy) if start else y


@operator(moves=True)
def REVERSE_V2(x, axes: Known):
    return ops.flip(x, axis=tuple(axes.reshape(-1).tolist()))


@operator(moves=True)
def SPACE_TO_DEPTH(x, *, block_size):
    n, h, w, c = x.shape
    b = block_size
    y = ops.reshape(x, shape=(n, floordiv(h, b), b, floordiv(w, b), b, c))
    return ops.reshape(ops.transpose(y, perm=(0, 1, 3, 2, 4, 5)), shape=(n, floordiv(h, b), floordiv(w, b), b * b * c))


@operator(moves=True)
def DEPTH_TO_SPACE(x, *, block_size):
    n, h, w, c = x.shape
    b = block_size
    y = ops.reshape(x, shape=(n, h, w, b, b, c // (b * b)))
    return ops.reshape(ops.transpose(y, perm=(0, 1, 3, 2, 4, 5)), shape=(n, h * b, w * b, c // (b * b)))


@operator(moves=True)
def SPACE_TO_BATCH_ND(x, block: Known, paddings: Known, *, context):
    block, count = block.reshape(-1).tolist(), block.size
    widths = ((0, 0), *((int(a), int(b)) for a, b in paddings.reshape(-1, 2)), *[(0, 0)] * (x.ndim - 1 - count))
    x = ops.pad(x, widths=widths, value=context.zero)
    parts = [floordiv(n, b) for n, b in zip(x.shape[1:], block)]
    rest = tuple(x.shape[1 + count :])
    y = ops.reshape(x, shape=(x.shape[0], *(n for pair in zip(parts, block) for n in pair), *rest))
    inner, outer = range(2, 2 * count + 1, 2), range(1, 2 * count + 1, 2)
    y = ops.transpose(y, perm=(*inner, 0, *outer, *range(2 * count + 1, y.ndim)))
    return ops.reshape(y, shape=(x.shape[0] * math.prod(block), *parts, *rest))


@operator(moves=True)
def BATCH_TO_SPACE_ND(x, block: Known, crops: Known):
    block, count = block.reshape(-1).tolist(), block.size
    batch = floordiv(x.shape[0], math.prod(block))
    sizes, rest = tuple(x.shape[1 : 1 + count]), tuple(x.shape[1 + count :])
    y = ops.reshape(x, shape=(*block, batch, *sizes, *rest))
    order = [count, *(a for k in range(count) for a in (count + 1 + k, k)), *range(2 * count + 1, y.ndim)]
    y = ops.reshape(ops.transpose(y, perm=tuple(order)), shape=(batch, *(n * b for n, b in zip(sizes, block)), *rest))
    pairs = [(int(a), int(b)) for a, b in crops.reshape(-1, 2)]
    return ops.slice(
        y, starts=tuple(a for a, _ in pairs), stops=tuple(n - b for n, (_, b) in zip(y.shape[1:], pairs)),
        steps=(1,) * count, axes=tuple(range(1, 1 + count)),
    )  # fmt: skip
