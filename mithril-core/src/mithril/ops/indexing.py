"""Indexing by computed positions: take, gather, scatter, one-hot.

Negative positions count from the end, and out-of-range positions are clamped to the nearest element. Gather and
scatter use the same rule, so each scatter-add is the exact adjoint of its gather.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    Arr,
    Axis,
    DType,
    DTypeError,
    Shape,
    ShapeError,
    Size,
    assume,
    composite,
    dtype as as_dtype,
    exactly,
    expect_equal,
    float32,
    ints,
    op,
    operation,
    product,
    sample,
    shape_text,
)
from mithril.ops.creation import full, iota
from mithril.ops.shape import concat, reshape, spread, transpose, unsqueeze

Array = np.ndarray[Any, Any]


# -- shared helpers -----------------------------------------------------------------------------------------------
def indexed(k: int) -> Any:
    """Return a dtype rule: the result has the dtype of operand 0, and operand ``k`` holds integer positions."""

    def rule(dtypes: Sequence[DType | None], _: Mapping[str, Any]) -> DType:
        positions, dtype = dtypes[k], dtypes[0]
        assert dtype is not None
        assert positions is not None
        if not positions.is_integer:
            raise DTypeError(
                f"positions must be integers, not {positions}", hint="cast them: cast(indices, dtype='int32')"
            )
        return dtype

    return rule


def _addable(dtypes: Sequence[DType | None], attributes: Mapping[str, Any]) -> DType:
    """Return the dtype of operand 0, which must be numeric; operand 1 holds integer positions."""
    dtype: DType = indexed(1)(dtypes, attributes)
    if dtype.is_bool:
        raise DTypeError("cannot add bool elements", hint="cast them to an integer")
    return dtype


def check_not_empty(x: Shape, axes: Sequence[int], positions: Shape) -> None:
    """Raise ShapeError if positions index an empty axis."""
    if 0 in positions:
        return
    for axis in axes:
        if x[axis] in positions:  # if the axis is empty, there are no positions either
            continue
        if not assume(1, "<=", x[axis], f"the indexed axis {axis} is not empty"):
            raise ShapeError(
                f"cannot index axis {axis}: its size is 0",
                facts=[f"operand {shape_text(x)}, positions {shape_text(positions)}"],
            )


def expect_updates(updates: Shape, expected: Shape) -> None:
    if len(updates) != len(expected) or not all(
        assume(a, "==", b, "updates match the indexed elements") for a, b in zip(updates, expected, strict=True)
    ):
        raise ShapeError(f"updates have shape {shape_text(updates)}, expected {shape_text(expected)}")


def positions_in(indices: Array, size: int) -> Array:
    """Convert positions to int64, non-negative and clamped to the axis."""
    if indices.dtype.kind == "u":
        indices = np.minimum(indices, indices.dtype.type(min(size - 1, np.iinfo(indices.dtype).max)))
    signed: Array = indices.astype(np.int64)
    return np.clip(np.where(signed < 0, signed + size, signed), 0, size - 1)


def zeros_like(like: Any) -> Any:
    return full(shape=like.shape, value=0, dtype=like.dtype)


def wide_positions(indices: Any) -> Any:
    """Cast positions of less than 32 bits to int32, which can index any axis."""
    return indices if as_dtype(indices.dtype).bits >= 32 else operation("cast")(indices, dtype="int32")


# -- along one axis -----------------------------------------------------------------------------------------------
def _take_shape(x: Shape, indices: Shape, *, axis: int) -> Shape:
    check_not_empty(x, (axis,), indices)
    return (*x[:axis], *indices, *x[axis + 1 :])


@op(
    shape=_take_shape,
    dtype=indexed(1),
    samples=[
        sample((5, 3), ints((4,), 0, 4)),
        sample((3, 4), ints((2, 2), -4, 3), axis=-1, label="matrix of positions"),
        sample((3, 2), ints((), 0, 2), label="one position"),
        sample((3, 2), exactly(5, -9, -1, 1, dtype="int32"), label="outside"),
        sample((3, 2), Arr((0,), "int32"), label="none"),
    ],
    axes="*i t@axis *j, *k -> *i *k *j | t index indices",
    moves=True,
    linear="x",
)
def take(x, indices, *, axis: Axis = 0):
    """Elements at integer positions along an axis, which the axes of ``indices`` replace."""
    return np.take(x, positions_in(indices, x.shape[axis]), axis) if indices.size else _none(x, indices, axis)


def _none(x: Array, indices: Array, axis: int) -> Array:
    return np.empty((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)


@take.vjp
def _(g, y, x, indices, *, axis):
    return scatter_add(zeros_like(x), indices, g, axis=axis), None


@take.vmap
def _(rows, has_rows, x, indices, *, axis):
    return take_in_rows(x, indices, axis) if all(has_rows) else NotImplemented


def take_in_rows(x: Any, indices: Any, axis: int) -> Any:
    """Return ``take`` for each row of both operands, computed by one ``gather_nd``."""
    first = transpose(x, perm=(0, axis + 1, *(k for k in range(1, x.ndim) if k != axis + 1)))
    y = gather_nd(first, unsqueeze(indices, axis=(-1,)), batch_dims=1)
    count = indices.ndim - 1
    outer = range(1 + count, 1 + count + axis)
    return transpose(y, perm=(0, *outer, *range(1, 1 + count), *range(1 + count + axis, y.ndim)))


def scatter_along(function: Any, x: Any, indices: Any, updates: Any, axis: int) -> Any:
    """Apply a scatter along ``axis`` by moving the axis to the front."""
    count = indices.ndim
    expected = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    expect_updates(updates.shape, expected)
    if axis == 0:
        return function(x, unsqueeze(indices, axis=(-1,)), updates)
    rank = x.ndim
    first = (axis, *(k for k in range(rank) if k != axis))
    updates_perm = (*range(axis, axis + count), *(k for k in range(rank - 1 + count) if not axis <= k < axis + count))
    back = (*range(1, axis + 1), 0, *range(axis + 1, rank))
    result = function(transpose(x, perm=first), unsqueeze(indices, axis=(-1,)), transpose(updates, perm=updates_perm))
    return transpose(result, perm=back)


@composite(
    promotes="same",
    promoted=("x", "updates"),
    samples=[
        sample((4, 2), exactly(2, 0, 2, dtype="int32"), (3, 2)),
        sample((2, 5, 2), ints((2, 2), -5, 4), (2, 2, 2, 2), axis=1, label="axis"),
        sample((3, 2), exactly(7, -8, dtype="int32"), (2, 2), label="outside"),
    ],
)
def scatter(x, indices, updates, *, axis: Axis = 0):
    """``x`` with elements replaced at integer positions along an axis; for repeated positions the last update wins."""
    return scatter_along(scatter_nd, x, indices, updates, axis)


@composite(
    promotes="same",
    promoted=("x", "updates"),
    samples=[
        sample((4, 2), exactly(2, 0, 2, dtype="int32"), (3, 2)),
        sample((2, 5, 2), ints((2, 2), -5, 4), (2, 2, 2, 2), axis=1, label="axis"),
        sample((3, 2), exactly(7, -8, dtype="int32"), (2, 2), label="outside"),
    ],
)
def scatter_add(x, indices, updates, *, axis: Axis = 0):
    """``x`` with updates added at integer positions along an axis; updates at repeated positions add up."""
    return scatter_along(scatter_nd_add, x, indices, updates, axis)


# -- several axes at once -----------------------------------------------------------------------------------------
def _depth(x: Shape, indices: Shape, batch: int) -> int:
    """Return the number of axes that ``indices`` addresses: the size of its last axis."""
    if not indices:
        raise ShapeError("positions require a last axis with one entry per indexed axis", facts=["got a scalar"])
    depth = indices[-1]
    if not isinstance(depth, int):
        raise ShapeError(f"the last axis of the positions must have a static size, got '{depth}'")
    if batch < 0 or batch >= len(indices) or depth + batch > len(x):
        raise ShapeError(
            f"positions {shape_text(indices)} with {batch} batch axes address more axes than "
            f"the operand {shape_text(x)} has",
            facts=[f"accepted: batch_dims from 0 to {min(len(indices) - 1, len(x))}, depth up to {len(x) - batch}"],
        )
    return depth


def _gather_shape(x: Shape, indices: Shape, *, batch_dims: int) -> Shape:
    depth = _depth(x, indices, batch_dims)
    for k in range(batch_dims):
        expect_equal(f"batch axis {k} of the operand and of the positions", x[k], indices[k])
    check_not_empty(x, range(batch_dims, batch_dims + depth), indices[:-1])
    return (*indices[:-1], *x[batch_dims + depth :])


def _rows_and_index(x: Array, indices: Array) -> tuple[Array, Array]:
    """Return ``x`` as a matrix of rows, and the row index of each position, in row-major order."""
    depth = indices.shape[-1]
    row = np.zeros(indices.shape[:-1], np.int64)
    for k in range(depth):
        row = row * x.shape[k] + positions_in(indices[..., k], x.shape[k])
    return x.reshape(math.prod(x.shape[:depth]), math.prod(x.shape[depth:])), np.asarray(row, order="C").reshape(-1)


@op(
    shape=_gather_shape,
    dtype=indexed(1),
    samples=[
        sample((3, 4), ints((5, 2), 0, 2)),
        sample((3, 4, 2), ints((2, 2, 1), -3, 2), label="rows"),
        sample((2, 3, 4), ints((2, 5, 1), 0, 2), batch_dims=1, label="batch"),
        sample((3, 4), exactly(9, -9, -1, 4, dtype="int32", shape=(2, 2)), label="outside"),
        sample((4,), exactly(2, dtype="int32", shape=(1,)), label="one element"),
    ],
    axes="*b:batch_dims *t:d *j, *b *k d -> *b *k *j | t index indices, d whole",
    moves=True,
    linear="x",
)
def gather_nd(x, indices, *, batch_dims: int = 0):
    """Elements at positions in several axes: the last axis of ``indices`` has one position per indexed axis."""
    if indices[..., :1].size == 0 and indices.shape[-1]:
        return np.empty((*indices.shape[:-1], *x.shape[batch_dims + indices.shape[-1] :]), x.dtype)
    if batch_dims:
        grid = np.indices(indices.shape[:-1])[:batch_dims]
        indices = np.concatenate([*(axis[..., None] for axis in grid), indices.astype(np.int64)], -1)
    rows, row = _rows_and_index(x, indices)
    return rows[row].reshape((*indices.shape[:-1], *x.shape[indices.shape[-1] :]))


@gather_nd.vjp
def _(g, y, x, indices, *, batch_dims):
    if batch_dims:
        indices = wide_positions(indices)
        lead = (*indices.shape[:-1], 1)
        grid = [iota(shape=lead, axis=k, dtype=indices.dtype) for k in range(batch_dims)]
        indices = concat(*grid, indices, axis=-1)
    return scatter_nd_add(zeros_like(x), indices, g), None


def _scatter_shape(x: Shape, indices: Shape, updates: Shape) -> Shape:
    depth = _depth(x, indices, 0)
    check_not_empty(x, range(depth), indices[:-1])
    expect_updates(updates, (*indices[:-1], *x[depth:]))
    return x


@op(
    shape=_scatter_shape,
    dtype=indexed(1),
    promotes="same",
    promoted=("x", "updates"),
    samples=[
        sample((3, 4), ints((5, 2), 0, 2), (5,)),
        sample((3, 4), exactly(2, 0, -1, dtype="int32", shape=(3, 1)), (3, 4), label="rows"),
        sample((2, 2), exactly(9, -9, -1, 4, dtype="int32", shape=(2, 2)), (2,), label="outside"),
        sample((3, 0), exactly(2, 0, dtype="int32", shape=(2, 1)), (2, 0), label="empty rows", gradient=False),
    ],
    axes="*t:d *j, *k d, *k *j -> *t *j | t index indices, k d whole",
    moves=True,
    linear="x updates",
)
def scatter_nd(x, indices, updates):
    """``x`` with elements replaced at positions in several axes; for repeated positions the last update wins."""
    if indices.size == 0 and indices.shape[-1]:
        return x
    rows, row = _rows_and_index(x.copy(), indices)
    rows[row] = updates.reshape(row.size, rows.shape[1])
    return rows.reshape(x.shape)


@scatter_nd.vjp
def _(g, y, x, indices, updates):
    lead = indices.shape[:-1]
    depth = indices.shape[-1]
    untouched = scatter_nd(g, indices, zeros_like(updates))
    order = reshape(iota(shape=(product(lead),)), shape=lead)
    none = full(shape=x.shape[:depth], value=-1, dtype="int32")
    winner = operation("equal")(gather_nd(scatter_nd(none, indices, order), indices), order)
    winner = reshape(winner, shape=(*lead, *[1] * (x.ndim - depth)))
    return untouched, None, operation("where")(winner, gather_nd(g, indices), zeros_like(updates))


@op(
    shape=_scatter_shape,
    dtype=_addable,
    promotes="same",
    promoted=("x", "updates"),
    flops=lambda types, results, attributes: product(types[2].shape),
    samples=[
        sample((3, 4), ints((5, 2), 0, 2), (5,)),
        sample((3, 4), exactly(2, 0, -1, dtype="int32", shape=(3, 1)), (3, 4), label="rows"),
        sample((2, 2), exactly(9, -9, -1, 4, dtype="int32", shape=(2, 2)), (2,), label="outside"),
        sample((3, 0), exactly(2, 0, dtype="int32", shape=(2, 1)), (2, 0), label="empty rows", gradient=False),
    ],
    axes="*t:d *j, *k d, *k *j -> *t *j | t index indices, k sum into x, d whole",
    linear="x updates",
)
def scatter_nd_add(x, indices, updates):
    """``x`` with updates added at positions in several axes; updates at repeated positions add up."""
    if indices.size == 0 and indices.shape[-1]:
        return x
    kind = as_dtype(x.dtype)
    narrow = kind.is_float and kind.bits < 32  # 16-bit floats accumulate in float32
    rows, row = _rows_and_index(x.astype(np.float32 if narrow else x.dtype), indices)
    added = updates.reshape(row.size, rows.shape[1]).astype(rows.dtype)
    np.add.at(rows, row, added)
    return rows.reshape(x.shape).astype(x.dtype)


@scatter_nd_add.vjp
def _(g, y, x, indices, updates):
    return g, None, gather_nd(g, indices)


def _scatter_rows(function: Any) -> Any:
    """Return the vmap rule of a scatter whose positions differ between rows: it prepends the row to each position."""

    def rule(rows: Size, has_rows: tuple[bool, ...], x: Any, indices: Any, updates: Any) -> Any:
        if not has_rows[1]:
            return NotImplemented
        indices = wide_positions(indices)
        row = iota(shape=(*indices.shape[:-1], 1), axis=0, dtype=indices.dtype)
        x, updates = (v if mapped else spread(v, rows) for v, mapped in ((x, has_rows[0]), (updates, has_rows[2])))
        return function(x, concat(row, indices, axis=-1), updates)

    return rule


scatter_nd.vmap(_scatter_rows(scatter_nd))
scatter_nd_add.vmap(_scatter_rows(scatter_nd_add))


# -- one hot ------------------------------------------------------------------------------------------------------
@composite(
    samples=[sample(ints((3,), 0, 3), depth=4), sample(ints((2, 2), -1, 3), depth=3, dtype="int32", label="outside")]
)
def one_hot(x, *, depth: int, dtype: DType = float32):
    """1 at position ``x`` of a new last axis of size ``depth``, else 0; all 0 for out-of-range integers."""
    kind = as_dtype(x.dtype)
    if not kind.is_integer:
        raise DTypeError(f"one_hot requires integers, got {kind}", hint="cast them: cast(x, dtype='int32')")
    if depth < 0:
        raise ShapeError(f"one_hot requires a depth of at least 0, got {depth}")
    x = wide_positions(x)
    places = iota(shape=(*x.shape, depth), axis=len(x.shape), dtype=x.dtype)
    return operation("cast")(operation("equal")(unsqueeze(x, axis=(-1,)), places), dtype=dtype)


__all__ = [
    "check_not_empty",
    "expect_updates",
    "gather_nd",
    "one_hot",
    "positions_in",
    "scatter",
    "scatter_add",
    "scatter_along",
    "scatter_nd",
    "scatter_nd_add",
    "take",
    "take_in_rows",
]
