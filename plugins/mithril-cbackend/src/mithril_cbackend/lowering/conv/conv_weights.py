"""The kernels of a convolution, forward and to the image, as a matrix: what is summed over, by channels.

On the way to the image, kernels are turned first, whole panels of the image's channels one after the other: in the
order in which they lie, what belongs together would come from memory piece by piece.
"""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril.base import TensorType, float32
from mithril.ir import Node, Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import Frame, Machine
from mithril_cbackend.lowering.matmul.microkernel import Matrix, copy_panel, count


def read_cycles(size: int) -> float:
    """Cycles for each of so many elements that are read again and again, from the cache that holds them."""
    return 0.06 if size < 1 << 17 else 0.1 if size < 1 << 22 else 0.45


def transposed_weights(node: Node, machine: Machine) -> list[Value]:
    """Where kernels are turned."""
    if node.op is ops.conv:
        return []
    cotangent_channels, image_channels, *sizes = shape_of(operand(node, 1))
    size = (
        cotangent_channels
        * math.prod(sizes)
        * count(image_channels, width(image_channels, machine))
        * width(image_channels, machine)
    )
    return [Value("turned", TensorType(float32, (size,)))]


def width(channels: int, machine: Machine) -> int:
    """Channels of a panel of turned kernels: those of most tiles."""
    return machine.lanes() * (1 if channels <= machine.lanes() else 2)


def transpose_weights(frame: Frame) -> None:
    """By group, panel, the cotangent's channel, element, the last one first, and the panel's channel.

    Squares, from the first elements of some channels on, reach into the next channel's elements and leave these.
    """
    node, reader, code, lanes = frame.kernel.anchor, frame.reader, frame.code, frame.machine.lanes()
    cotangent_channels, image_channels, *sizes = shape_of(operand(node, 1))
    source, target = reader.buffers[operand(node, 1)], frame.outputs[frame.kernel.scratch[-1]]
    elements, columns = math.prod(sizes), width(image_channels, frame.machine)
    groups, panels = node.attributes["groups"], count(image_channels, columns)
    excess = -elements % lanes  # of the last square
    squares = max(0, image_channels * elements - excess) // (elements * lanes) if elements > 1 and lanes > 1 else 0

    with reader.loop("k", cotangent_channels, frame.parallel(cotangent_channels * image_channels * elements)) as k:
        group, channel_in_group = reader.split(k, (groups, cotangent_channels // groups))
        first = k * image_channels * elements

        def offset_of(channel: Any, element: Any) -> Any:
            panel, lane = reader.split(channel, (panels, columns))
            row = (group * panels + panel) * (cotangent_channels // groups) + channel_in_group
            row = row * elements + (elements - 1 - element)
            return row * columns + lane

        with reader.loop("v", squares) as v:
            channel = v * lanes
            for begin in range(0, elements, lanes) if squares else ():
                square = code.alloc("square", lanes * lanes, "float32")
                start = first + channel * elements + begin
                code.transpose(lanes, source, start, elements, square, 0, lanes)
                for e in range(min(lanes, elements - begin)):
                    offset = offset_of(channel, begin + e)
                    with reader.loop("j", lanes, t.VECTORIZED) as j:
                        code.store(target, offset + j, t.load(square, e * lanes + j))
        remaining = image_channels - squares * lanes
        with reader.nest("ec", (elements, remaining)) as (e, c):
            channel = squares * lanes + c
            code.store(target, offset_of(channel, e), t.load(source, first + channel * elements + e))


class WeightMatrix:
    """Of groups with so many channels of the result and of the image, and elements of a kernel."""

    covers_kernel = True  # elements of a kernel are summed over

    def __init__(self, frame: Frame, out_channels: int, inner: int, elements: int) -> None:
        self.frame, self.out_channels, self.channels, self.elements = frame, out_channels, inner, elements
        self.depth = inner * elements
        self.forward = frame.kernel.anchor.op is ops.conv
        self.columns = width(out_channels, frame.machine)

    @property
    def inner(self) -> tuple[int, ...]:
        """What is summed over."""
        return (self.depth,) if self.forward else (self.channels, self.elements)

    def weight(self, group: Any, channel: Any, *index: Any) -> t.Expr:
        """An element: forward by number, to the image by channel and element, the last one first."""
        if self.forward:
            buffer = self.frame.reader.buffers[operand(self.frame.kernel.anchor, 1)]
            return t.load(buffer, (group * self.out_channels + channel) * self.depth + index[0])
        return self.transposed(group, channel, *index)

    def transposed(self, group: Any, channel: Any, cotangent_channel: Any, element: Any) -> t.Expr:
        """An element where ``turn`` has laid it."""
        elements = math.prod(shape_of(operand(self.frame.kernel.anchor, 1))[2:])
        panel, lane = self.frame.reader.split(channel, (count(self.out_channels, self.columns), self.columns))
        row = (group * count(self.out_channels, self.columns) + panel) * self.channels + cotangent_channel
        row = row * elements + element
        return t.load(self.frame.outputs[self.frame.kernel.scratch[-1]], row * self.columns + lane)

    def panel(self, group: Any, first: Any, width: int, spare: Matrix) -> Matrix:
        """The columns of ``width`` channels, the first of a panel: as they have been turned, or copied."""
        if not self.forward and self.covers_kernel and spare.row == self.columns:
            start = group * (count(self.out_channels, self.columns) * self.columns) + first
            return Matrix(self.frame.outputs[self.frame.kernel.scratch[-1]], start * self.depth, spare.row, 1)
        self.copy(group, first, width, spare)
        return spare

    def copy(self, group: Any, first: Any, width: int, panel: Matrix) -> None:
        """The columns of ``width`` channels."""
        reader, matrix = self.frame.reader, None
        if self.forward:
            buffer = reader.buffers[operand(self.frame.kernel.anchor, 1)]
            start = (group * self.out_channels + first) * self.depth
            matrix = Matrix(buffer, start, 1, self.depth)

        def element(k: Any, j: Any) -> t.Expr:
            index = (k,) if self.forward else reader.split(k, self.inner)
            return self.weight(group, first + j, *index)

        copy_panel(self.frame, element, matrix, self.depth, width, panel)
