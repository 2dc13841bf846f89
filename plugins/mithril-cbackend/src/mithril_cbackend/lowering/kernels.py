"""The kernels of a convolution, forward and to the image, as a matrix: what is summed over, by channels."""

from __future__ import annotations

from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.frame import Frame
from mithril_cbackend.lowering.panels import Matrix, copy_panel
from mithril_cbackend.lowering.reader import operand


class Kernels:
    """Of ``groups`` groups with so many channels of the result and of the image, and elements of a kernel."""

    def __init__(self, frame: Frame, made: int, inner: int, elements: int) -> None:
        self.frame, self.made, self.channels, self.elements = frame, made, inner, elements
        self.depth = inner * elements
        self.forward = frame.kernel.anchor.op.name == "conv"

    @property
    def inner(self) -> tuple[int, ...]:
        """What is summed over."""
        return (self.depth,) if self.forward else (self.channels, self.elements)

    def weight(self, group: Any, channel: Any, *at: Any) -> t.Expr:
        """An element: forward by number, to the image by channel and element, turned around."""
        buffer = self.frame.reader.buffers[operand(self.frame.kernel.anchor, 1)]
        if self.forward:
            return t.load(buffer, t.iadd(t.imul(t.iadd(t.imul(group, self.made), channel), self.depth), at[0]))
        row = t.iadd(t.imul(t.iadd(t.imul(group, self.channels), at[0]), self.made), channel)
        return t.load(buffer, t.iadd(t.imul(row, self.elements), t.isub(self.elements - 1, at[1])))

    def copy(self, group: Any, first: Any, width: int, panel: Matrix) -> None:
        """The columns of ``width`` channels."""
        reader, matrix = self.frame.reader, None
        if self.forward:
            buffer = reader.buffers[operand(self.frame.kernel.anchor, 1)]
            start = t.imul(t.iadd(t.imul(group, self.made), first), self.depth)
            matrix = Matrix(buffer, start, 1, self.depth)

        def element(k: Any, j: Any) -> t.Expr:
            at = (k,) if self.forward else reader.split(k, self.inner)
            return self.weight(group, t.iadd(first, j), *at)

        copy_panel(self.frame, element, matrix, self.depth, width, panel)
