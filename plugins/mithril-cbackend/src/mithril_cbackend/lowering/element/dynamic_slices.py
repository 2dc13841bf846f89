"""Slices at computed starts, of a whole array or of each of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril import ops
from mithril.graph import Node, Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import (
    Index,
    Reader,
    between,
    clamped,
    conjunction,
    operand,
    rule,
    shape_of,
)


def window_start(reader: Reader, starts: Value, place: int, n: int, size: int) -> Any:
    """Read the start index of a slice along an axis of ``n`` elements, clamped so that the slice is in bounds."""
    if n == size:
        return 0
    dtype = starts.dtype
    index_dtype = "int64" if dtype.bits == 64 or dtype.name == "uint32" else "int32"
    start = reader.at(starts, (place,))
    if dtype.name == "uint64":
        limit = t.const(n, "uint64")
        start = t.select(start > limit, limit, start)
    start = reader.code.let(t.cast(start, index_dtype), "start")
    zero, last = t.const(0, index_dtype), t.const(n - size, index_dtype)
    wrapped = start + t.const(n, index_dtype)
    start = reader.code.let(t.select(start < zero, wrapped, start), "start")
    start = t.select(start < zero, zero, t.select(start > last, last, start))
    return reader.code.let(t.cast(start, "int32"), "start")


def window_starts(reader: Reader, starts: Value, shape: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Read the start indices of a slice of static size."""
    return [window_start(reader, starts, k, n, size) for k, (n, size) in enumerate(zip(shape, sizes, strict=True))]


@rule(ops.dynamic_slice)
def _dynamic_slice(reader: Reader, node: Node, index: Index) -> t.Expr:
    x, starts = operand(node), operand(node, 1)
    begin = window_starts(reader, starts, shape_of(x), shape_of(node.result))
    return reader.at(x, tuple(reader.position(b + i) for b, i in zip(begin, index, strict=True)))


def update_starts(reader: Reader, node: Node, row: Any) -> list[Any]:
    """Read the start indices of an update, which of ``dynamic_update_rows`` are those of one row."""
    x, update, starts = node.result, operand(node, 1), operand(node, 2)
    if node.op is ops.dynamic_update_slice:
        return window_starts(reader, starts, shape_of(x), shape_of(update))
    axis = node.attributes["axis"]
    start = window_start(reader, starts, row, shape_of(x)[axis], shape_of(update)[axis])
    return [start if k == axis else 0 for k in range(len(x.shape))]


@rule(ops.dynamic_update_slice, ops.dynamic_update_rows)
def _dynamic_update(reader: Reader, node: Node, index: Index) -> t.Expr:
    x, update = operand(node), operand(node, 1)
    if 0 in shape_of(update):
        return reader.at(x, index)
    begin = update_starts(reader, node, index[0] if index else 0)
    conditions, update_index = [], []
    for b, i, n in zip(begin, index, shape_of(update), strict=True):
        offset = reader.position(i - b)
        conditions.append(between(offset, 0, n))
        update_index.append(clamped(reader, offset, 0, n - 1))
    return t.select(conjunction(conditions), reader.at(update, tuple(update_index)), reader.at(x, index))
