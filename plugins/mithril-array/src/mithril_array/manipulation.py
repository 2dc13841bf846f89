"""Functions that move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import InputError, ShapeError, normalize_axis, shape_text
from mithril_array.array import Array, PositionError, as_array, engine_of, moved
from mithril_array.dtypes import joined
from mithril_array.elementwise import astype, broadcast


def _axes(axis: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Return different non-negative axes."""
    axes = (axis,) if isinstance(axis, int) else tuple(map(int, axis))
    for a in axes:
        if not -rank <= a < rank:
            raise PositionError(f"there is no axis {a}", facts=[f"accepted: {-rank} to {rank - 1}"])
    axes = tuple(normalize_axis(a, rank) for a in axes)
    if len(set(axes)) < len(axes):
        raise ShapeError(f"an axis occurs twice in {list(axes)}", hint="pass each axis once")
    return axes


# -- shapes ----------------------------------------------------------------------------------------------------------
def _reshape(x: Any, *, shape: tuple[int, ...]) -> Any:
    return ops.reshape(x, shape=shape)


def reshape(x: Array, /, shape: Sequence[int], *, copy: bool | None = None) -> Array:
    x = as_array(x)
    sizes = tuple(int(n) for n in shape)
    if -1 in sizes:
        rest = math.prod(n for n in sizes if n != -1)
        if sizes.count(-1) > 1 or not rest or x.size % rest:
            raise ShapeError(f"cannot reshape {shape_text(x.shape)} to {list(sizes)}", hint="write every size")
        sizes = tuple(x.size // rest if n == -1 else n for n in sizes)
    if math.prod(sizes) != x.size:
        raise ShapeError(
            f"cannot reshape {shape_text(x.shape)} to {list(sizes)}",
            facts=[f"{x.size} elements, {math.prod(sizes)} requested"],
        )
    y = moved(_reshape, x, shape=sizes)
    return y._xp.asarray(y, copy=True) if copy else y


def expand_dims(x: Array, /, axis: int | Sequence[int] = 0) -> Array:
    x = as_array(x)
    axes = _axes(axis, x.ndim + (1 if isinstance(axis, int) else len(axis)))
    sizes = iter(x.shape)
    return reshape(x, [1 if k in axes else next(sizes) for k in range(x.ndim + len(axes))])


def squeeze(x: Array, /, axis: int | Sequence[int]) -> Array:
    x = as_array(x)
    axes = _axes(axis, x.ndim)
    for a in axes:
        if x.shape[a] != 1:
            raise _NotOne(f"axis {a} of shape {shape_text(x.shape)} has size {x.shape[a]}, not 1", hint="x[0]")
    return reshape(x, [n for k, n in enumerate(x.shape) if k not in axes])


class _NotOne(ShapeError, ValueError):
    """An axis to be removed has more than one element."""


def _transpose(x: Any, *, perm: tuple[int, ...]) -> Any:
    return ops.transpose(x, perm=perm)


def permute_dims(x: Array, /, axes: Sequence[int]) -> Array:
    x = as_array(x)
    perm = _axes(tuple(axes), x.ndim)
    if len(perm) != x.ndim:
        raise ShapeError(f"{list(perm)} is not an order of {x.ndim} axes", hint="pass each axis once")
    return moved(_transpose, x, perm=perm)


def moveaxis(x: Array, source: int | Sequence[int], destination: int | Sequence[int], /) -> Array:
    x = as_array(x)
    start, stop = _axes(source, x.ndim), _axes(destination, x.ndim)
    if len(start) != len(stop):
        raise ShapeError(f"{len(start)} axes are moved to {len(stop)} places", hint="pass a place for each axis")
    order = [k for k in range(x.ndim) if k not in start]
    for place, axis in sorted(zip(stop, start, strict=True)):
        order.insert(place, axis)
    return permute_dims(x, order)


def matrix_transpose(x: Array, /) -> Array:
    x = as_array(x)
    if x.ndim < 2:
        raise ShapeError(f"a matrix has at least two axes, got shape {shape_text(x.shape)}", hint="xp.expand_dims")
    return permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _broadcast(x: Any, *, shape: tuple[int, ...]) -> Any:
    return ops.broadcast_to(x, shape=shape)


def broadcast_to(x: Array, /, shape: Sequence[int]) -> Array:
    x, target = as_array(x), tuple(shape)
    if broadcast(x.shape, target) != target:
        raise ShapeError(f"shape {shape_text(x.shape)} does not broadcast to {shape_text(target)}", hint="xp.reshape")
    return moved(_broadcast, x, shape=target)


def broadcast_arrays(*arrays: Array) -> list[Array]:
    shape = broadcast(*(as_array(a).shape for a in arrays))
    return [broadcast_to(a, shape) for a in arrays]


# -- joining ---------------------------------------------------------------------------------------------------------
def _common(arrays: Sequence[Array]) -> list[Array]:
    if not arrays:
        raise InputError("there are no arrays to join", hint="pass at least one")
    xp = engine_of([as_array(a) for a in arrays])
    dtype = arrays[0].dtype
    for a in arrays[1:]:
        dtype = joined(dtype, a.dtype)
    return [astype(a, xp.dtype(dtype), copy=False) for a in arrays]


def _concat(*xs: Any, axis: int) -> Any:
    return ops.concat(*xs, axis=axis)


def _stack(*xs: Any, axis: int) -> Any:
    return ops.stack(*xs, axis=axis)


def concat(arrays: Sequence[Array], /, *, axis: int | None = 0) -> Array:
    operands = _common(list(arrays))
    if axis is None:
        operands, axis = [reshape(a, (-1,)) for a in operands], 0
    return moved(_concat, *operands, axis=axis)


def stack(arrays: Sequence[Array], /, *, axis: int = 0) -> Array:
    operands = _common(list(arrays))
    return moved(_stack, *operands, axis=normalize_axis(axis, operands[0].ndim + 1))


def unstack(x: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
    x = as_array(x)
    lead = (slice(None),) * normalize_axis(axis, x.ndim)
    return tuple(x[(*lead, k)] for k in range(x.shape[axis]))


# -- rearranging -----------------------------------------------------------------------------------------------------
def _flip(x: Any, *, axis: tuple[int, ...]) -> Any:
    return ops.flip(x, axis=axis)


def flip(x: Array, /, *, axis: int | Sequence[int] | None = None) -> Array:
    x = as_array(x)
    return moved(_flip, x, axis=_axes(tuple(range(x.ndim)) if axis is None else axis, x.ndim))


def _roll(x: Any, *, shift: tuple[int, ...], axis: tuple[int, ...]) -> Any:
    return ops.roll(x, shift=shift, axis=axis)


def roll(x: Array, /, shift: int | Sequence[int], *, axis: int | Sequence[int] | None = None) -> Array:
    x = as_array(x)
    if axis is None:
        return reshape(roll(reshape(x, (-1,)), shift, axis=0), x.shape)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    shifts = (shift,) * len(axes) if isinstance(shift, int) else tuple(shift)
    if len(shifts) != len(axes):
        raise ShapeError(f"{len(shifts)} shifts of {len(axes)} axes", hint="pass a shift for each axis")
    total = dict.fromkeys((normalize_axis(a, x.ndim) for a in axes), 0)
    for a, s in zip(axes, shifts, strict=True):
        total[normalize_axis(a, x.ndim)] += s
    reduced = {a: s % x.shape[a] for a, s in total.items() if x.shape[a]}
    return moved(_roll, x, shift=tuple(reduced.values()), axis=tuple(reduced)) if reduced else x


def _tile(x: Any, *, repeats: tuple[int, ...]) -> Any:
    return ops.tile(x, repeats=repeats)


def tile(x: Array, repetitions: Sequence[int], /) -> Array:
    x, counts = as_array(x), tuple(repetitions)
    rank = max(x.ndim, len(counts))
    x = reshape(x, (1,) * (rank - x.ndim) + x.shape)
    return moved(_tile, x, repeats=(1,) * (rank - len(counts)) + counts) if rank else x


def repeat(x: Array, repeats: Any, /, *, axis: int | None = None) -> Array:
    """Repeat each element; counts in an array are read on the host, as the size depends on them."""
    x = as_array(x)
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    axis = normalize_axis(axis, x.ndim)
    counts = repeats.numpy() if isinstance(repeats, Array) else np.asarray(repeats)
    if counts.size and counts.min() < 0:
        raise InputError(f"cannot repeat elements {int(counts.min())} times", hint="counts from 0 on")
    positions = x._xp.asarray(np.repeat(np.arange(x.shape[axis]), counts), dtype=x._xp.default_int)
    return x[(*(slice(None),) * axis, positions)]


FUNCTIONS = {
    f.__name__: f
    for f in (
        *(broadcast_arrays, broadcast_to, concat, expand_dims, flip, moveaxis, permute_dims, repeat, reshape, roll),
        *(squeeze, stack, tile, unstack),
    )
}
