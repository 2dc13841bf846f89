"""JAX's primitives that read and write at positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode as Mode

from mithril import ops
from mithril.graph import UnsupportedError, dtype as as_dtype, equal, is_static
from mithril_importing.arrays import as_value, broadcast, reshape
from mithril_jax.importing.table import cast, kind_of, row


@row("gather")
def gather(
    x: Any, starts: Any, *_: Any, dimension_numbers: Any, slice_sizes: Any, mode: Any, fill_value: Any, **__: Any
) -> Any:
    """Gather slices; those that reach outside are clamped, or filled in that mode."""
    d = dimension_numbers
    y = _gathered(x, starts, d, slice_sizes)
    valid = _inside(x, starts, d.start_index_map, slice_sizes) if mode == Mode.FILL_OR_DROP else None
    if valid is None:
        return y
    rank = len(y.shape)
    batch = iter(valid.shape)
    valid = reshape(valid, [1 if k in d.offset_dims else next(batch) for k in range(rank)])
    kind = kind_of(y)
    if fill_value is None:
        dtype = np.dtype(kind) if kind[0] in "iu" else None
        fill_value = bool(kind == "bool") if dtype is None else np.iinfo(dtype).min or np.iinfo(dtype).max
        fill_value = float("nan") if "float" in kind else fill_value
    return ops.where(valid, y, np.asarray(fill_value).astype(as_dtype(kind).numpy))


def _inside(x: Any, starts: Any, index_map: Any, sizes: Any) -> Any:
    """Return whether each slice lies within ``x``; None if all do, as known while the model is built."""
    valid: Any = None
    for k, axis in enumerate(index_map):
        start, last = starts[..., k], x.shape[axis] - sizes[axis]
        last = last if type(last) is int else ops.cast(ops.size_value(value=last), dtype=kind_of(starts))
        within = ops.logical_and(ops.greater_equal(start, 0), ops.less_equal(start, last))
        valid = within if valid is None else ops.logical_and(valid, within)
    return None if valid is None or (isinstance(valid, (np.ndarray, np.generic)) and valid.all()) else valid


def _gathered(x: Any, starts: Any, d: Any, slice_sizes: Any) -> Any:
    """Gather slices within ``x``. Whole rows along one axis are ``take``."""
    batching = tuple(d.operand_batching_dims)
    is_full = [equal(n, m) is True for n, m in zip(slice_sizes, x.shape, strict=True)]
    rank = len(starts.shape) - 1 + len(d.offset_dims)
    if len(d.start_index_map) == 1 and not batching and d.collapsed_slice_dims == d.start_index_map:
        axis = d.start_index_map[0]
        if all(w for k, w in enumerate(is_full) if k != axis):
            places = reshape(ops.minimum(ops.maximum(starts, 0), _last(x, axis, starts)), starts.shape[:-1])
            y = ops.take(x, places, axis=axis)
            lead = len(places.shape)
            order = _order(
                [*range(axis, axis + lead)], [k for k in range(rank) if not axis <= k < axis + lead], d, rank
            )
            return y if order == list(range(rank)) else ops.transpose(y, perm=tuple(order))
    batch = [k for k in range(rank) if k not in d.offset_dims]
    shape: list[Any] = [0] * rank
    for k, n in zip(batch, starts.shape[:-1], strict=True):
        shape[k] = n
    window = [k for k in range(len(x.shape)) if k not in d.collapsed_slice_dims and k not in batching]
    for k, axis in zip(d.offset_dims, window, strict=True):
        shape[k] = slice_sizes[axis]
    return ops.gather_nd(
        x,
        _positions(
            x,
            starts,
            d.start_index_map,
            slice_sizes,
            batch,
            d.offset_dims,
            window,
            batching,
            d.start_indices_batching_dims,
            shape,
        ),
    )


def _last(x: Any, axis: int, places: Any) -> Any:
    """Return the last position along an axis, in the dtype of other positions."""
    last = x.shape[axis] - 1
    return last if type(last) is int else ops.cast(ops.size_value(value=last), dtype=kind_of(places))


def _order(lead: list[int], rest: list[int], d: Any, rank: int) -> list[int]:
    """Return the permutation that puts window axes at the offset dims and the others in order."""
    windows, batch = iter(rest), iter(lead)
    return [next(windows) if k in d.offset_dims else next(batch) for k in range(rank)]


def _positions(
    x: Any,
    starts: Any,
    index_map: Any,
    sizes: Any,
    batch: list[int],
    offset_dims: Any,
    window: list[int],
    batching: Any,
    starts_batching: Any,
    shape: list[Any],
) -> Any:
    """Return the position in ``x`` of each element of the result, of a gather or of the updates of a scatter."""
    if not is_static(tuple(shape)):
        raise UnsupportedError("a general gather or scatter requires static sizes")
    rank = len(shape)
    places = []
    for axis in range(len(x.shape)):
        place: Any = np.zeros((1,) * rank, np.int32)
        if axis in index_map:
            start = cast(starts[..., index_map.index(axis)], np.int32)
            start = ops.minimum(ops.maximum(start, 0), x.shape[axis] - sizes[axis])
            aligned = [1] * rank
            for k, n in zip(batch, start.shape, strict=True):
                aligned[k] = n
            place = reshape(start, aligned)
        if axis in batching:
            k = batch[starts_batching[batching.index(axis)]]
            place = ops.add(
                place, np.arange(shape[k], dtype=np.int32).reshape([-1 if j == k else 1 for j in range(rank)])
            )
        if axis in window:
            k = offset_dims[window.index(axis)]
            place = ops.add(
                place, np.arange(shape[k], dtype=np.int32).reshape([-1 if j == k else 1 for j in range(rank)])
            )
        places.append(broadcast(place, shape))
    return ops.stack(*places, axis=-1)


@row("scatter")
def scatter(x: Any, starts: Any, updates: Any, **parameters: Any) -> Any:
    return _scattered(ops.scatter_nd, None, x, starts, updates, **parameters)


@row("scatter-add", "scatter_add")
def scatter_add(x: Any, starts: Any, updates: Any, **parameters: Any) -> Any:
    return _scattered(ops.scatter_nd_add, 0, x, starts, updates, **parameters)


def _reduced(name: str, neutral: Any) -> None:
    def reduce(x: Any, starts: Any, updates: Any, **parameters: Any) -> Any:
        function = partial(ops.scatter_nd_reduce, reduction=name)
        return _scattered(function, neutral, x, starts, updates, **parameters)

    row(f"scatter-{name}", f"scatter_{name}")(reduce)


for _name, _neutral in (("mul", 1), ("max", None), ("min", None)):
    _reduced(_name, _neutral)


def _scattered(
    function: Any, neutral: Any, x: Any, starts: Any, updates: Any, *, dimension_numbers: Any, mode: Any, **_: Any
) -> Any:
    """Scatter updates; those that reach outside are dropped unless the mode clamps them.

    A dropped update has the ``neutral`` element, or goes to a row after the last, which the result does not have.
    """
    d, shape = dimension_numbers, list(updates.shape)
    batching = tuple(d.operand_batching_dims)
    window = [k for k in range(len(x.shape)) if k not in d.inserted_window_dims and k not in batching]
    sizes = [1] * len(x.shape)
    for k, axis in zip(d.update_window_dims, window, strict=True):
        sizes[axis] = shape[k]
    batch = [k for k in range(len(shape)) if k not in d.update_window_dims]
    places = _positions(
        x,
        starts,
        d.scatter_dims_to_operand_dims,
        sizes,
        batch,
        d.update_window_dims,
        window,
        batching,
        d.scatter_indices_batching_dims,
        shape,
    )
    valid = None if mode == Mode.CLIP else _inside(x, starts, d.scatter_dims_to_operand_dims, sizes)
    if valid is None:
        return function(as_value(x), places, updates)
    aligned = iter(valid.shape)
    valid = broadcast(reshape(valid, [next(aligned) if k in batch else 1 for k in range(len(shape))]), shape)
    if neutral is not None:
        return function(as_value(x), places, ops.where(valid, updates, np.asarray(neutral, kind_of(updates))))
    rows = x.shape[0]
    longer = ops.pad(as_value(x), widths=((0, 1), *((0, 0),) * (len(x.shape) - 1)))
    first = ops.where(valid, places[..., 0], rows)
    places = ops.concat(ops.unsqueeze(first, axis=len(shape)), places[..., 1:], axis=-1)
    return function(longer, places, updates)[:rows]
