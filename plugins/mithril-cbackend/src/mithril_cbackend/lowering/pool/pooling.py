"""Max and average pooling, argmax positions and the gradient of average pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from mithril import ops
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, between, clamped, conjunction, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed, rounded
from mithril_cbackend.lowering.pool import row_pooling
from mithril_cbackend.lowering.rows import reductions


def element_in_window(
    frame: KernelBuilder, index: Index, offset: Index, shape: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> tuple[Index, list[t.Expr]]:
    """Return the position of a window's element, clamped, and the conditions that it is inside the image."""
    positions, conditions = [], []
    for i, k, n, s, (before, after), d in zip(index, offset, shape, stride, padding, dilation, strict=True):
        position = i * s + k * d - int(before)
        if before or after:
            position = frame.reader.position(position)
            conditions.append(between(position, 0, n))
            position = clamped(frame.reader, position, 0, n - 1)
        positions.append(position)
    return tuple(positions), conditions


def line_of_window(frame: KernelBuilder, index: Index, offset: Index) -> tuple[Index, list[t.Expr]]:
    """Return the position of a window's line and the conditions that it is inside the image."""
    a, shape = frame.kernel.anchor.attributes, shape_of(operand(frame.kernel.anchor))
    sizes = (shape[2:-1], a["stride"][:-1], a["padding"][:-1], a.get("dilation", [1] * len(shape[2:]))[:-1])
    return element_in_window(frame, index, offset, *sizes)


@lowers(ops.max_pool, scratch=row_pooling.scratch)
def max_pool(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``max_pool``."""
    frame = KernelBuilder(kernel, name, machine)

    def emit(index: Index, element: t.Expr) -> None:
        frame.write(kernel.anchor.result, index, element)

    row_pooling.fold_windows(frame, ops.max, partial(line_of_window, frame), emit)
    return frame.finish()


@lowers(ops.max_pool_positions)
def max_pool_positions(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Return the flat position of each window's first maximum; nan is the maximum, -1 marks windows of padding."""
    frame = KernelBuilder(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    x, a = operand(node), node.attributes
    shape, result, dtype = shape_of(x), shape_of(node.result), x.dtype
    with reader.nest("", result, frame.kinds(result, math.prod(result))) as index:
        best, number = code.alloc("best", 1, reductions.accumulator(dtype)), code.alloc("number", 1, "int32")
        code.store(best, 0, reductions.identity(ops.max, dtype))
        code.store(number, 0, t.index(-1))
        with reader.nest("abcdef", a["kernel"]) as offset:
            position, conditions = element_in_window(
                frame, index[2:], offset, shape[2:], a["stride"], a["padding"], a["dilation"]
            )
            element, current = reader.at(x, (*index[:2], *position)), t.load(best, 0)
            better = (element > current) | (t.load(number, 0) < 0)
            if dtype.is_float:
                is_first_nan = t.isnan(element) & ~t.isnan(current)
                better = better | is_first_nan
            with code.when(code.let(conjunction([better, *conditions]), "better")):
                code.store(best, 0, element)
                code.store(number, 0, t.index(reader.flat(position, shape[2:])))
        frame.write(node.result, index, t.load(number, 0))
    return frame.finish()


def window_size(frame: KernelBuilder, index: Index, attributes: Any, spatial: Sequence[int]) -> t.Expr:
    """Return the number of elements that a window averages, as float32."""
    kernel = attributes["kernel"]
    if attributes["count_include_pad"]:
        return t.const(math.prod(kernel), "float32")
    total: Any = 1
    for i, k, s, (before, _), n in zip(
        index, kernel, attributes["stride"], attributes["padding"], spatial, strict=True
    ):
        begin = i * s - int(before)
        size = t.index(clamped(frame.reader, begin + k, 0, n) - clamped(frame.reader, begin, 0, n))
        total = size if isinstance(total, int) else total * size
    return t.cast(t.index(total), "float32")


def average(frame: KernelBuilder, index: Index, total: t.Expr) -> t.Expr:
    """Return the average of a window's elements from their sum."""
    node = frame.kernel.anchor
    dtype = node.result.dtype
    count = window_size(frame, index[2:], node.attributes, shape_of(operand(node))[2:])
    return rounded(frame.code, total / t.cast(count, computed(dtype)), dtype)


@lowers(ops.avg_pool, scratch=row_pooling.scratch)
def average_pool(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``avg_pool``."""
    frame = KernelBuilder(kernel, name, machine)

    def emit(index: Index, element: t.Expr) -> None:
        frame.write(kernel.anchor.result, index, average(frame, index, element))

    row_pooling.fold_windows(frame, ops.sum, partial(line_of_window, frame), emit)
    return frame.finish()


def windows_containing(
    frame: KernelBuilder, index: Index, offset: Index, result: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> tuple[Index, list[t.Expr]]:
    """Return the windows that contain an element at ``offset``, clamped, and the conditions that they exist."""
    windows, conditions = [], []
    for i, k, n, s, (before, _), d in zip(index, offset, result, stride, padding, dilation, strict=True):
        shifted = i + int(before) - k * d
        shifted = frame.code.let(t.index(shifted), "moved")
        window = shifted
        if s != 1:
            conditions.append(t.equal(shifted % t.index(s), 0))
            window = frame.code.let(shifted / t.index(s), "place")
            conditions.append(shifted >= 0)
        conditions.append(between(window, 0, n))
        windows.append(clamped(frame.reader, window, 0, n - 1))
    return tuple(windows), conditions


@lowers(ops.avg_pool_grad)
def average_pool_grad(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``avg_pool_grad``: each pixel sums its contribution to every window that contains it."""
    frame = KernelBuilder(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    g, a = operand(node), node.attributes
    shape, dtype = shape_of(node.result), g.dtype
    zero = t.const(0, computed(dtype))
    with reader.nest("", shape, frame.kinds(shape, math.prod(shape))) as index:
        total = code.alloc("total", 1, computed(dtype))
        code.store(total, 0, zero)
        if 0 not in shape_of(g):
            with reader.nest("abcdef", a["kernel"]) as offset:
                ones = (1,) * len(offset)
                window, conditions = windows_containing(
                    frame, index[2:], offset, shape_of(g)[2:], a["stride"], a["padding"], ones
                )
                count = t.cast(window_size(frame, window, a, shape[2:]), computed(dtype))
                contribution = reader.at(g, (*index[:2], *window)) / count
                contribution = t.select(conjunction(conditions), contribution, zero)
                code.store(total, 0, t.load(total, 0) + contribution)
        frame.write(node.result, index, rounded(code, t.load(total, 0), dtype))
    return frame.finish()
