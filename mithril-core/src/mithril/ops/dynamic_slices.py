"""Dynamic slices: the size is static or symbolic, the starts are values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril.graph import Axis, Shape, ShapeError, Size, assume, composite, exactly, op, operation, sample, shape_text
from mithril.ops.creation import full, iota, size_value
from mithril.ops.indexing import expect_updates, indexed, take_in_rows, wide_positions, zeros_like
from mithril.ops.shape import concat, reshape, spread

Array = np.ndarray[Any, Any]


def _fits(x: Shape, starts: Shape, sizes: Shape) -> None:
    if len(starts) != 1 or starts[0] != len(x):
        raise ShapeError(
            f"starts have shape {shape_text(starts)}, expected [{len(x)}]: one per axis of {shape_text(x)}"
        )
    if len(sizes) != len(x):
        raise ShapeError(f"cannot slice {shape_text(sizes)} from {shape_text(x)}: the ranks differ")
    for axis, (size, n) in enumerate(zip(sizes, x, strict=True)):
        if not assume(0, "<=", size, "a size is not negative") or not assume(
            size, "<=", n, f"a slice fits axis {axis}"
        ):
            raise ShapeError(f"a slice of {size} elements does not fit axis {axis} of size {n}")


def _dynamic_shape(x: Shape, starts: Shape, *, sizes: Shape) -> Shape:
    _fits(x, starts, sizes)
    return sizes


def _window(x: Array, starts: Array, sizes: Sequence[Size]) -> tuple[slice, ...]:
    begin = [
        min(max(int(s) + (n if s < 0 else 0), 0), n - int(size))
        for s, n, size in zip(starts, x.shape, sizes, strict=True)
    ]
    return tuple(slice(b, b + int(size)) for b, size in zip(begin, sizes, strict=True))


@op(
    shape=_dynamic_shape,
    dtype=indexed(1),
    samples=[
        sample((4, 5), exactly(1, 2, dtype="int32"), sizes=(2, 3)),
        sample((4, 5), exactly(9, -2, dtype="int32"), sizes=(2, 1), label="outside"),
        sample((4, 5), exactly(0, 2, dtype="int32"), sizes=(4, 2), label="one axis whole"),
    ],
    axes="*x, r -> *x | x[~] whole, r whole, sizes=result",
    moves=True,
    linear="x",
)
def dynamic_slice(x, starts, *, sizes: Shape):
    """A slice of static size whose starts, one per axis, are computed; starts are clamped so that it is in bounds."""
    return x[_window(x, starts, sizes)]


@dynamic_slice.vjp
def _(g, y, x, starts, *, sizes):
    return dynamic_update_slice(zeros_like(x), g, starts), None


def _update_shape(x: Shape, update: Shape, starts: Shape) -> Shape:
    _fits(x, starts, update)
    return x


@op(
    shape=_update_shape,
    dtype=indexed(2),
    promotes="same",
    promoted=("x", "update"),
    samples=[
        sample((4, 5), (2, 3), exactly(1, 2, dtype="int32")),
        sample((4, 5), (2, 1), exactly(9, -2, dtype="int64"), label="outside"),
        sample((4, 5), (4, 2), exactly(0, 2, dtype="int32"), label="one axis whole"),
    ],
    axes="*x, *x, r -> *x | x[~] whole, r whole",
    moves=True,
    linear="x update",
)
def dynamic_update_slice(x, update, starts):
    """``x`` with a slice overwritten at computed starts, which are clamped so that the update is in bounds."""
    out = x.copy()
    out[_window(x, starts, update.shape)] = update
    return out


@dynamic_update_slice.vjp
def _(g, y, x, update, starts):
    return (
        dynamic_update_slice(g, zeros_like(update), starts),
        dynamic_slice(g, starts, sizes=update.shape),
        None,
    )


def _with_row_start(starts: Any) -> Any:
    """Prepend a start of 0 for the axis of the rows."""
    return concat(full(shape=(1,), value=0, dtype=starts.dtype), starts)


def _begin(starts: Any, k: int, n: Size, size: Size) -> Any:
    """Return the clamped start of each row along axis ``k``: ``[rows, 1]``."""
    start = wide_positions(starts)[:, k : k + 1]
    select, less = operation("where"), operation("less")
    last = operation("cast")(size_value(value=n - size), dtype=start.dtype)
    size_n = operation("cast")(size_value(value=n), dtype=start.dtype)
    return operation("minimum")(operation("maximum")(select(less(start, 0), start + size_n, start), 0), last)


def _elements(update: Any, starts: Any, k: int, axis: int, n: Size) -> tuple[Any, Any]:
    """Return which of ``n`` places along an axis start ``k`` of each row overwrites, and the elements for them."""
    size = update.shape[axis]
    offset = iota(shape=(1, n), axis=1, dtype=wide_positions(starts).dtype) - _begin(starts, k, n, size)
    end = operation("cast")(size_value(value=size), dtype=offset.dtype)
    covered = operation("logical_and")(operation("greater_equal")(offset, 0), operation("less")(offset, end))
    covered = reshape(covered, shape=(update.shape[0], *(n if j == axis else 1 for j in range(1, update.ndim))))
    offset = operation("minimum")(operation("maximum")(offset, 0), end - 1)
    return covered, take_in_rows(update, offset, axis=axis - 1)


@composite(
    promotes="same",
    promoted=("x", "update"),
    samples=[
        sample((2, 5, 3), (2, 2, 3), exactly(1, 3, dtype="int32"), axis=1),
        sample((3, 2, 4), (3, 2, 1), exactly(9, -2, 0, dtype="int64"), axis=-1, label="outside"),
        sample((2, 3), (2, 3), exactly(0, 2, dtype="int32"), axis=1, label="axis whole"),
    ],
)
def dynamic_update_rows(x, update, starts, *, axis: Axis):
    """``x`` with a slice along ``axis`` of each row ``x[i]`` overwritten, whose start ``starts[i]`` is clamped."""
    if axis == 0:
        raise ShapeError("axis 0 is that of the rows: a slice requires another axis", facts=[shape_text(x.shape)])
    expect_updates(update.shape, (*x.shape[:axis], update.shape[axis], *x.shape[axis + 1 :]))
    if len(starts.shape) != 1 or not assume(starts.shape[0], "==", x.shape[0], "each row has a start"):
        raise ShapeError(f"starts have shape {shape_text(starts.shape)}, expected {shape_text(x.shape[:1])}")
    _fits(x.shape, (x.ndim,), update.shape)
    if update.shape[axis] == 0:
        return x
    covered, elements = _elements(update, reshape(starts, shape=(x.shape[0], 1)), 0, axis, x.shape[axis])
    return operation("where")(covered, elements, x)


@dynamic_slice.vmap
def _(rows, has_rows, x, starts, *, sizes):
    """Gather along each axis in turn if the starts differ between rows."""
    if not has_rows[1]:
        return dynamic_slice(x, _with_row_start(starts), sizes=(rows, *sizes))
    x = x if has_rows[0] else spread(x, rows)
    for k, size in enumerate(sizes):
        n = x.shape[k + 1]
        if size != n:
            positions = _begin(starts, k, n, size) + iota(shape=(1, size), axis=1, dtype=wide_positions(starts).dtype)
            x = take_in_rows(x, positions, axis=k)
    return x


@dynamic_update_slice.vmap
def _(rows, has_rows, x, update, starts):
    """Select each element from the operand or the update if the starts differ between rows."""
    x, update = (v if mapped else spread(v, rows) for v, mapped in zip((x, update), has_rows, strict=False))
    if not has_rows[2]:
        return dynamic_update_slice(x, update, _with_row_start(starts))
    axes = [k for k, (n, size) in enumerate(zip(x.shape, update.shape, strict=True)) if n != size]
    if len(axes) == 1:
        return dynamic_update_rows(x, update, starts[:, axes[0] - 1], axis=axes[0])
    written = None
    for axis in axes:
        if update.shape[axis] == 0:
            return x
        covered, update = _elements(update, starts, axis - 1, axis, x.shape[axis])
        written = covered if written is None else operation("logical_and")(written, covered)
    return update if written is None else operation("where")(written, update, x)


__all__ = ["dynamic_slice", "dynamic_update_rows", "dynamic_update_slice"]
