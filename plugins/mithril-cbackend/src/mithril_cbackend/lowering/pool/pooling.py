"""Pooling: maxima, averages and their places over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from mithril import ops
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, between, clamped, conjunction, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import Frame, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed, rounded
from mithril_cbackend.lowering.pool import row_pooling
from mithril_cbackend.lowering.rows import reductions


def place_in_window(
    frame: Frame, at: Index, offset: Index, shape: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> tuple[Index, list[t.Expr]]:
    """Where an element of a window lies, moved inside the image, and the conditions that it lay there before."""
    found, inside = [], []
    for i, k, n, s, (before, after), d in zip(at, offset, shape, stride, padding, dilation, strict=True):
        place = i * s + k * d - int(before)
        if before or after:
            place = frame.reader.position(place)
            inside.append(between(place, 0, n))
            place = clamped(frame.reader, place, 0, n - 1)
        found.append(place)
    return tuple(found), inside


def line_in_window(frame: Frame, at: Index, offset: Index) -> tuple[Index, list[t.Expr]]:
    """Where a line of a window lies in the image, and whether it lies there."""
    a, shape = frame.kernel.anchor.attributes, shape_of(operand(frame.kernel.anchor))
    sizes = (shape[2:-1], a["stride"][:-1], a["padding"][:-1], a.get("dilation", [1] * len(shape[2:]))[:-1])
    return place_in_window(frame, at, offset, *sizes)


@lowers(ops.max_pool, scratch=row_pooling.scratch)
def max_pool(kernel: Kernel, name: str, machine: Machine) -> Any:
    """The largest element of each window."""
    frame = Frame(kernel, name, machine)

    def emit(at: Index, element: t.Expr) -> None:
        frame.write(kernel.anchor.result, at, element)

    row_pooling.fold_windows(frame, ops.max, partial(line_in_window, frame), emit)
    return frame.finish()


@lowers(ops.max_pool_positions)
def max_pool_positions(kernel: Kernel, name: str, machine: Machine) -> Any:
    """The number of each window's first largest element; nan is the largest, -1 where there is only padding."""
    frame = Frame(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    x, a = operand(node), node.attributes
    shape, result, dtype = shape_of(x), shape_of(node.result), x.dtype
    with reader.nest("", result, frame.kinds(result, math.prod(result))) as at:
        best, number = code.alloc("best", 1, reductions.accumulator(dtype)), code.alloc("number", 1, "int32")
        code.store(best, 0, reductions.start(ops.max, dtype))
        code.store(number, 0, t.index(-1))
        with reader.nest("abcdef", a["kernel"]) as offset:
            place, inside = place_in_window(frame, at[2:], offset, shape[2:], a["stride"], a["padding"], a["dilation"])
            element, known = reader.at(x, (*at[:2], *place)), t.load(best, 0)
            better = (element > known) | (t.load(number, 0) < 0)
            if dtype.is_float:
                both = t.isnan(element) & ~t.isnan(known)
                better = better | both
            with code.when(code.let(conjunction([better, *inside]), "better")):
                code.store(best, 0, element)
                code.store(number, 0, t.index(reader.flat(place, shape[2:])))
        frame.write(node.result, at, t.load(number, 0))
    return frame.finish()


def _count(frame: Frame, at: Index, attributes: Any, spatial: Sequence[int]) -> t.Expr:
    """How many elements a window averages, as float32."""
    kernel = attributes["kernel"]
    if attributes["count_include_pad"]:
        return t.const(math.prod(kernel), "float32")
    total: Any = 1
    for i, k, s, (before, _), n in zip(at, kernel, attributes["stride"], attributes["padding"], spatial, strict=True):
        begin = i * s - int(before)
        size = t.index(clamped(frame.reader, begin + k, 0, n) - clamped(frame.reader, begin, 0, n))
        total = size if isinstance(total, int) else total * size
    return t.cast(t.index(total), "float32")


@lowers(ops.avg_pool, scratch=row_pooling.scratch)
def average_pool(kernel: Kernel, name: str, machine: Machine) -> Any:
    """The mean of each window."""
    frame = Frame(kernel, name, machine)
    node, spatial = kernel.anchor, shape_of(operand(kernel.anchor))[2:]
    dtype = node.result.dtype

    def emit(at: Index, element: t.Expr) -> None:
        count = t.cast(_count(frame, at[2:], node.attributes, spatial), computed(dtype))
        frame.write(node.result, at, rounded(frame.code, element / count, dtype))

    row_pooling.fold_windows(frame, ops.sum, partial(line_in_window, frame), emit)
    return frame.finish()


def windows_over(
    frame: Frame, at: Index, offset: Index, result: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> tuple[Index, list[t.Expr]]:
    """The windows in which an element of the image has a given place, moved inside, and whether they exist."""
    found, there = [], []
    for i, k, n, s, (before, _), d in zip(at, offset, result, stride, padding, dilation, strict=True):
        moved = i + int(before) - k * d
        moved = frame.code.let(t.index(moved), "moved")
        place = moved
        if s != 1:
            there.append(t.equal(moved % t.index(s), 0))
            place = frame.code.let(moved / t.index(s), "place")
            there.append(moved >= 0)
        there.append(between(place, 0, n))
        found.append(clamped(frame.reader, place, 0, n - 1))
    return tuple(found), there


@lowers(ops.avg_pool_grad)
def average_pool_grad(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Each element of the image gets its share of every window it is in."""
    frame = Frame(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    g, a = operand(node), node.attributes
    shape, dtype = shape_of(node.result), g.dtype
    zero = t.const(0, computed(dtype))
    with reader.nest("", shape, frame.kinds(shape, math.prod(shape))) as at:
        total = code.alloc("total", 1, computed(dtype))
        code.store(total, 0, zero)
        if 0 not in shape_of(g):
            with reader.nest("abcdef", a["kernel"]) as offset:
                ones = (1,) * len(offset)
                place, there = windows_over(frame, at[2:], offset, shape_of(g)[2:], a["stride"], a["padding"], ones)
                count = t.cast(_count(frame, place, a, shape[2:]), computed(dtype))
                share = reader.at(g, (*at[:2], *place)) / count
                share = t.select(conjunction(there), share, zero)
                code.store(total, 0, t.load(total, 0) + share)
        frame.write(node.result, at, rounded(code, t.load(total, 0), dtype))
    return frame.finish()
