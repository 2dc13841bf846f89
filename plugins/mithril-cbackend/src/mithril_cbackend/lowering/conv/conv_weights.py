"""Kernels of a convolution or its input gradient as a matrix: contracted axes by output channels.

The input gradient transposes the kernels first, by packed blocks of the image's channels: in their original order,
elements of one packed block would have large strides in memory.
"""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril.graph import Node, TensorType, Value, float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.matmul.microkernel import Matrix, copy_packed_block, count


def read_cycles(size: int) -> float:
    """Return the cycles per element for repeated reads of ``size`` elements, by the cache that they fit."""
    # 512 KiB, the default L2 cache of ``Machine``, and 16 MiB of a larger one. The cycles are
    # estimates; no measurement of them is recorded.
    return 0.06 if size < 1 << 17 else 0.1 if size < 1 << 22 else 0.45


def stream_cycles(size: int, tiles: int = 8) -> float:
    """Return the cycles for the first read of ``size`` kernels, which is partly hidden behind products.

    Kernels beyond the L2 cache are not in it when the convolution begins; with fewer ``tiles`` of products per packed
    block of kernels, less of their read is hidden.
    """
    # 2 MiB are the L2 cache of CPUs with AMX: smaller kernels are still there from the last run.
    return 0 if size < 1 << 19 else size * (0.5 if tiles > 4 else 1.0)


def transposed_weights(node: Node, machine: Machine) -> list[Value]:
    """Return the buffer of transposed kernels, if the op needs one."""
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
    """Return the number of channels in a packed block of transposed kernels, that of most tiles."""
    return machine.lanes() * (1 if channels <= machine.lanes() else 2)


def transpose_weights(frame: KernelBuilder) -> None:
    """Transpose to [group, packed block, cotangent channel, element (reversed), channel of the packed block].

    A square of elements by channels may extend into the elements of the next channel, which are not stored.
    """
    node, reader, code, lanes = frame.kernel.anchor, frame.reader, frame.code, frame.machine.lanes()
    cotangent_channels, image_channels, *sizes = shape_of(operand(node, 1))
    source, target = reader.buffers[operand(node, 1)], frame.outputs[frame.kernel.scratch[-1]]
    elements, columns = math.prod(sizes), width(image_channels, frame.machine)
    groups, packed_blocks = node.attributes["groups"], count(image_channels, columns)
    excess = -elements % lanes  # elements of the next channel in the last square
    squares = max(0, image_channels * elements - excess) // (elements * lanes) if elements > 1 and lanes > 1 else 0

    with reader.loop("k", cotangent_channels, frame.parallel(cotangent_channels * image_channels * elements)) as k:
        group, channel_in_group = reader.split(k, (groups, cotangent_channels // groups))
        first = k * image_channels * elements

        def offset_of(channel: Any, element: Any) -> Any:
            packed_block, lane = reader.split(channel, (packed_blocks, columns))
            row = (group * packed_blocks + packed_block) * (cotangent_channels // groups) + channel_in_group
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
    """Kernels of a convolution as a matrix, per group, with ``out_channels`` columns."""

    covers_kernel = True  # all elements of the kernel are contracted

    def __init__(self, frame: KernelBuilder, out_channels: int, inner: int, elements: int) -> None:
        self.frame, self.out_channels, self.channels, self.elements = frame, out_channels, inner, elements
        self.depth = inner * elements
        self.forward = frame.kernel.anchor.op is ops.conv
        self.columns = width(out_channels, frame.machine)

    @property
    def inner(self) -> tuple[int, ...]:
        """Sizes of the contracted axes."""
        return (self.depth,) if self.forward else (self.channels, self.elements)

    def weight(self, group: Any, channel: Any, *index: Any) -> t.Expr:
        """Return an element, indexed by [depth] forward and by [channel, reversed element] backward."""
        if self.forward:
            buffer = self.frame.reader.buffers[operand(self.frame.kernel.anchor, 1)]
            return t.load(buffer, (group * self.out_channels + channel) * self.depth + index[0])
        return self.transposed(group, channel, *index)

    def transposed(self, group: Any, channel: Any, cotangent_channel: Any, element: Any) -> t.Expr:
        """Return an element of the kernels that ``transpose_weights`` stored."""
        elements = math.prod(shape_of(operand(self.frame.kernel.anchor, 1))[2:])
        packed_block, lane = self.frame.reader.split(channel, (count(self.out_channels, self.columns), self.columns))
        row = (group * count(self.out_channels, self.columns) + packed_block) * self.channels + cotangent_channel
        row = row * elements + element
        return t.load(self.frame.outputs[self.frame.kernel.scratch[-1]], row * self.columns + lane)

    def packed_block(self, group: Any, first: Any, width: int, packed_block_copy: Matrix) -> Matrix:
        """Return the packed block of ``width`` channels: the transposed kernels themselves, or a copy."""
        if not self.forward and self.covers_kernel and packed_block_copy.row == self.columns:
            start = group * (count(self.out_channels, self.columns) * self.columns) + first
            return Matrix(
                self.frame.outputs[self.frame.kernel.scratch[-1]], start * self.depth, packed_block_copy.row, 1
            )
        self.copy(group, first, width, packed_block_copy)
        return packed_block_copy

    def copy(self, group: Any, first: Any, width: int, packed_block: Matrix) -> None:
        """Copy the columns of ``width`` channels to a packed block."""
        reader, matrix = self.frame.reader, None
        if self.forward:
            buffer = reader.buffers[operand(self.frame.kernel.anchor, 1)]
            start = (group * self.out_channels + first) * self.depth
            matrix = Matrix(buffer, start, 1, self.depth)

        def element(k: Any, j: Any) -> t.Expr:
            index = (k,) if self.forward else reader.split(k, self.inner)
            return self.weight(group, first + j, *index)

        copy_packed_block(self.frame, element, matrix, self.depth, width, packed_block)
