"""The kernels of a convolution, forward and to the image, as a matrix: what is summed over, by channels."""

from __future__ import annotations

import math
from typing import Any

from mithril.graph import Node, Value
from mithril.types import TensorType, float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.frame import Frame
from mithril_cbackend.lowering.panels import Matrix, copy_panel
from mithril_cbackend.lowering.reader import operand, shape_of


def turning(node: Node) -> list[Value]:
    """For the way to the image: where kernels lie with the image's channels one after the other."""
    size = math.prod(shape_of(operand(node, 1)))
    return [] if node.op.name == "conv" else [Value("turned", TensorType(float32, (size,)))]


def turn(frame: Frame) -> None:
    """Lay them so, kernel by kernel: whatever reads them later reads whole vectors."""
    w = operand(frame.kernel.anchor, 1)
    given, made, *sizes = shape_of(w)
    source, target = frame.reader.buffers[w], frame.outputs[frame.kernel.scratch[-1]]
    elements = math.prod(sizes)
    shared = {0: frame.parallel(given * made * elements)}
    with frame.reader.nest("kec", (given, elements, made), shared) as (k, e, c):
        row = t.imul(k, made * elements)
        element = t.load(source, t.iadd(row, t.iadd(t.imul(c, elements), e)))
        frame.code.store(target, t.iadd(row, t.iadd(t.imul(e, made), c)), element)


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
        """An element: forward by number, to the image by channel and element, the last one first."""
        if self.forward:
            buffer = self.frame.reader.buffers[operand(self.frame.kernel.anchor, 1)]
            return t.load(buffer, t.iadd(t.imul(t.iadd(t.imul(group, self.made), channel), self.depth), at[0]))
        return self.turned(t.iadd(t.imul(group, self.channels), at[0]), t.isub(self.elements - 1, at[1]), channel)

    def turned(self, given: Any, element: Any, channel: Any) -> t.Expr:
        """For the way to the image: of a channel of the cotangent, as ``turn`` has laid it."""
        row = t.iadd(t.imul(given, math.prod(shape_of(operand(self.frame.kernel.anchor, 1))[2:])), element)
        buffer = self.frame.outputs[self.frame.kernel.scratch[-1]]
        return t.load(buffer, t.iadd(t.imul(row, self.made), channel))

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
