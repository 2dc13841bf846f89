"""Indexing along one axis, with separate positions for each element. The other axes of a selection broadcast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import Axis, Shape, ShapeError, composite, exactly, expect_equal, ints, op, sample
from mithril.ops.creation import full, iota
from mithril.ops.indexing import (
    check_not_empty,
    expect_updates,
    indexed,
    positions_in,
    scatter_nd,
    scatter_nd_add,
    wide_positions,
)
from mithril.ops.products import unbroadcast
from mithril.ops.shape import reshape, stack, transpose


def _along_shape(x: Shape, indices: Shape, *, axis: int) -> Shape:
    if len(x) != len(indices):
        raise ShapeError(f"positions must have the rank {len(x)} of the operand, got rank {len(indices)}")
    for k, (n, size) in enumerate(zip(x, indices, strict=True)):
        if k != axis:
            expect_equal(f"axis {k} of the operand and of the positions", n, size)
    check_not_empty(x, (axis,), indices)
    return indices


def _broadcast_along(x: Shape, indices: Shape, *, axis: int) -> Shape:
    """Return the shape of the selected elements: the other axes broadcast."""
    if len(x) != len(indices):
        return _along_shape(x, indices, axis=axis)
    sizes = [n if k != axis and size == 1 else size for k, (n, size) in enumerate(zip(x, indices, strict=True))]
    spread_x = tuple(size if k != axis and n == 1 else n for k, (n, size) in enumerate(zip(x, sizes, strict=True)))
    return _along_shape(spread_x, tuple(sizes), axis=axis)


def _broadcast_axes(shapes: Sequence[Shape], attributes: Mapping[str, Any], results: Sequence[Shape]) -> str:
    """Return the axes of ``take_along_axis``: those along which one operand broadcasts are only in the other."""
    axis, absent = attributes["axis"], list[str]()
    terms: tuple[list[str], list[str], list[str]] = [], [], []
    for k, sizes in enumerate(zip(*shapes, results[0], strict=True)):
        for j, (term, size) in enumerate(zip(terms, sizes, strict=True)):
            name = ("t" if j == 0 else "k") if k == axis else f"i{k}"
            if k != axis and j < 2 and size != sizes[2]:
                name = f"{'xp'[j]}{k}"
                absent.append(f"{name} whole")
            term.append(name)
    x, positions, result = map(" ".join, terms)
    return f"{x}, {positions} -> {result} | {', '.join(['t index indices', *absent])}"


@op(
    shape=_broadcast_along,
    dtype=indexed(1),
    samples=[
        sample((3, 4), ints((3, 2), 0, 3), axis=1),
        sample((3, 4), ints((5, 4), -3, 2), axis=0, label="longer"),
        sample((2, 3), exactly(9, -9, -1, 0, dtype="int64", shape=(2, 2)), axis=-1, label="outside"),
        sample((2, 3, 4), ints((1, 5, 4), 0, 2), axis=1, label="broadcast positions"),
        sample((2, 1, 4), ints((2, 3, 1), 0, 3), axis=2, label="broadcast"),
    ],
    axes=_broadcast_axes,
    moves=True,
    linear="x",
)
def take_along_axis(x, indices, *, axis: Axis):
    """Elements selected along an axis: ``result[i, j] = x[i, indices[i, j]]`` for the last of two axes.

    The other axes broadcast.
    """
    shape = _broadcast_along(x.shape, indices.shape, axis=axis)
    if 0 in shape:
        return np.empty(shape, x.dtype)
    return np.take_along_axis(x, positions_in(indices, x.shape[axis]), axis)


@take_along_axis.vjp
def _(g, y, x, indices, *, axis):
    """Add whole windows along the axes that share their positions."""
    window = [k for k in range(len(y.shape)) if k != axis and indices.shape[k] == 1 and y.shape[k] != 1]
    shape = tuple(x.shape[k] if k == axis else n for k, n in enumerate(y.shape))
    if not window:
        zeros = full(shape=shape, value=0, dtype=x.dtype)
        return unbroadcast(scatter_add_along_axis(zeros, indices, g, axis=axis), x.shape), None
    lead = [k for k in range(len(shape)) if k not in window]
    perm = (*lead, *window)
    positions = wide_positions(reshape(indices, shape=tuple(y.shape[k] for k in lead)))
    places = [
        positions if k == axis else iota(shape=positions.shape, axis=j, dtype=positions.dtype)
        for j, k in enumerate(lead)
    ]
    zeros = full(shape=tuple(shape[k] for k in perm), value=0, dtype=x.dtype)
    total = scatter_nd_add(zeros, stack(*places, axis=-1), transpose(g, perm=perm))
    total = transpose(total, perm=tuple(perm.index(k) for k in range(len(perm))))
    return unbroadcast(total, x.shape), None


def scatter_each(function: Any, x: Any, indices: Any, updates: Any, axis: int) -> Any:
    _along_shape(x.shape, indices.shape, axis=axis)
    expect_updates(updates.shape, indices.shape)
    indices = wide_positions(indices)
    places = [indices if k == axis else iota(shape=indices.shape, axis=k, dtype=indices.dtype) for k in range(x.ndim)]
    return function(x, stack(*places, axis=-1), updates)


@composite(
    promotes="same",
    promoted=("x", "updates"),
    samples=[
        sample((3, 4), ints((3, 2), 0, 3), (3, 2), axis=1),
        sample((3, 2), ints((5, 2), -3, 2, "int64"), (5, 2), axis=0, label="repeated"),
    ],
    axes="*i t@axis *j, *i k@axis *j, *i k@axis *j -> *i t@axis *j | t index indices, k whole",
)
def scatter_along_axis(x, indices, updates, *, axis: Axis):
    """``x`` with elements replaced: ``x[i, indices[i, j]] = updates[i, j]``; the last of repeated updates wins."""
    return scatter_each(scatter_nd, x, indices, updates, axis)


@composite(
    promotes="same",
    promoted=("x", "updates"),
    samples=[
        sample((3, 4), ints((3, 2), 0, 3), (3, 2), axis=1),
        sample((3, 2), ints((5, 2), -3, 2, "int8"), (5, 2), axis=0, label="repeated"),
    ],
    axes="*i t@axis *j, *i k@axis *j, *i k@axis *j -> *i t@axis *j | t index indices, k sum into x",
)
def scatter_add_along_axis(x, indices, updates, *, axis: Axis):
    """``x`` with updates added: ``x[i, indices[i, j]] += updates[i, j]``; repeated updates add up."""
    return scatter_each(scatter_nd_add, x, indices, updates, axis)


__all__ = ["scatter_add_along_axis", "scatter_along_axis", "scatter_each", "take_along_axis"]
