"""ATen operators that read and write elements at positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.base import equal, product
from mithril.ir import Op
from mithril_torch.importing.table import as_value, axis_of, broadcast, cast, is_tensor, known, line, reshape, row


@row("embedding")
def embedding(weight: Any, indices: Any, *_: Any, **__: Any) -> Any:
    return ops.embedding(indices, weight)


@row("index_select")
def index_select(x: Any, dim: int, index: Any) -> Any:
    return ops.take(x, index, axis=axis_of(x, dim))


@row("gather")
def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    axis = axis_of(x, dim)
    return ops.take_along_axis(_like_index(x, index, axis), index, axis=axis)


def _like_index(x: Any, index: Any, axis: int) -> Any:
    """Return ``x`` cut to the sizes of the index, which may be smaller, on the other axes."""
    for k, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)):
        if k != axis and equal(n, m) is not True:
            x = ops.split(as_value(x), sizes=(m, n - m), axis=k)[0]
    return x


@row("scatter.src", "scatter.value")
def scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scattered(ops.scatter_nd, x, dim, index, source)


@row("scatter_add")
def scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scattered(ops.scatter_nd_add, x, dim, index, source)


def _scattered(op: Op, x: Any, dim: int, index: Any, source: Any) -> Any:
    axis = axis_of(x, dim)
    source = _like_index(source, index, -1) if is_tensor(source) and len(source.shape) else source
    source = broadcast(cast(source, str(x.dtype)), index.shape)
    shape, rank = index.shape, len(index.shape)
    places = [
        cast(index, "int64")
        if k == axis
        else broadcast(reshape(line(n, "int64"), [-1 if k == j else 1 for j in range(rank)]), shape)
        for k, n in enumerate(shape)
    ]
    return op(x, ops.stack(*places, axis=-1), source)


@row("index_add")
def index_add(x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    source = source if alpha == 1 else ops.mul(source, alpha)
    return ops.scatter_add(x, index, source, axis=axis_of(x, dim))


@row("index_copy")
def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    return ops.scatter(x, index, source, axis=axis_of(x, dim))


@row("index_fill.int_Scalar")
def index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    axis = axis_of(x, dim)
    shape = (*x.shape[:axis], index.shape[0], *x.shape[axis + 1 :])
    return ops.scatter(x, index, broadcast(cast(value, str(x.dtype)), shape), axis=axis)


# -- several index tensors ----------------------------------------------------------------------------------------
@row("index.Tensor", "_unsafe_index.Tensor")
def index(x: Any, indices: Any) -> Any:
    """Index as in NumPy: index tensors broadcast; their axes go first unless they are adjacent."""
    axes, tensors, indices = _split(x, indices)
    if len(axes) == 1:
        return ops.take(x, tensors[0], axis=axes[0])
    y = ops.gather_nd(_first(x, axes), _places(tensors))
    if axes != list(range(axes[0], axes[0] + len(axes))):
        return y
    rank = len(np.broadcast_shapes(*[(1,) * len(t.shape) for t in tensors]))
    total, first = len(y.shape), axes[0]
    order = [*range(rank, rank + first), *range(rank), *range(rank + first, total)]
    return ops.transpose(y, perm=tuple(order)) if first else y


@row("index_put", "_unsafe_index_put")
def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    """Replace elements; a mask of all axes selects between ``x`` and a single value."""
    masks = [i for i in indices if i is not None]
    if len(masks) == 1 and str(masks[0].dtype) == "bool" and product(values.shape) == 1 and not accumulate:
        mask = reshape(masks[0], (*masks[0].shape, *[1] * (len(x.shape) - len(masks[0].shape))))
        if indices[0] is not None:
            return ops.where(mask, cast(reshape(values, ()), str(x.dtype)), x)
    axes, tensors, _ = _split(x, indices)
    order = [*axes, *(k for k in range(len(x.shape)) if k not in axes)]
    places = _places(tensors)
    transposed = ops.transpose(x, perm=tuple(order)) if order != sorted(order) else x
    shape = (*places.shape[:-1], *transposed.shape[len(axes) :])
    updates = broadcast(cast(values, str(x.dtype)), shape)
    y = (ops.scatter_nd_add if accumulate else ops.scatter_nd)(transposed, places, updates)
    return ops.transpose(y, perm=tuple(order.index(k) for k in range(len(order)))) if order != sorted(order) else y


def _split(x: Any, indices: Any) -> tuple[list[int], list[Any], Any]:
    """Return the indexed axes and their index tensors; masks must be known and become positions."""
    expanded: list[Any] = []
    for i in indices:
        if i is not None and str(i.dtype) in ("bool", "uint8"):
            expanded += np.nonzero(known(i, "an index by a mask"))
        else:
            expanded.append(i)
    axes = [k for k, i in enumerate(expanded) if i is not None]
    return axes, [expanded[k] for k in axes], expanded


def _first(x: Any, axes: list[int]) -> Any:
    order = [*axes, *(k for k in range(len(x.shape)) if k not in axes)]
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
