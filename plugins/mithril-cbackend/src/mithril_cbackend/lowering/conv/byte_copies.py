"""Copies of images whose channels are neighbors: padded, or of the pixels that a kernel of one pixel reads."""

from __future__ import annotations

from typing import Any

from mithril.graph import Size, uint32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.conv.byte_plan import Plan
from mithril_cbackend.lowering.element.element_reader import operand
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder
from mithril_cbackend.lowering.element.storage_dtypes import stored


def copy(frame: KernelBuilder, plan: Plan, source: t.Buffer, target: t.Buffer, n: Any) -> None:
    """Copy image ``n``."""
    Copy(frame, plan, source, target).write(n)


class Copy:
    def __init__(self, frame: KernelBuilder, plan: Plan, source: t.Buffer, target: t.Buffer) -> None:
        self.frame, self.plan, self.source, self.target = frame, plan, source, target
        dtype = operand(frame.kernel.anchor).dtype
        self.pixel = plan.image[3] * (1 if dtype is uint32 else plan.use.per)  # elements
        self.lanes = frame.machine.lanes(dtype.bits)
        zero = frame.kernel.anchor.attributes["zero"]
        self.zero = t.const(zero * 0x01010101 if dtype is uint32 else zero, stored(dtype))

    def write(self, n: Any) -> None:
        p, reader = self.plan, self.frame.reader
        (height, width), (top, left) = p.size, p.before
        image = n * (p.image[1] * p.image[2] * self.pixel)
        if p.stride != p.full_stride:
            with reader.loop("y", height) as y, reader.loop("x", width) as x:
                start = image + (y * p.full_stride[0] * p.image[2] + x * p.full_stride[1]) * self.pixel
                self.line(self.pixel, (y * width + x) * self.pixel, start)
            return
        rows, columns = self.least(p.image[1], height - top), self.least(p.image[2], width - left)
        line = width * self.pixel
        right, bottom = width - left - columns, height - top - rows
        if width == p.image[2] and left == 0:
            self.line(rows * line, top * line, image)
        else:
            with reader.loop("y", rows) as y:
                begin = (y + top) * line
                self.line(left * self.pixel, begin)
                self.line(columns * self.pixel, begin + left * self.pixel, image + y * (p.image[2] * self.pixel))
                self.line(right * self.pixel, begin + (left + columns) * self.pixel)
        self.line(top * line, 0)
        self.line(bottom * line, (top + rows) * line)

    def least(self, size: Size, limit: Size) -> Any:
        """Return the smaller one of two sizes, of which the image has one and the convolution reads the other."""
        difference = size - limit
        if isinstance(difference, int):
            return size if difference <= 0 else limit
        return self.frame.code.let(t.select(t.index(size) <= limit, t.index(size), t.index(limit)), "pixels")

    def line(self, size: Any, place: Any, start: Any = None) -> None:
        """Copy elements that follow each other, or store zeros; the last vector may repeat elements."""
        if not isinstance(size, int):
            self.long_line(t.index(size), place, start)
            return
        lanes = self.lanes
        while lanes > max(size, 1):
            lanes //= 2
        vectors, rest = divmod(size, lanes)
        if vectors:
            with self.frame.reader.loop("v", vectors) as v:
                self.vector(lanes, place, start, v * lanes)
        if rest:
            self.vector(lanes, place, start, size - lanes)

    def long_line(self, size: t.Expr, place: Any, start: Any) -> None:
        """Copy a number of elements that is known at run time."""
        reader, lanes = self.frame.reader, self.lanes
        with reader.loop("v", size // lanes) as v:
            self.vector(lanes, place, start, v * lanes)
        if lanes == 1:
            return

        def repeated() -> None:
            self.vector(lanes, place, start, reader.position(size - lanes))

        def single() -> None:
            with reader.loop("i", size) as i:
                self.vector(1, place, start, i)

        with self.frame.code.when(size % lanes > 0), reader.loop("rest", 1):
            reader.either(size > lanes, repeated, single)

    def vector(self, lanes: int, place: Any, start: Any, offset: Any) -> None:
        with self.frame.reader.loop("j", lanes, t.VECTORIZED) as j:
            element = self.zero if start is None else t.load(self.source, start + (offset + j))
            self.frame.code.store(self.target, place + (offset + j), element)
