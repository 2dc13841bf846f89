"""ATen operators that read and write elements at positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import equal, product
from mithril_importing.arrays import as_value, broadcast, reshape
from mithril_torch.importing.table import axis_of, cast, is_tensor, known, line, row

MASKS = ("bool", "uint8")  # dtypes of an index that selects elements


@row("embedding")
def embedding(weight: Any, indices: Any, *_: Any, **__: Any) -> Any:
    return ops.embedding(indices, weight)


@row("index_select")
def index_select(x: Any, dim: int, index: Any) -> Any:
    if not len(x.shape):
        return x
    return ops.take(x, reshape(index, (-1,)), axis=axis_of(x, dim))


@row("gather")
def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if not len(x.shape):
        return x if not len(index.shape) else broadcast(reshape(x, (1,)), index.shape)
    axis = axis_of(x, dim)
    return ops.take_along_axis(like_index(x, index, axis), index, axis=axis)


def like_index(x: Any, index: Any, axis: int) -> Any:
    """Return ``x`` cut to the sizes of the index, which may be smaller, on the other axes."""
    for k, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)):
        if k != axis and equal(n, m) is not True:
            x = ops.split(as_value(x), sizes=(m, n - m), axis=k)[0]
    return x


@row("scatter.src", "scatter.value")
def scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scattered(ops.scatter_nd, x, dim, index, source)


@row("scatter.reduce", "scatter.value_reduce")
def scatter_with_reduction(x: Any, dim: int, index: Any, source: Any, *, reduce: str) -> Any:
    op = partial(ops.scatter_nd_reduce, reduction={"add": "add", "multiply": "mul"}[reduce])
    return _scattered(op, x, dim, index, source)


@row("put")
def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Write elements at positions in the flattened tensor."""
    flat, places = reshape(x, (-1,)), reshape(index, (-1,))
    y = (scatter_add if accumulate else scatter)(flat, 0, places, reshape(source, (-1,)))
    return reshape(y, x.shape)


@row("max_unpool2d", "max_unpool3d")
def max_unpool(x: Any, indices: Any, output_size: Any, *_: Any) -> Any:
    """Write elements at positions in planes; all that are written to one place have its slope."""
    lead = tuple(x.shape[: len(x.shape) - len(output_size)])
    flat, places = reshape(x, (*lead, -1)), reshape(indices, (*lead, -1))
    zeros = as_value(ops.full(shape=(*lead, product(output_size)), value=0.0, dtype=str(x.dtype)))
    y = scatter(zeros, len(lead), places, ops.stop_gradient(flat))
    y = ops.add(y, scatter_add(zeros, len(lead), places, ops.sub(flat, ops.stop_gradient(flat))))
    return reshape(y, (*lead, *output_size))


@row("scatter_add")
def scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scattered(ops.scatter_nd_add, x, dim, index, source)


def _scattered(op: Callable[..., Any], x: Any, dim: int, index: Any, source: Any) -> Any:
    if not len(x.shape):
        one = reshape(index, (1,)), reshape(source, (1,)) if is_tensor(source) else source
        return reshape(_scattered(op, reshape(x, (1,)), 0, *one), ())
    axis = axis_of(x, dim)
    source = like_index(source, index, -1) if is_tensor(source) and len(source.shape) else source
    source = broadcast(cast(source, str(x.dtype)), index.shape)
    shape, rank = index.shape, len(index.shape)
    places = [
        cast(index, "int64")
        if k == axis
        else broadcast(reshape(line(n, "int64"), [-1 if k == j else 1 for j in range(rank)]), shape)
        for k, n in enumerate(shape)
    ]
    return op(x, ops.stack(*places, axis=-1), source)


# -- several index tensors ----------------------------------------------------------------------------------------
@row("index.Tensor", "_unsafe_index.Tensor")
def index(x: Any, indices: Any) -> Any:
    """Index as in NumPy: index tensors broadcast; their axes go first unless they are adjacent."""
    axes, tensors = _split(indices)
    if len(axes) == 1:
        return ops.take(x, tensors[0], axis=axes[0])
    places = _places(tensors)
    y = ops.gather_nd(_permuted(x, _indexed_first(x, axes)), places)
    order = _positions_first(axes, len(places.shape) - 1, len(y.shape))
    return _permuted(y, [order.index(k) for k in range(len(order))])


@row("index_put", "_unsafe_index_put")
def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    """Replace the elements that ``index`` reads, or add to them."""
    values = cast(values, str(x.dtype))
    selected = _by_single_mask(x, indices, values)
    if selected is not None:
        mask, values = selected
        return ops.where(mask, ops.add(x, values) if accumulate else values, x)
    axes, tensors = _split(indices)
    places, order = _places(tensors), _indexed_first(x, axes)
    rows = _permuted(x, order)
    shape = (*places.shape[:-1], *rows.shape[len(axes) :])
    first = _positions_first(axes, len(places.shape) - 1, len(shape))
    updates = broadcast(values, [shape[first.index(k)] for k in range(len(shape))])
    y = (ops.scatter_nd_add if accumulate else ops.scatter_nd)(rows, places, _permuted(updates, first))
    return _permuted(y, [order.index(k) for k in range(len(order))])


def _by_single_mask(x: Any, indices: Any, values: Any) -> tuple[Any, Any] | None:
    """Return the only index, if it is a mask whose elements all get the same values, and the values by axes of x."""
    masks = [(k, i) for k, i in enumerate(indices) if i is not None]
    if len(masks) != 1 or str(masks[0][1].dtype) not in MASKS:
        return None
    before, mask = masks[0]
    masked_axes = [1] * len(mask.shape)
    after = len(x.shape) - before - len(masked_axes)
    sizes = (*[1] * (before + 1 + after - len(values.shape)), *values.shape)
    if not (type(sizes[before]) is int and sizes[before] == 1):
        return None
    mask = reshape(cast(mask, "bool"), (*[1] * before, *mask.shape, *[1] * after))
    return mask, reshape(values, (*sizes[:before], *masked_axes, *sizes[before + 1 :]))


def _split(indices: Any) -> tuple[list[int], list[Any]]:
    """Return the indexed axes and their index tensors; masks must be known and become positions."""
    expanded: list[Any] = []
    for i in indices:
        if i is not None and str(i.dtype) in MASKS:
            expanded += np.nonzero(known(i, "an index by a mask"))
        else:
            expanded.append(i)
    axes = [k for k, i in enumerate(expanded) if i is not None]
    return axes, [expanded[k] for k in axes]


def _indexed_first(x: Any, axes: list[int]) -> list[int]:
    return [*axes, *(k for k in range(len(x.shape)) if k not in axes)]


def _positions_first(axes: list[int], rank: int, total: int) -> list[int]:
    """Return the axes of an indexed part, those of the positions first; adjacent axes are indexed where they are."""
    start = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0
    return [*range(start, start + rank), *range(start), *range(start + rank, total)]


def _permuted(x: Any, order: list[int]) -> Any:
    return ops.transpose(x, perm=tuple(order)) if order != sorted(order) else x


def _places(tensors: list[Any]) -> Any:
    """Return index tensors, broadcast, as one tensor whose last axis has one position per tensor."""
    rank = max(len(t.shape) for t in tensors)
    expanded = [reshape(cast(t, "int64"), (*[1] * (rank - len(t.shape)), *t.shape)) for t in tensors]
    sizes: list[Any] = []
    for k in range(rank):
        larger = [t.shape[k] for t in expanded if not (type(t.shape[k]) is int and t.shape[k] == 1)]
        sizes.append(larger[0] if larger else 1)
    return ops.stack(*(broadcast(t, sizes) for t in expanded), axis=-1)


@row("nonzero")
def nonzero(x: Any) -> Any:
    return np.stack(np.nonzero(known(x, "nonzero")), -1)


@row("one_hot")
def one_hot(x: Any, num_classes: int = -1) -> Any:
    return cast(ops.one_hot(x, depth=num_classes), "int64")
