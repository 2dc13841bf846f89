"""Winograd convolution F(2x2, 3x3), forward and for the input gradient: 16 products instead of 36.

A tile of 2x2 results depends on 4x4 pixels. Pixels and kernels are transformed to sixteen values each, whose products
are summed over the channels by sixteen matrix products; the sums are transformed back. With 2x2 tiles the result is
as accurate as direct sums; larger tiles would exceed the tolerance. An infinite pixel gives infinities or nan only
where direct products would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mithril import ops
from mithril.graph import Node, TensorType, Value, float32, is_static
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.conv.conv_weights import WeightMatrix, read_cycles, stream_cycles
from mithril_cbackend.lowering.conv.image_blocks import (
    Name,
    at_run_time,
    block_at,
    cut,
    last_tiles,
    least,
    named,
    several,
)
from mithril_cbackend.lowering.conv.padding import Layout, layout_of, pad
from mithril_cbackend.lowering.element.element_reader import operand, shape_of, typical
from mithril_cbackend.lowering.element.elementwise import aligned_values, inner_loop, merge
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.matmul.microkernel import Matrix, Tile, count, multiply, tile_for
from mithril_cbackend.lowering.packings import Packing

SIDE = 4  # side of an input tile, in pixels
POINTS = SIDE * SIDE
TARGETS = (16, 32, 64)  # tiles of a block of symbolic images: with room for more, constant strides are long
Numbers = list[t.Expr]


@dataclass(frozen=True)
class Plan:
    """Blocking of a convolution: rows of tiles of one image, or several images."""

    batch: int
    out_channels: int  # channels of the result
    inner: int  # channels of the image
    layout: Layout
    rows: Any  # rows of tiles in a block
    images: Any  # images in a block
    backward: bool  # gradient of the image

    def __str__(self) -> str:
        return f"winograd, {self.rows} rows of {self.images}"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles in an image."""
        height, width = self.layout.result
        return count(height, 2), count(width, 2)

    @property
    def tiles(self) -> Any:
        """Tiles in a block."""
        return self.images * self.rows * self.grid[1]

    @property
    def blocks(self) -> int:
        return count(self.batch, self.images) * count(self.grid[0], self.rows)

    @property
    def padded(self) -> Layout:
        """Layout of the padded image, rounded up to whole tiles."""
        height, width = self.grid
        return replace(self.layout, result=(2 * height, 2 * width))

    @property
    def pixels(self) -> Any:
        """Pixels per image in a block, including the row after an odd last one."""
        return 2 * self.rows * self.layout.result[1]

    def tile(self, machine: Machine) -> Tile:
        return tile_for(self.tiles, self.out_channels, machine)

    def packed_blocks(self, machine: Machine) -> int:
        return count(self.out_channels, self.tile(machine).columns)

    def length(self, machine: Machine, tiles: Any) -> Any:
        """Return the row stride of transformed pixels: an odd number of vectors, one of them for overrun."""
        return (count(tiles + machine.lanes(), machine.lanes()) | 1) * machine.lanes()

    # Each of the sixteen matrices is followed by one unused vector, which avoids cache-set conflicts.
    def point(self, machine: Machine, tiles: Any) -> Any:
        return self.inner * self.length(machine, tiles) + machine.lanes()

    def product(self, machine: Machine, tiles: Any) -> Any:
        return tiles * self.tile(machine).columns + machine.lanes()

    def squares(self, machine: Machine, pixels: Any) -> Any:
        """Return the number of vectors of pixels per channel."""
        return count(pixels + 2, machine.lanes())

    def overread(self, machine: Machine) -> int:
        """Return the number of elements after the padded image that vector loads may read."""
        return 4 * machine.lanes() + SIDE * self.padded.sizes[1]

    def cost(self, machine: Machine, constant_weights: bool) -> float:
        """Estimate the cycles per element of the result, on the same scale as ``im2col.Plan.cost``."""
        lanes, pixels = machine.lanes(), math.prod(self.layout.result)
        tiles, (_, tiles_per_row) = math.prod(self.grid), self.grid
        wasted = count(self.out_channels, lanes) * lanes / self.out_channels
        products = POINTS * self.inner * tiles * wasted / (2 * lanes * pixels)
        vectors = tiles * count(tiles_per_row, lanes) * lanes / tiles_per_row / lanes
        # 70 and 80 are the estimated cycles of the transforms of one vector of tiles, to and from
        # sixteen values. The plan is 1.6 to 1.8 times as fast as direct tiles (commit 429395ec); single
        # figures are not recorded.
        image = 70 * self.inner * vectors / (pixels * self.out_channels)
        back = 80 * tiles * wasted / (lanes * pixels)
        working_set, kernels = (
            self.tiles * POINTS * (self.inner + self.tile(machine).columns),
            POINTS * self.inner * self.out_channels,
        )
        traffic = 2 * working_set * self.blocks * read_cycles(working_set)
        traffic += kernels * (self.blocks - 1) * (read_cycles(kernels) - 0.05)  # sequential reads are prefetched
        # Kernels that change are transformed and packed in each run, which small images do not
        # amortize.
        packed = 0 if constant_weights else POINTS / 2 if self.backward else POINTS / 2 + 64 / lanes
        traffic += self.inner * self.out_channels * (3 + packed)
        # Sixteen values per kernel are read once, which does not pay off on 7x7 images (commit
        # 3d8ca236).
        traffic += stream_cycles(kernels, count(self.tiles, self.tile(machine).rows))
        return float(1.05 * products + image + back + traffic / (self.batch * self.out_channels * pixels) + 1)

    # -- buffers --------------------------------------------------------------------------------------------------
    def scratch(self, machine: Machine, constant_weights: bool) -> list[Value]:
        threads, lanes = machine.threads, machine.lanes()
        columns = self.tile(machine).columns
        sizes = {
            "padded": self.batch * self.inner * self.padded.channel + self.overread(machine),
            "transformed": threads * POINTS * self.point(machine, self.tiles),
            "products": threads * POINTS * self.product(machine, self.tiles),
            "pixels": threads * self.squares(machine, self.pixels) * lanes * lanes * 2,
            "kernels": 0 if constant_weights else self.packed_blocks(machine) * POINTS * self.inner * columns,
            "packed_block": 0 if constant_weights else threads * 9 * self.inner * columns,
        }
        return [Value(n, TensorType(float32, (size,))) for n, size in sizes.items()]

    def packing(self, machine: Machine) -> Packing:
        """Return the order of constant kernels, which are transformed in advance."""
        return Packing("winograd", (self.tile(machine).columns,))

    def write(self, frame: KernelBuilder, first: int = 0) -> None:
        """Write the loops; their buffers are those of the kernel from ``first`` on."""
        Winograd(frame, self, first, self, self.tiles).write()


@dataclass(frozen=True)
class OpenPlan(Plan):
    """A plan for images of symbolic sizes: its sizes are limits, and blocks are cut at run time."""

    target: int  # tiles in a block

    def __str__(self) -> str:
        return f"winograd, {self.target} tiles"

    @property
    def tiles(self) -> int:
        return self.target + self.grid[1]

    @property
    def pixels(self) -> int:
        return 4 * self.tiles

    def length(self, machine: Machine, tiles: Any) -> Any:
        return (count(tiles, machine.lanes()) + 2) * machine.lanes()

    def of(self, layout: Layout, batch: Any, name: Name = lambda n: n) -> Plan:
        """Return the plan of known sizes, or of expressions."""
        height, width = (name(count(n, 2)) for n in layout.result)
        rows, images = cut(self.target, height, width, batch, name)
        return Plan(batch, self.out_channels, self.inner, layout, rows, images, self.backward)

    def cost_of(self, layout: Layout, batch: int, machine: Machine, constant_weights: bool) -> float:
        """Estimate the cycles per element of the result for known sizes."""
        return self.of(layout, batch).cost(machine, constant_weights)

    def write(self, frame: KernelBuilder, first: int = 0) -> None:
        name = partial(named, frame)
        plan = self.of(at_run_time(self.layout, name), name(self.batch), name)

        def write(room: Any) -> None:
            Winograd(frame, plan, first, self, room).write()

        # addresses with constant strides are cheaper: a block of at most ``target`` tiles has them
        frame.reader.either(t.index(plan.grid[1]) <= self.target, lambda: write(self.target), lambda: write(plan.tiles))


def plans(node: Node, machine: Machine) -> Sequence[Plan]:
    """Return the possible plans; the list is empty unless the node is a 3x3 convolution of stride 1."""
    layout, lanes = layout_of(node), machine.lanes()
    dense = layout.stride == layout.dilation == layout.spread == (1, 1) and node.attributes["groups"] == 1
    # Of a result with one row or column half of each tile would be dropped; with less than four lanes
    # a row of pixels does not fit a vector.
    if layout.kernel != (3, 3) or not dense or lanes < SIDE or any(n in (0, 1) for n in layout.result):
        return []
    batch, inner = shape_of(operand(node))[:2]
    sizes = batch, shape_of(node.result)[1], inner, layout
    backward = node.op is ops.conv_input_grad
    if not is_static(layout.image):
        return [OpenPlan(*sizes, 1, 1, backward, target) for target in TARGETS]
    image_plan = Plan(*sizes, count(layout.result[0], 2), 1, backward)
    height = image_plan.rows
    slabs = [replace(image_plan, rows=r) for r in range(1, height + 1) if height % r == 0]
    return slabs + [replace(image_plan, images=d) for d in several(batch, math.prod(image_plan.grid))]


class Winograd:
    """Loops over blocks, packed blocks of channels and points."""

    def __init__(self, frame: KernelBuilder, plan: Plan, first: int, symbolic: Plan, room: Any) -> None:
        self.frame, self.plan, self.reader, self.code = frame, plan, frame.reader, frame.code
        self.symbolic = symbolic  # the plan whose sizes are those of the graph
        self.node, self.machine, self.lanes = frame.kernel.anchor, frame.machine, frame.machine.lanes()
        self.tile = plan.tile(self.machine)
        self.images: Any = plan.images  # of the current block
        self.rows: Any = plan.rows
        strides = (n(self.machine, room) for n in (plan.length, plan.point, plan.product))
        self.length, self.point, self.product = (named(frame, n) for n in strides)
        self.across, self.pixels_of_block = named(frame, plan.grid[1]), named(frame, plan.pixels)
        self.squares = named(frame, plan.squares(self.machine, plan.pixels))
        pixels = 4 * room if isinstance(symbolic, OpenPlan) else plan.pixels
        self.channel = named(frame, plan.squares(self.machine, pixels) * self.lanes)  # pixels with their room
        self.x, self.w = operand(self.node), operand(self.node, 1)
        self.padded, self.transformed, self.products, self.lines, self.kernels, self.packed_block_buffer = (
            frame.outputs[v] for v in frame.kernel.scratch[first : first + 6]
        )
        if self.w in frame.kernel.prepared:
            self.kernels = self.reader.buffers[frame.kernel.prepared[self.w][0]]
        self.vector = vectorizable([n for n in frame.kernel.nodes if n is not self.node])
        merge(frame, aligned_values(frame.kernel), shape_of(self.node.result), [[0], [1], [2, 3]])

    def write(self) -> None:
        p, frame, sizes = self.plan, self.frame, self.symbolic
        work = sizes.batch * p.out_channels * POINTS * p.inner * math.prod(sizes.grid) // PRODUCTS
        if self.w not in frame.kernel.prepared:
            with frame.part("winograd_kernels"):
                self.transform_kernels(work)
        pad(frame, sizes.padded, self.x, self.padded, p.inner, sizes.overread(self.machine))
        packed_blocks, columns = p.packed_blocks(self.machine), self.tile.columns
        threads = frame.workers(work, p.blocks * packed_blocks)
        is_known = isinstance(p.rows, int)
        few_blocks = is_known and typical(p.blocks) < threads
        parts = threads if few_blocks and p.out_channels % (threads * columns) == 0 else 1
        with frame.share("block", p.blocks * parts, work) as (worker, item):
            grid = (count(p.batch, p.images), count(p.grid[0], p.rows), parts)
            number, slab, part = self.reader.split(item, grid)
            image, self.images = block_at(frame, number, p.batch, p.images)
            if not is_known:
                self.rows = self.code.let(least(p.grid[0] - slab * p.rows, p.rows), "rows")
            with frame.part("winograd_image"):
                self.transform_image(worker, image, slab)
            full_packed_blocks, rest = divmod(p.out_channels // parts, columns)
            first = part * full_packed_blocks
            if full_packed_blocks:
                with self.reader.loop("packed_block", full_packed_blocks) as k:
                    self.packed_block(worker, image, slab, first + k, columns)
            if rest:
                self.packed_block(worker, image, slab, full_packed_blocks, rest)

    # -- kernels --------------------------------------------------------------------------------------------------
    def transform_kernels(self, work: int) -> None:
        """Transform kernels at run time: pack a packed block, then transform vectors of its channels."""
        p, columns = self.plan, self.tile.columns
        source, full_packed_blocks, rest = (
            WeightMatrix(self.frame, p.out_channels, p.inner, 9),
            *divmod(p.out_channels, columns),
        )
        for first, packed_blocks, width in ((0, full_packed_blocks, columns), (full_packed_blocks, 1, rest)):
            if not packed_blocks or not width:
                continue
            with self.frame.share("packed_block", packed_blocks, work) as (worker, number):
                number = number + first
                packed_block_copy = Matrix(self.packed_block_buffer, worker * (source.depth * columns), columns, 1)
                packed_block = source.packed_block(0, number * columns, width, packed_block_copy)
                with self.reader.loop("c", p.inner) as c, self.reader.loop("v", count(width, self.lanes)) as v:
                    self.transform_kernel(packed_block, number, c, v * self.lanes)

    def transform_kernel(self, packed_block: Matrix, number: Any, c: Any, lane: Any) -> None:
        p, columns = self.plan, self.tile.columns
        half = t.const(0.5, "float32")

        def transform(a: t.Expr, b: t.Expr, c: t.Expr) -> Numbers:
            outer, middle = self.name((a + c) * half), self.name(b * half)
            return [a, self.name(outer + middle), self.name(outer - middle), c]

        with self.reader.loop("j", self.lanes, t.VECTORIZED) as j:
            lane = lane + j
            first = c * 9
            weights = [[self.name(packed_block.element(first + (3 * i + k), lane)) for k in range(3)] for i in range(3)]
            for k, x in enumerate(transform_2d(transform, weights)):
                row = (number * POINTS + k) * p.inner + c
                self.code.store(self.kernels, row * columns + lane, x)

    # -- pixels ---------------------------------------------------------------------------------------------------
    def transform_image(self, worker: Any, image: Any, slab: Any) -> None:
        """Transform vectors of tiles for every channel; the next row overwrites the overrun of a row's last vector."""
        p, reader, lanes = self.plan, self.reader, self.lanes
        across, point = self.across, self.point
        channel_size, width = (named(self.frame, n) for n in (p.padded.channel, p.padded.sizes[1]))
        with reader.loop("c", p.inner) as c, reader.loop("d", self.images) as d, reader.loop("r", self.rows) as r:
            channel = (image + d) * p.inner + c
            first = channel * channel_size + (slab * p.rows + r) * (2 * width)
            row = worker * (POINTS * point) + c * self.length
            row = row + (d * p.rows + r) * across
            with reader.loop("v", count(across, lanes)) as v:
                pixels = self.code.alloc("given", POINTS * lanes, "float32")
                for i in range(SIDE):
                    line = first + i * width + v * (2 * lanes)
                    for k in (0, 2):
                        a, b = (t.load(self.padded, t.vector(line + (k + n), lanes)) for n in (0, lanes))
                        # Neighboring tiles begin at every second pixel, so that the vector for one pixel of all
                        # tiles has every second one, too.
                        for odd in (0, 1):
                            alternate = t.shuffle(a, b, range(odd, 2 * lanes, 2))
                            self.code.store(pixels, t.vector((i * SIDE + k + odd) * lanes, lanes), alternate)
                with reader.loop("j", lanes, t.VECTORIZED) as j:
                    tile = [[t.load(pixels, (i * SIDE + k) * lanes + j) for k in range(SIDE)] for i in range(SIDE)]
                    for k, x in enumerate(transform_2d(self.input_transform, tile)):
                        target = row + k * point + (v * lanes + j)
                        self.code.store(self.transformed, target, x)

    def input_transform(self, a: t.Expr, b: t.Expr, c: t.Expr, d: t.Expr) -> Numbers:
        return [self.name(x) for x in (a - c, b + c, c - b, b - d)]

    # -- products -------------------------------------------------------------------------------------------------
    def packed_block(self, worker: Any, image: Any, slab: Any, number: Any, width: int) -> None:
        """Compute a packed block of channels for all tiles of a block."""
        p, frame, reader, columns = self.plan, self.frame, self.reader, self.tile.columns
        point, product = self.point, self.product
        with frame.part("winograd_products"), reader.loop("point", POINTS) as k:
            first = worker * (POINTS * point) + k * point
            tiles = Matrix(self.transformed, first, self.length, 1)
            start = (number * POINTS + k) * (p.inner * columns)
            target = worker * (POINTS * product) + k * product

            def left(row: Any, c: Any, tiles: Matrix = tiles) -> t.Expr:
                return self.code.let(tiles.element(c, row), "x")

            def store(row: Any, column: Any, element: t.Expr, target: Any = target) -> None:
                self.code.store(self.products, target + (row * columns + column), element)

            constant = operand(self.frame.kernel.anchor, 1) in self.frame.kernel.prepared
            packed_block = Matrix(self.kernels, start, columns, 1, constant=constant)
            rows = self.rows * self.across
            last = last_tiles(rows, self.tile)
            multiply(
                self.frame, self.images * rows, (p.inner,), self.tile, left, packed_block, width, store, True, last
            )
        full_vectors, rest = divmod(width, self.lanes)
        first = number * columns
        if full_vectors:
            with reader.loop("v", full_vectors) as v:
                self.emit_results(worker, image, slab, first, v * self.lanes, self.lanes)
        if rest:
            self.emit_results(worker, image, slab, first, full_vectors * self.lanes, rest)

    def emit_results(self, worker: Any, image: Any, slab: Any, first: Any, lane: Any, channels: int) -> None:
        """Transform a vector of channels back to pixels and run the epilogue."""
        p, reader, lanes = self.plan, self.reader, self.lanes
        size = self.channel
        base = worker * (2 * lanes * size)
        with reader.loop("d", self.images) as d:
            with self.frame.part("winograd_pixels"):
                self.pixels(worker, d * (p.rows * self.across), lane, base)
                with reader.loop("s", self.squares) as s:
                    source_offset = base + s * (lanes * lanes)
                    target_offset = base + (s * lanes + lanes * size)
                    self.code.transpose(lanes, self.lines, source_offset, lanes, self.lines, target_offset, size)
            height, width = p.layout.result
            odd = height % 2 if isinstance(p.rows, int) else 0
            rest = height * width - slab * self.pixels_of_block  # of the image
            pixels = (
                self.pixels_of_block
                if isinstance(p.rows, int)
                else self.code.let(least(self.pixels_of_block, rest), "pixels")
            )
            with reader.loop("r", channels) as r:
                line = base + (r + lanes) * size
                channel = first + (lane + r)

                def emit(begin: Any, end: Any, line: Any = line, channel: Any = channel) -> None:
                    def emit_pixel(i: Any) -> None:
                        pixel = slab * self.pixels_of_block + (i + begin)
                        element = t.load(self.lines, line + (i + begin))
                        self.frame.emit((image + d, channel, pixel), element)

                    inner_loop(self.frame, (), end - begin, lanes if self.vector else 0, lambda at: emit_pixel(*at))

                emit(0, pixels - odd * width)
                if odd and not isinstance(slab, int):  # only the last block has no last row
                    with self.code.when(slab < p.grid[0] // p.rows - 1):
                        emit(p.pixels - width, p.pixels)

    def pixels(self, worker: Any, tile: Any, lane: Any, base: Any) -> None:
        """Write the pixels in sequence, a vector of channels each.

        The order is from right to left: in rows of odd length, the surplus pixel of the last tile is the first one of
        the next row.
        """
        p, lanes, columns = self.plan, self.lanes, self.tile.columns
        width, across, product = p.layout.result[1], self.across, self.product

        def transform(a: t.Expr, b: t.Expr, c: t.Expr, d: t.Expr) -> Numbers:
            return [self.name(self.name(a + b) + c), self.name(self.name(b - c) - d)]

        with self.reader.loop("y", self.rows) as y, self.reader.loop("x", across) as x:
            column = across - 1 - x
            row = tile + (y * across + column)
            source = worker * (POINTS * product) + (row * columns + lane)
            target = y * (2 * width) + column * 2
            with self.reader.loop("j", lanes, t.VECTORIZED) as j:
                point_values = [
                    [self.name(t.load(self.products, source + (i * SIDE + k) * product + j)) for k in range(SIDE)]
                    for i in range(SIDE)
                ]
                for k, value in enumerate(transform_2d(transform, point_values)):
                    pixel = target + (k // 2 * width + k % 2)
                    self.code.store(self.lines, base + (pixel * lanes + j), value)

    def name(self, x: t.Expr) -> t.Expr:
        return self.code.let(x)


def transform_2d(line: Callable[..., Numbers], square: Sequence[Numbers]) -> Numbers:
    """Transform a square along both axes; return its elements in row-major order."""
    half = [line(*column) for column in zip(*square, strict=True)]
    return [x for row in zip(*half, strict=True) for x in line(*row)]
