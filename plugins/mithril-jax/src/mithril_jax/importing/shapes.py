"""JAX's primitives that create, move, reduce and index."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Dim, UnsupportedError, equal
from mithril_importing.arrays import as_value, broadcast, reshape
from mithril_jax.importing.table import cast, kind_of, line, row


@row("broadcast_in_dim")
def broadcast_in_dim(x: Any, *_: Any, shape: Any, broadcast_dimensions: Any, **__: Any) -> Any:
    aligned = [1] * len(shape)
    for axis, target in enumerate(broadcast_dimensions):
        aligned[target] = x.shape[axis]
    return broadcast(reshape(x, aligned), shape)


@row("reshape")
def reshape_(x: Any, *_: Any, new_sizes: Any, dimensions: Any = None, **__: Any) -> Any:
    return reshape(x if dimensions is None else ops.transpose(x, perm=tuple(dimensions)), new_sizes)


@row("squeeze")
def squeeze(x: Any, dimensions: Any) -> Any:
    return reshape(x, [n for k, n in enumerate(x.shape) if k not in {d % len(x.shape) for d in dimensions}])


@row("expand_dims")
def expand_dims(x: Any, dimensions: Any) -> Any:
    sizes = iter(x.shape)
    return reshape(x, [1 if k in dimensions else next(sizes) for k in range(len(x.shape) + len(dimensions))])


@row("transpose")
def transpose(x: Any, permutation: Any) -> Any:
    return ops.transpose(x, perm=tuple(permutation)) if len(permutation) else x


@row("rev")
def reverse(x: Any, dimensions: Any) -> Any:
    return ops.flip(x, axis=tuple(dimensions)) if len(dimensions) else x


@row("concatenate")
def concatenate(*xs: Any, dimension: int) -> Any:
    return ops.concat(*xs, axis=dimension) if len(xs) > 1 else xs[0]


@row("stack")
def stack(*xs: Any, axis: int) -> Any:
    return ops.stack(*xs, axis=axis)


@row("dim_as_value")
def dim_as_value(*_: Any, dim: Any) -> Any:
    return np.asarray(dim, np.int32) if type(dim) is int else ops.cast(ops.size_value(value=dim), dtype="int32")


@row("iota")
def iota(*_: Any, dtype: Any, shape: Any, dimension: int, **__: Any) -> Any:
    return cast(line(shape, dimension), dtype)


@row("iota_2x32_shape")
def iota_of_halves(shape: Any) -> Any:
    """Return the positions of elements as two uint32: the upper and the lower half."""
    places = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    return (places >> np.uint64(32)).astype(np.uint32), places.astype(np.uint32)


@row("pad")
def pad(x: Any, value: Any, padding_config: Any) -> Any:
    """Pad at both ends, cut where widths are negative, and put elements between."""
    for axis, (_, _, interior) in enumerate(padding_config):
        if interior:
            n = x.shape[axis]
            columns = reshape(x, (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]))
            fill = broadcast(value, (*columns.shape[: axis + 1], interior, *columns.shape[axis + 2 :]))
            spaced = reshape(
                ops.concat(columns, fill, axis=axis + 1), (*x.shape[:axis], n * (interior + 1), *x.shape[axis + 1 :])
            )
            x = part(spaced, axis, 0, n * (interior + 1) - interior, 1)
    for axis, (low, high, _) in enumerate(padding_config):
        if low < 0 or high < 0:
            x = part(x, axis, max(-low, 0), x.shape[axis] - max(-high, 0), 1)
    widths = [(max(low, 0), max(high, 0)) for low, high, _ in padding_config]
    if not any(a or b for a, b in widths):
        return x
    if isinstance(value, np.ndarray) and kind_of(x) != "bool":
        return ops.pad(x, widths=tuple(widths), value=value.item())
    for axis, ends in enumerate(widths):
        for end, width in enumerate(ends):
            if width:
                border = broadcast(value, (*x.shape[:axis], width, *x.shape[axis + 1 :]))
                x = ops.concat(*((x, border) if end else (border, x)), axis=axis)
    return x


def part(x: Any, axis: int, start: Any, stop: Any, step: int) -> Any:
    """Return a slice along one axis."""
    index = [slice(None)] * len(x.shape)
    index[axis] = slice(start, stop, step)
    return (as_value(x) if isinstance(start, Dim) or isinstance(stop, Dim) else x)[tuple(index)]


@row("slice")
def slice_(x: Any, start_indices: Any, limit_indices: Any, strides: Any = None) -> Any:
    for axis, (start, stop) in enumerate(zip(start_indices, limit_indices, strict=True)):
        step = 1 if strides is None else strides[axis]
        if step != 1 or equal(start, 0) is not True or equal(stop, x.shape[axis]) is not True:
            x = part(x, axis, start, stop, step)
    return x


@row("split")
def split(x: Any, sizes: Any, axis: int) -> Any:
    return tuple(ops.split(x, sizes=tuple(sizes), axis=axis))


@row("dynamic_slice")
def dynamic_slice(x: Any, *starts: Any, slice_sizes: Any) -> Any:
    return ops.dynamic_slice(as_value(x), _stacked(starts), sizes=tuple(slice_sizes))


@row("dynamic_update_slice")
def dynamic_update_slice(x: Any, update: Any, *starts: Any) -> Any:
    return ops.dynamic_update_slice(as_value(x), update, _stacked(starts))


def _stacked(starts: Any) -> Any:
    return ops.stack(*(cast(s, np.int32) for s in starts), axis=0) if starts else np.zeros(0, np.int32)


# -- reductions ---------------------------------------------------------------------------------------------------
REDUCTIONS = {"sum": ops.sum, "max": ops.max, "min": ops.min, "prod": ops.prod}
for _name, _op in REDUCTIONS.items():
    row(f"reduce_{_name}")(lambda x, axes, op=_op, **_: op(x, axis=tuple(axes)) if len(axes) else x)
for _name in ("cumsum", "cumprod"):
    _op = getattr(ops, _name)
    row(_name)(lambda x, axis, reverse, op=_op: op(x, axis=axis, reverse=reverse))


@row("cumlogsumexp")
def cumlogsumexp(x: Any, axis: int, reverse: bool) -> Any:
    y = ops.logcumsumexp(_reversed(x, axis, reverse), axis=axis)
    return _reversed(y, axis, reverse)


for _name in ("cummax", "cummin"):
    _op = getattr(ops, _name)
    row(_name)(lambda x, axis, reverse, op=_op: _reversed(op(_reversed(x, axis, reverse), axis=axis), axis, reverse))


def _reversed(x: Any, axis: int, is_reverse: bool) -> Any:
    return ops.flip(x, axis=(axis,)) if is_reverse else x


@row("approx_top_k")
def approx_top_k(
    x: Any, k: int, reduction_dimension: int, is_max_k: bool, aggregate_to_topk: bool = True, **_: Any
) -> Any:
    """Return the exact largest or least elements and their positions."""
    if not aggregate_to_topk:
        raise UnsupportedError("approx_max_k with aggregate_to_topk=False is not supported", hint="use True")
    axis = reduction_dimension % len(x.shape)
    order = descending_order(x, axis) if is_max_k else ops.argsort(x, axis=axis)
    positions = part(order, axis, 0, k, 1)
    return ops.take_along_axis(x, positions, axis=axis), positions


@row("reduce_and")
def reduce_and(x: Any, axes: Any, **_: Any) -> Any:
    return ops.all(x, axis=tuple(axes))


@row("reduce_or")
def reduce_or(x: Any, axes: Any, **_: Any) -> Any:
    return ops.any(x, axis=tuple(axes))


@row("argmax")
def argmax(x: Any, axes: Any, index_dtype: Any, **_: Any) -> Any:
    return cast(ops.argmax(x, axis=axes[0]), index_dtype)


@row("argmin")
def argmin(x: Any, axes: Any, index_dtype: Any, **_: Any) -> Any:
    return cast(ops.argmin(x, axis=axes[0]), index_dtype)


@row("sort")
def sort(*xs: Any, dimension: int, num_keys: int, **_: Any) -> Any:
    """Sort by the keys, which are sorted from the last to the first: the order is stable."""
    for key in reversed(range(num_keys)):
        order = ops.argsort(xs[key], axis=dimension)
        xs = tuple(ops.take_along_axis(x, order, axis=dimension) for x in xs)
    return xs


@row("top_k")
def top_k(x: Any, k: int, axis: int = -1, **_: Any) -> Any:
    """Return the largest elements and their positions; nan is the largest."""
    axis %= len(x.shape)
    positions = ops.split(descending_order(x, axis), sizes=(k, x.shape[axis] - k), axis=axis)[0]
    return ops.take_along_axis(x, positions, axis=axis), positions


def descending_order(x: Any, axis: int) -> Any:
    """Return the positions that sort the elements in descending order; nan is the largest."""
    order = ops.argsort(x, axis=axis, descending=True)
    if "float" not in kind_of(x):
        return order
    count = ops.sum(cast(ops.isnan(x), np.int32), axis=(axis,), keepdims=True)
    steps = line([n if k == axis else 1 for k, n in enumerate(x.shape)], axis)
    return ops.take_along_axis(order, ops.sub(steps, count), axis=axis)  # negative positions count from the end
