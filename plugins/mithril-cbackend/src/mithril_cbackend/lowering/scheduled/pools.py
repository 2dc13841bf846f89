"""Schedules of max and average pooling.

The lines of a window are folded into one line with its padding, then the columns of each window. Both are stages of the
loop over lines of the result, in memory that the L1 cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.graph import float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, conjunction, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.pool import pooling
from mithril_cbackend.lowering.pool.row_pooling import Line
from mithril_cbackend.lowering.rows import reductions
from mithril_cbackend.lowering.scheduled.blocks import Blocks, Fold, whole

FEW = 9  # lines and columns of a window that are unrolled
STACK = 16 << 10  # bytes of a line in a thread's own memory


def declines(kernel: Kernel, machine: Machine) -> str | None:
    """Return why a kernel has no schedule."""
    line = Line.of(kernel.anchor, machine)
    if line.lanes == 1:
        return "the machine has no vectors"
    if length(line) * max(operand(kernel.anchor).dtype.bits, 32) // 8 > STACK:
        return f"a line has more than {STACK} bytes"
    return None


def is_slower(kernel: Kernel) -> str | None:
    """Return why the template of a kernel is faster."""
    return "averages of overlapping windows" if kernel.anchor.attributes["stride"][-1] == 1 else None


def start(line: Line) -> int:
    """Return where a line's first element is stored: whole vectors precede it."""
    return whole(line.before, line.lanes)


def length(line: Line) -> int:
    """Return the elements of a line: those of the image, and those that whole vectors of windows read."""
    windows = (whole(line.result, line.lanes) - 1) * line.stride + (line.kernel - 1) * line.dilation + 1
    return whole(start(line) + max(line.image, windows - line.before), line.lanes * min(line.stride, 2))


@dataclass
class Place:
    """Positions that are the same for a whole line."""

    result: Index = ()  # of the line of the result
    line: Index = ()  # of the line of the image that is folded into it


def pool(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Write a pool."""
    frame, node = KernelBuilder(kernel, name, machine), kernel.anchor
    x, line = operand(node), Line.of(node, machine)
    *lead, columns = shape_of(node.result)
    blocks, begin, size = Blocks(frame, line.lanes), start(line), length(line)
    count, width = math.prod(lead), whole(columns, line.lanes)
    fold = Fold(ops.max if node.op is ops.max_pool else ops.sum, x.dtype)
    offsets = tuple(node.attributes["kernel"][:-1])
    place = Place()

    def enter_row(row: Any) -> None:
        place.result = frame.reader.split(row, lead)

    def enter_line(k: Any) -> t.Expr | None:
        place.line, conditions = pooling.line_of_window(frame, place.result[2:], frame.reader.split(k, offsets))
        return conjunction(conditions) if conditions else None

    def element(index: Index, read: Sequence[t.Expr]) -> t.Expr:
        return frame.reader.at(x, (*place.result[:2], *place.line, frame.reader.position(index[1] - begin)))

    def write(index: Index, read: Sequence[t.Expr]) -> None:
        full, total = (*place.result, index[1]), read[0]
        frame.write(node.result, full, pooling.average(frame, full, total) if fold.op is ops.sum else total)

    def source(*i: Any) -> Any:
        return blocks.call(reductions.accumulator(x.dtype), i, element)

    lines = blocks.fold("line", (count, size), [math.prod(offsets)], fold, source)
    # Vectors of every second element of a line are shuffled once, not once for each column of a window.
    in_halves = line.stride == 2 and x.dtype is float32 and line.kernel <= FEW
    halves = blocks.split_in_halves("halves", lines, (count, 2, size // 2)) if in_halves else None

    def column(row: Any, window: Any, k: Any) -> Any:
        offset = k * line.dilation + (begin - line.before)
        if halves is None:
            return lines(row, window * line.stride + offset)
        return halves(row, offset % 2, window + offset // 2)

    def reads(row: Any, window: Any) -> list[Any]:
        # Both ends of the line, so that all of it is part of its stage.
        if halves is None:
            return [windows(row, window), lines(row, 0), lines(row, size - 1)]
        return [windows(row, window), halves(row, 0, 0), halves(row, 1, size // 2 - 1)]

    windows = blocks.fold("window", (count, width), [line.kernel], fold, column)
    blocks.result("results", (count, width), write, reads)
    s = blocks.schedule()
    row, last = s.get_loops(s.get_sblock("results"))
    blocks.at_entry(s, row, enter_row)
    if machine.parallel(math.prod(shape_of(node.result))) == t.PARALLEL:
        s.parallel(row)
    _, (column_loop,) = blocks.accumulate(s, "window", blocks.vectorize(s, last, columns))
    if halves is not None:
        *_, part, element_loop = s.get_loops(blocks.within(s, "halves", row))
        s.unroll(part)
        blocks.vectorize(s, element_loop, size // 2)
    vectors, (offset_loop,) = blocks.accumulate(s, "line", row)
    blocks.limit(s, vectors, line.lanes, begin + line.image, begin // line.lanes)
    blocks.at_entry(s, offset_loop, enter_line)
    for loop, size in ((column_loop, line.kernel), (offset_loop, math.prod(offsets))):
        if size <= FEW:
            s.unroll(loop)
    return blocks.finish(s)
