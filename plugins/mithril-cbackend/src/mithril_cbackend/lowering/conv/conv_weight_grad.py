"""Weight gradient of a convolution: windows times cotangents, as a matrix product summed over pixels.

The cotangents are transposed first, so that vectors run over channels. Windows are read from the padded image without
packing: each row of a tile is one element of the kernel for one input channel. Groups with too few channels are
vectorized over pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mithril.graph import Node, TensorType, Value, float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.conv.padding import Layout, layout_of, overread, pad
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.matmul.microkernel import Matrix, Tile, copy_packed_block, count, multiply, tile_for

# 25 sums leave registers for the cotangents and one for the pixels (32 with AVX-512).
ACCUMULATORS = 25  # vectors of accumulators that fit the registers
CACHED_PIXELS = 320  # pixels whose cotangents, of a packed block of channels, fit the L1 cache


@dataclass(frozen=True)
class Plan:
    """Blocking of the product [depth, pixels] @ [pixels, out_channels] per group, by slabs of rows."""

    batch: int
    groups: int
    out_channels: int  # channels of a group of the cotangent
    inner: int  # channels of a group of the image
    layout: Layout

    @property
    def depth(self) -> int:
        """Elements of the kernel of one output channel."""
        return self.inner * math.prod(self.layout.kernel)

    @property
    def pixels(self) -> int:
        return math.prod(self.layout.result)

    @property
    def rows(self) -> int:
        """Rows of the cotangent in a slab."""
        height, *rest = self.layout.result
        return max(
            (r for r in range(1, height + 1) if height % r == 0 and r * math.prod(rest) <= CACHED_PIXELS), default=1
        )

    @property
    def slabs(self) -> int:
        return self.layout.result[0] // self.rows

    def tile(self, machine: Machine) -> Tile:
        return tile_for(self.depth, self.out_channels, machine)

    def packed_blocks(self, machine: Machine) -> int:
        """Return the number of packed blocks of a group."""
        return count(self.out_channels, self.tile(machine).columns)

    def uses_matmul(self, machine: Machine) -> bool:
        """Whether there are enough channels to vectorize over."""
        # With fewer channels than half a vector more than half of each product would be padding.
        return 2 * self.out_channels >= machine.lanes()

    def scratch(self, machine: Machine) -> list[Value]:
        """Return the padded image with transposed cotangents and sums, or with cotangents in the padded layout."""
        lanes, images = machine.lanes(), self.batch * self.groups
        sizes = {"padded": images * self.inner * self.layout.channel + overread(self.layout, lanes)}
        if self.uses_matmul(machine):
            columns = self.groups * self.packed_blocks(machine) * self.tile(machine).columns
            sizes |= {"turned": columns * self.batch * self.pixels, "sums": columns * self.depth}
        else:
            sizes["weighted"] = images * self.out_channels * count(self.layout.pixels, lanes) * lanes
        return [Value(n, TensorType(float32, (size,))) for n, size in sizes.items()]

    def write(self, frame: KernelBuilder) -> None:
        (Products if self.uses_matmul(frame.machine) else Dots)(frame, self).write()


def plan_of(node: Node) -> Plan:
    out_channels, in_channels = shape_of(node.result)[:2]
    groups, batch = node.attributes["groups"], shape_of(operand(node))[0]
    return Plan(batch, groups, out_channels // groups, in_channels, layout_of(node))


class Products:
    """Loops over packed blocks of channels, slabs and tiles."""

    def __init__(self, frame: KernelBuilder, plan: Plan) -> None:
        self.frame, self.plan, self.reader, self.code = frame, plan, frame.reader, frame.code
        self.x, self.g = operand(frame.kernel.anchor), operand(frame.kernel.anchor, 1)
        self.tile, self.lanes = plan.tile(frame.machine), frame.machine.lanes()
        self.padded, self.transposed, self.sums = (frame.outputs[v] for v in frame.kernel.scratch)

    def write(self) -> None:
        p, frame, columns = self.plan, self.frame, self.tile.columns
        work = p.batch * p.groups * p.out_channels * p.depth * p.pixels // PRODUCTS
        pad(frame, p.layout, self.x, self.padded, p.groups * p.inner, overread(p.layout, self.lanes))
        full_packed_blocks, rest = divmod(p.out_channels, columns)
        for first, packed_blocks, width in ((0, full_packed_blocks, columns), (full_packed_blocks, 1, rest)):
            if not packed_blocks or not width:
                continue
            with frame.share("turn", p.groups * packed_blocks * p.batch, work) as (_, item):
                group, number, image = self.reader.split(item, (p.groups, packed_blocks, p.batch))
                self.transpose(group, number + first, image, width)
            parts = self.parts(packed_blocks, work)
            with frame.share("packed_block", p.groups * packed_blocks * parts, work) as (_, item):
                group, number, part = self.reader.split(item, (p.groups, packed_blocks, parts))
                self.packed_block(group, number + first, part * (p.depth // parts), p.depth // parts, width)

    def parts(self, packed_blocks: int, work: int) -> int:
        """Return the number of parts of the windows, one per thread if there are too few packed blocks."""
        p = self.plan
        threads = self.frame.workers(work, p.groups * packed_blocks * p.depth)
        return threads if p.groups * packed_blocks < threads and p.depth % (threads * self.tile.rows) == 0 else 1

    def cotangents(self, group: Any, number: Any, image: Any, pixel: Any = 0) -> Matrix:
        """Return a packed block of cotangents, [pixels, channels], of one image from a pixel on."""
        p, columns = self.plan, self.tile.columns
        packed_block = group * p.packed_blocks(self.frame.machine) + number
        start = ((packed_block * p.batch + image) * p.pixels + pixel) * columns
        return Matrix(self.transposed, start, columns, 1)

    def transpose(self, group: Any, number: Any, image: Any, width: int) -> None:
        p = self.plan
        channel = group * p.out_channels + number * self.tile.columns
        start = (image * (p.groups * p.out_channels) + channel) * p.pixels
        source = Matrix(self.reader.buffers[self.g], start, 1, p.pixels)
        copy_packed_block(self.frame, source.element, source, p.pixels, width, self.cotangents(group, number, image))

    def packed_block(self, group: Any, number: Any, first: Any, depth: int, width: int) -> None:
        """Sum the gradients of a packed block of channels over slabs and images, then store them transposed."""
        p, reader, columns = self.plan, self.reader, self.tile.columns
        packed_block = group * p.packed_blocks(self.frame.machine) + number
        sums = Matrix(self.sums, (packed_block * p.depth + first) * columns, columns, 1)
        # A single block stores its sums directly, without clearing and adding to them.
        accumulates = p.batch * p.slabs > 1
        if accumulates:
            with reader.loop("i", depth) as i, reader.loop("j", columns) as j:
                self.code.store(self.sums, sums.offset(i, j), t.const(0, "float32"))

        def add(row: Any, column: Any, element: t.Expr) -> None:
            offset = sums.offset(row, column)
            self.code.store(self.sums, offset, t.load(self.sums, offset) + element if accumulates else element)

        with reader.loop("image", p.batch) as image, reader.loop("slab", p.slabs) as slab:
            start = (image * p.groups + group) * p.inner

            def window(row: Any, *pixel: Any) -> t.Expr:
                channel, *element = reader.split(first + row, (p.inner, *p.layout.kernel))
                base = (start + channel) * p.layout.channel + p.layout.offset(tuple(element))
                pixel_offset = p.layout.rows((slab * p.rows + pixel[0], *pixel[1:]))
                return self.code.let(t.load(self.padded, base + pixel_offset), "x")

            rest = math.prod(p.layout.result[1:])
            cotangents = self.cotangents(group, number, image, slab * (p.rows * rest))
            inner = (p.rows, *p.layout.result[1:])
            multiply(self.frame, depth, inner, self.tile, window, cotangents, width, add, True)
        self.store(group, number, first, sums, depth, width)

    def store(self, group: Any, number: Any, first: Any, sums: Matrix, depth: int, width: int) -> None:
        """Store the sums of a packed block transposed: whole squares in registers, the remainder by elements."""
        p, reader, lanes = self.plan, self.reader, self.lanes
        (result,) = self.frame.kernel.outputs
        channel = group * p.out_channels + number * self.tile.columns
        target = Matrix(self.frame.outputs[result], channel * p.depth + first, p.depth, 1)
        full_width, full_depth = (n // lanes * lanes if lanes > 1 else 0 for n in (width, depth))
        if full_width and full_depth:
            with reader.loop("r", full_width // lanes) as r, reader.loop("s", full_depth // lanes) as s:
                i, j = r * lanes, s * lanes
                self.code.transpose(
                    lanes, self.sums, sums.offset(j, i), sums.row, target.buffer, target.offset(i, j), target.row
                )
        for begin, end, left, right in ((0, full_width, full_depth, depth), (full_width, width, 0, depth)):
            with reader.loop("i", end - begin) as i, reader.loop("j", right - left) as j:
                row, column = i + begin, j + left
                self.code.store(target.buffer, target.offset(row, column), sums.element(column, row))


class Dots:
    """Gradients for few channels, vectorized over pixels: dot products for all elements of the kernel at once."""

    def __init__(self, frame: KernelBuilder, plan: Plan) -> None:
        self.frame, self.plan, self.reader, self.code = frame, plan, frame.reader, frame.code
        self.x, self.g = operand(frame.kernel.anchor), operand(frame.kernel.anchor, 1)
        self.lanes = frame.machine.lanes()
        self.padded, self.weighted = (frame.outputs[v] for v in frame.kernel.scratch)
        self.steps = count(plan.layout.pixels, self.lanes)

    def write(self) -> None:
        p, frame, reader = self.plan, self.frame, self.reader
        pad(frame, p.layout, self.x, self.padded, p.groups * p.inner, overread(p.layout, self.lanes))
        # In the padded layout a product of pixels needs no bounds: between the rows the cotangent is 0.
        self.spread_cotangent()
        num_rows, num_columns = divisor(p.out_channels), divisor(p.inner)
        num_taps = ACCUMULATORS // (num_rows * num_columns)
        work = p.batch * p.groups * p.out_channels * p.depth * p.layout.pixels // PRODUCTS
        grid = (p.groups, p.out_channels // num_rows, p.inner // num_columns)
        with reader.loop("block", math.prod(grid), frame.parallel(work)) as block:
            group, r, c = reader.split(block, grid)
            with reader.several("abc", p.layout.kernel, num_taps) as taps:
                self.block(group, r * num_rows, c * num_columns, num_rows, num_columns, taps)

    def block(self, group: Any, first: Any, column: Any, num_rows: int, num_columns: int, taps: list[Index]) -> None:
        p, reader, code, lanes = self.plan, self.reader, self.code, self.lanes
        cells = [(r, c, tap) for r in range(num_rows) for c in range(num_columns) for tap in taps]
        total = code.alloc("total", len(cells) * lanes, "float32")
        for k in range(len(cells)):
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                code.store(total, j + k * lanes, t.const(0, "float32"))
        with reader.loop("image", p.batch) as image, reader.loop("p", self.steps) as step:
            lead = (image * p.groups + group) * p.out_channels + first
            start = (image * p.groups + group) * p.inner + column
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                pixel = step * lanes + j
                rows = [(lead + r) * (self.steps * lanes) + pixel for r in range(num_rows)]
                cotangents = [code.let(t.load(self.weighted, row), "g") for row in rows]
                for k, (r, c, tap) in enumerate(cells):
                    base = (start + c) * p.layout.channel + p.layout.offset(tap)
                    product = cotangents[r] * t.load(self.padded, base + pixel)
                    slot = j + k * lanes
                    code.store(total, slot, t.load(total, slot) + product)
        (result,) = self.frame.kernel.outputs
        for k, (r, c, tap) in enumerate(cells):
            with reader.loop("l", lanes - 1) as lane:
                other = t.load(total, lane + 1 + k * lanes)
                code.store(total, k * lanes, t.load(total, k * lanes) + other)
            channel = group * p.out_channels + first + r
            self.frame.write(result, (channel, column + c, *tap), t.load(total, k * lanes))

    def spread_cotangent(self) -> None:
        """Copy the cotangent to the flat positions of the padded image, with zeros between rows."""
        p, reader, code = self.plan, self.reader, self.code
        length, channels = self.steps * self.lanes, p.groups * p.out_channels
        with reader.loop("c", p.batch * channels, self.frame.parallel(p.batch * channels * length)) as c:
            base = c * length
            with reader.loop("i", length) as i:
                code.store(self.weighted, base + i, t.const(0, "float32"))
            index = reader.split(c, (p.batch, channels))
            with reader.nest("yxz", p.layout.result) as inner:
                code.store(self.weighted, base + p.layout.rows(inner), reader.at(self.g, (*index, *inner)))


def divisor(count: int) -> int:
    return next(k for k in (4, 3, 2, 1) if count % k == 0)
