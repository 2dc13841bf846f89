"""Scatters that combine repeated updates by maximum, minimum or product, composed of sorts and scatters."""

from __future__ import annotations

from functools import partial
from typing import Any

from mithril.graph import Axis, OperationError, ShapeError, Size, composite, exactly, ints, product, sample, unknown
from mithril.ops.along_axis import scatter_each, take_along_axis
from mithril.ops.basic import cast
from mithril.ops.creation import full, iota, size_value
from mithril.ops.elementwise import equal, less, maximum, minimum, where
from mithril.ops.indexing import (
    expect_updates,
    gather_nd,
    scatter_along,
    scatter_nd,
    scatter_nd_add,
    take,
    wide_positions,
)
from mithril.ops.shape import concat, reshape, unsqueeze
from mithril.ops.slicing import narrow
from mithril.ops.sorting import argsort

REDUCTIONS = ("add", "max", "min", "mul")


def number(size: Size, like: Any) -> Any:
    """Return a size as an operand of arithmetic with ``like``."""
    return size if isinstance(size, int) else cast(size_value(value=size), dtype=like.dtype)


def positions_within(indices: Any, size: Size) -> Any:
    """Return signed integers by the rule of ``take``: negative ones count from the end, all are within the size."""
    count = number(size, indices)
    return maximum(minimum(where(less(indices, 0), indices + count, indices), count - 1), 0)


def _flat_positions(x: Any, indices: Any) -> Any:
    """Return row-major positions [count] of the indexed rows."""
    depth = indices.shape[-1]
    flat = reshape(wide_positions(indices), shape=(product(indices.shape[:-1]), depth))
    position = full(shape=(flat.shape[0],), value=0, dtype=flat.dtype)
    for k in range(depth):
        one = reshape(narrow(flat, 1, k, k + 1), shape=(flat.shape[0],))
        position = position * number(x.shape[k], flat) + positions_within(one, x.shape[k])
    return position


def _extreme(rows: Any, position: Any, updates: Any, largest: bool) -> Any:
    """Return rows raised (or lowered) to the updates: of sorted updates the last one written wins."""
    count, columns = updates.shape
    order = argsort(updates, axis=0, descending=not largest)
    values = take_along_axis(updates, order, axis=0)
    column = iota(shape=(count, columns), axis=1, dtype=position.dtype)
    places = reshape(take(position, order) * number(columns, position) + column, shape=(count * columns, 1))
    flat = reshape(rows, shape=(rows.shape[0] * columns,))
    current = gather_nd(flat, places)
    best = (maximum if largest else minimum)(reshape(values, shape=(count * columns,)), current)
    return reshape(scatter_nd(flat, places, best), shape=rows.shape)


def _multiplied(rows: Any, position: Any, updates: Any) -> Any:
    """Return rows times all updates: products within runs of equal positions, in log2(count) steps."""
    count = updates.shape[0]
    if not isinstance(count, int):
        raise ShapeError(f"reduction 'mul' needs a static number of updates, got {count}")
    order = argsort(position)
    key, run = take(position, order), take(updates, order)
    step = 1
    while step < count:
        same_run = unsqueeze(equal(narrow(key, 0, step, count), narrow(key, 0, 0, count - step)), axis=(1,))
        later = narrow(run, 0, step, count)
        run = concat(narrow(run, 0, 0, step), where(same_run, later * narrow(run, 0, 0, count - step), later), axis=0)
        step *= 2
    ones = full(shape=rows.shape, value=1, dtype=rows.dtype)
    return rows * scatter_nd(ones, unsqueeze(key, axis=(1,)), run)


NESTED = (
    sample((3, 4), ints((5, 2), 0, 2), (5,), reduction="max"),
    sample((3, 4), exactly(2, 0, -1, 2, dtype="int32", shape=(4, 1)), (4, 4), reduction="min", label="rows"),
    sample((2, 2), exactly(9, -9, -1, 4, 1, 1, dtype="int32", shape=(3, 2)), (3,), reduction="mul", label="mul"),
    sample((3,), exactly(1, 1, 0, dtype="int32", shape=(3, 1)), (3,), reduction="add", label="add"),
)


@composite(promotes="same", promoted=("x", "updates"), samples=NESTED)
def scatter_nd_reduce(x, indices, updates, *, reduction: str):
    """``x`` combined with updates at positions in several axes by "add", "max", "min" or "mul"; nan wins."""
    if reduction not in REDUCTIONS:
        message, facts, hint = unknown("reduction", reduction, REDUCTIONS)
        raise OperationError(message, facts=facts, hint=hint)
    if reduction == "add":
        return scatter_nd_add(x, indices, updates)
    depth = indices.shape[-1]
    expect_updates(updates.shape, (*indices.shape[:-1], *x.shape[depth:]))
    columns = product(x.shape[depth:])
    rows = reshape(x, shape=(product(x.shape[:depth]), columns))
    position = _flat_positions(x, indices)
    values = reshape(updates, shape=(position.shape[0], columns))
    if reduction == "mul":
        return reshape(_multiplied(rows, position, values), shape=x.shape)
    return reshape(_extreme(rows, position, values, reduction == "max"), shape=x.shape)


@composite(
    promotes="same",
    promoted=("x", "updates"),
    samples=[
        sample((4, 2), exactly(2, 0, 2, dtype="int32"), (3, 2), reduction="max"),
        sample((2, 5), ints((4,), -5, 4), (2, 4), axis=1, reduction="mul", label="axis"),
    ],
)
def scatter_reduce(x, indices, updates, *, reduction: str, axis: Axis = 0):
    """``x`` combined with updates at positions along an axis by "add", "max", "min" or "mul"."""
    return scatter_along(partial(scatter_nd_reduce, reduction=reduction), x, indices, updates, axis)


@composite(
    promotes="same",
    promoted=("x", "updates"),
    samples=[
        sample((3, 4), ints((3, 2), 0, 3), (3, 2), axis=1, reduction="min"),
        sample((3, 2), ints((5, 2), -3, 2), (5, 2), axis=0, reduction="mul", label="repeated"),
    ],
)
def scatter_reduce_along_axis(x, indices, updates, *, reduction: str, axis: Axis):
    """``x`` combined with updates at one position each along an axis by "add", "max", "min" or "mul"."""
    return scatter_each(partial(scatter_nd_reduce, reduction=reduction), x, indices, updates, axis)


__all__ = ["scatter_nd_reduce", "scatter_reduce", "scatter_reduce_along_axis"]
