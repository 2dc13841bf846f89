"""Convolutions and their input gradients as matrix products of kernels with im2col columns.

Plans are vectorized over pixels, with kernels read unpacked, or, for few pixels, over channels, with kernels packed
into packed blocks. Unlike direct tiles, they compute nothing after the ends of an image's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from mithril import ops
from mithril.graph import Node, TensorType, Value, float32, is_static
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.conv.conv_weights import WeightMatrix, read_cycles, stream_cycles
from mithril_cbackend.lowering.conv.image_blocks import (
    TARGETS,
    Name,
    at_run_time,
    block_at,
    cut,
    last_tiles,
    least,
    named,
    several,
)
from mithril_cbackend.lowering.conv.padding import Layout, layout_of, overread, pad
from mithril_cbackend.lowering.element.element_reader import operand, shape_of, typical
from mithril_cbackend.lowering.element.elementwise import aligned_values, merge, merged
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.matmul.matmul import segments
from mithril_cbackend.lowering.matmul.microkernel import (
    Left,
    Matrix,
    PackedRows,
    PartialSums,
    Tile,
    copy_packed_block,
    count,
    multiply,
    multiply_tile,
    tile_for,
    tiles,
)
from mithril_cbackend.lowering.packings import Packing

# Elements of the contracted axis per block. A vector of AVX-512 for each takes 24 KiB of the L1 cache; no measurement
# of the number is recorded.
BLOCK = 384
CACHED_ELEMENTS = 1 << 18  # elements of columns that fit the L2 cache together with the kernels


@dataclass(frozen=True)
class Plan:
    """Blocking of the product [out_channels, depth] @ [depth, pixels] per image, group and slab of rows."""

    batch: int
    groups: int
    out_channels: int  # channels of a group of the result
    inner: int  # channels of a group of the image
    layout: Layout
    rows: Any  # rows of the result in a slab
    images: Any  # images in a slab
    by_channel: bool  # vectorized over channels, not pixels
    backward: bool  # gradient of the image

    def __str__(self) -> str:
        return f"{'channels' if self.by_channel else 'pixels'}, {self.rows} rows of {self.images}"

    @property
    def elements(self) -> int:
        return math.prod(self.layout.kernel)

    @property
    def depth(self) -> int:
        return self.inner * self.elements

    @property
    def reads_image(self) -> bool:
        """Whether the image needs no padding and its pixels are the columns (1x1 kernels)."""
        layout = self.layout
        fits = layout.sizes == layout.image == layout.result and not any(layout.before)
        return self.elements == 1 and fits and self.images == 1

    @property
    def image_pixels(self) -> Any:
        """Pixels of an image in a slab."""
        return self.rows * math.prod(self.layout.result[1:])

    @property
    def pixels(self) -> Any:
        """Pixels of a slab."""
        return self.images * self.image_pixels

    @property
    def slabs(self) -> Any:
        return count(self.layout.result[0], self.rows)

    @property
    def block(self) -> int:
        """Elements of the contracted axis that are multiplied at a time: a packed block of them fits the L1 cache."""
        blocks = count(self.depth, BLOCK)
        if self.by_channel or self.backward or blocks == 1:
            return self.depth
        return -(-self.depth // (blocks * 16)) * 16

    def sums_row(self, machine: Machine) -> int:
        """Return the row stride of the partial sums."""
        return count(self.pixels, machine.lanes()) * machine.lanes()

    def tile(self, machine: Machine) -> Tile:
        if self.by_channel:
            return tile_for(self.pixels, self.out_channels, machine)
        return tile_for(self.out_channels, self.pixels, machine)

    def length(self, machine: Machine) -> int:
        """Return the row stride of the columns: an odd number of vectors (avoids cache-set conflicts)."""
        return (count(self.pixels + machine.lanes(), machine.lanes()) | 1) * machine.lanes()

    def overread(self, machine: Machine) -> int:
        """Return the number of elements after the padded image that vector loads may read."""
        return overread(self.layout, machine.lanes())

    def cost(self, machine: Machine, constant_weights: bool) -> float:
        """Estimate the cycles per element of the result."""
        lanes, cycles, pixels = machine.lanes(), self.depth / (2 * machine.lanes()), int(self.pixels)
        working_set = self.depth * (pixels + self.tile(machine).columns)
        # reads of columns are slower if the working set exceeds the L2 cache
        # The factors are estimates on one scale for all plans. Commits 3df6dcb8 and 088970cf give the
        # reasons of the terms; which measurement chose each figure is not recorded.
        cycles *= 1 if self.reads_image or read_cycles(working_set) == read_cycles(0) else 1.2
        cycles *= (
            1.3 if self.by_channel and self.depth > BLOCK else 1
        )  # packed blocks of channels are not split into blocks
        run = self.layout.result[-1]
        columns = 0 if self.reads_image else 10 * self.depth * count(run, lanes) / run / self.out_channels
        kernels = read_cycles(self.out_channels * self.depth) * self.depth / pixels  # once per slab
        results = self.batch * self.out_channels * math.prod(self.layout.result)
        kernels += stream_cycles(self.out_channels * self.depth) / results
        if not self.by_channel:
            scattered = 2 * self.depth / pixels if self.backward else 0  # strided: stored by image channel
            return cycles * count(pixels, lanes) * lanes / pixels + columns + kernels + scattered
        packing = 0 if constant_weights or self.backward else 0.7 * self.depth / pixels
        return cycles * count(self.out_channels, lanes) * lanes / self.out_channels + columns + kernels + packing + 2.5

    def scratch(self, machine: Machine, constant_weights: bool) -> list[Value]:
        """Return the buffers: the padded image, and per thread the columns of a slab and a packed block."""
        tile, threads = self.tile(machine), machine.threads
        image = self.batch * self.groups * self.inner * self.layout.channel + self.overread(machine)
        sizes = {
            "padded": 0 if self.reads_image else image,
            "columns": 0 if self.reads_image else threads * self.depth * self.length(machine),
            "packed_block": threads * (self.depth if self.by_channel else self.block) * tile.columns,
            "sums": 0 if self.block == self.depth else threads * self.out_channels * self.sums_row(machine),
        }
        return [Value(n, TensorType(float32, (size,))) for n, size in sizes.items()]

    def packing(self, machine: Machine) -> Packing:
        """Return the order of constant kernels: packed blocks of channels, or tiles of rows."""
        tile = self.tile(machine)
        if self.by_channel:
            return Packing("channels", (self.groups, tile.columns))
        return Packing("rows", (self.groups, self.block, tile.rows))

    def write(self, frame: KernelBuilder, first: int = 0) -> None:
        """Write the loops; their buffers are those of the kernel from ``first`` on."""
        node = frame.kernel.anchor
        shape = shape_of(node.result)
        merge(frame, aligned_values(frame.kernel), shape, [[0], [1], list(range(2, len(shape)))])

        def emit(image: Any, channel: Any, pixel: Any, element: t.Expr) -> None:
            frame.emit((image, channel, pixel), element)

        vector = vectorizable([n for n in frame.kernel.nodes if n is not node])
        kernels = WeightMatrix(frame, self.out_channels, self.inner, self.elements)
        Columns(frame, self.cut(frame), kernels, emit, vector, first, self).write()

    def cut(self, frame: KernelBuilder) -> Plan:
        """Return the plan whose sizes are those of the loops."""
        return self


@dataclass(frozen=True)
class OpenPlan(Plan):
    """A plan for images of symbolic sizes: its sizes are limits, and slabs are cut at run time."""

    target: int  # pixels in a slab

    def __str__(self) -> str:
        return f"{'channels' if self.by_channel else 'pixels'}, {self.target} pixels"

    @property
    def pixels(self) -> Any:
        return self.target + math.prod(self.layout.result[1:])

    def length(self, machine: Machine) -> Any:
        return (count(self.pixels, machine.lanes()) + 2) * machine.lanes()

    def of(self, layout: Layout, batch: Any, name: Name = lambda n: n) -> Plan:
        """Return the plan of known sizes, or of expressions."""
        # Pixels of several images are not contiguous in the result, which plans by pixels store as
        # vectors.
        several_images = self.by_channel and not self.reads_image
        height, width = layout.result[0], name(math.prod(layout.result[1:]))
        rows, images = cut(self.target, height, width, batch if several_images else 1, name)
        sizes = self.groups, self.out_channels, self.inner
        return Plan(batch, *sizes, layout, rows, images, self.by_channel, self.backward)

    def cost_of(self, layout: Layout, batch: int, machine: Machine, constant_weights: bool) -> float:
        """Estimate the cycles per element of the result for known sizes."""
        exact = self.of(layout, batch)
        vectors = count(int(exact.pixels), machine.lanes())
        lone = 1 if self.by_channel else (vectors + 0.4 * (vectors % 2)) / vectors  # read more kernels than pairs do
        return lone * exact.cost(machine, constant_weights)

    def cut(self, frame: KernelBuilder) -> Plan:
        name = partial(named, frame)
        return self.of(at_run_time(self.layout, name), name(self.batch), name)


def plans(node: Node) -> list[Plan]:
    """Return the possible plans for a node."""
    groups, batch, channels = node.attributes["groups"], *shape_of(operand(node))[:2]
    out_channels, backward = shape_of(node.result)[1] // groups, node.op is ops.conv_input_grad
    return plans_for(batch, groups, out_channels, channels // groups, layout_of(node), backward)


def plans_for(
    batch: int, groups: int, out_channels: int, in_channels: int, layout: Layout, backward: bool
) -> list[Plan]:
    """Return the possible plans for a convolution of these sizes."""
    depth = in_channels * math.prod(layout.kernel)
    if not is_static(layout.image):
        sizes = batch, groups, out_channels, in_channels, layout, 1, 1
        targets = [n for n in TARGETS if n == TARGETS[0] or n * depth <= CACHED_ELEMENTS]
        return [OpenPlan(*sizes, by_channel, backward, target) for by_channel in (False, True) for target in targets]
    height, width = layout.result[0], math.prod(layout.result[1:])
    # Each slab reads all kernels again, which cost more than the products where slabs had few pixels
    # (commit 088970cf). With more than 128 pixels that cost is small without a second image.
    image_groups = [(height, d) for d in several(batch, 1) if d * height * width <= 128]
    slabs = [(r, 1) for r in range(1, height + 1) if height % r == 0]
    # Slabs divide the height, so that all have one size and share one piece of code.
    fitting = [(r, d) for r, d in slabs + image_groups if r * d * width * depth <= CACHED_ELEMENTS] or [(1, 1)]
    return [
        Plan(batch, groups, out_channels, in_channels, layout, r, d, by_channel, backward)
        for by_channel in (False, True)
        for r, d in fitting
        if by_channel or d == 1
    ]


def is_supported(kernel: Kernel) -> bool:
    """Whether the epilogue can be indexed by flat pixels and uses neither operand."""
    node, values = kernel.anchor, aligned_values(kernel)
    if values is None or any(v in values for v in node.operands):
        return False
    shape = shape_of(node.result)
    return [len(g) for g in merged(values, shape, breaks=(1, 2))] == [1, 1, len(shape) - 2]


Emit = Callable[[Any, Any, Any, t.Expr], None]  # image, channel, pixel, element


@dataclass(frozen=True)
class DepthBlock:
    """A block of the contracted axis; ``first`` and ``last`` are bools or expressions."""

    begin: Any
    depth: int
    first: Any
    last: Any


class Columns:
    """Loops over slabs, groups and tiles."""

    def __init__(
        self,
        frame: KernelBuilder,
        plan: Plan,
        kernels: WeightMatrix,
        emit: Emit,
        vector: bool,
        first: int = 0,
        symbolic: Plan | None = None,
    ) -> None:
        self.frame, self.plan, self.reader, self.code = frame, plan, frame.reader, frame.code
        self.symbolic = plan if symbolic is None else symbolic  # the plan whose sizes are those of the graph
        self.reads_image = self.symbolic.reads_image
        self.is_known = isinstance(plan.rows, int)
        self.kernels, self.emit, self.vector = kernels, emit, vector and not plan.by_channel
        self.x, self.w = operand(frame.kernel.anchor), operand(frame.kernel.anchor, 1)
        self.padded, self.columns, self.packed_block_buffer, self.sums = (
            frame.outputs[v] for v in frame.kernel.scratch[first : first + 4]
        )
        self.tile, self.length = plan.tile(frame.machine), named(frame, plan.length(frame.machine))
        self.lanes, self.epilogue = frame.machine.lanes(), len(frame.kernel.nodes) > 1
        self.images: Any = plan.images  # of the current slab
        self.rows: Any = plan.rows

    def write(self) -> None:
        p, frame, reader, sizes = self.plan, self.frame, self.reader, self.symbolic
        if not self.reads_image:
            pad(frame, sizes.layout, self.x, self.padded, p.groups * p.inner, sizes.overread(frame.machine))
        pixels = math.prod(sizes.layout.result)
        work = sizes.batch * p.groups * p.out_channels * p.depth * pixels // PRODUCTS
        items = count(p.batch, p.images) * p.groups * p.slabs
        threads = frame.workers(work, p.out_channels)
        # Threads share channels only where slabs do not suffice, because each part packs the columns of
        # its slab again.
        few_items = self.is_known and typical(items) < threads
        parts = threads if few_items and p.out_channels % (threads * self.step) == 0 else 1
        with frame.share("slab", items * parts, work) as (worker, item):
            number, group, slab, part = reader.split(item, (count(p.batch, p.images), p.groups, p.slabs, parts))
            image, self.images = block_at(frame, number, p.batch, p.images)
            if not self.is_known:
                self.rows = self.code.let(least(p.layout.result[0] - slab * p.rows, p.rows), "rows")
            if not self.reads_image:
                self.pack_columns(worker, image, group, slab)
            first = part * (p.out_channels // parts)
            multiply_slab = self.channels if p.by_channel else self.pixels
            multiply_slab(worker, image, group, slab, first, p.out_channels // parts)

    @property
    def step(self) -> int:
        """Channels that are computed together."""
        return self.tile.columns if self.plan.by_channel else self.tile.rows

    def pack_columns(self, worker: Any, image: Any, group: Any, slab: Any) -> None:
        """Pack columns: the shifted pixels for every channel and element of the kernel, without borders.

        Whole vectors are copied; the next row overwrites their surplus.
        """
        p, reader, code = self.plan, self.reader, self.code
        layout, base = p.layout, worker * (p.depth * self.length)
        *outer, run = layout.result if len(layout.result) > 1 else (1, self.rows)
        outer_sizes = (self.rows, *outer[1:]) if len(layout.result) > 1 else ()
        with reader.loop("c", p.inner) as c, reader.loop("d", self.images) as d:
            channel = (image + d) * (p.groups * p.inner) + (group * p.inner + c)
            source = channel * layout.channel
            with reader.nest("abc", layout.kernel) as tap:
                row = c * p.elements + reader.flat(tap, layout.kernel)
                row = base + row * self.length + d * p.image_pixels
                offset = code.let(t.index(source + layout.offset(tap)), "offset")
                with reader.nest("yz", outer_sizes) as y:
                    start = (slab * p.rows + y[0], *y[1:], 0) if y else (slab * p.rows,)
                    source_start = offset + layout.rows(start)
                    target = row + reader.flat(y, outer_sizes) * run
                    with reader.loop("v", count(run, self.lanes)) as v, reader.loop("j", self.lanes, t.VECTORIZED) as j:
                        i = v * self.lanes + j
                        code.store(self.columns, target + i, t.load(self.padded, source_start + i))

    def source(self, worker: Any, image: Any, group: Any, slab: Any) -> Matrix:
        """Return the columns of a slab: the image itself, or the packed copy."""
        p = self.plan
        if not self.reads_image:
            return Matrix(self.columns, worker * (p.depth * self.length), self.length, 1)
        size = math.prod(p.layout.result)
        channel = (image * p.groups + group) * p.inner
        start = channel * size + slab * p.image_pixels
        return Matrix(self.reader.buffers[self.x], start, size, 1)

    def pixels(self, worker: Any, image: Any, group: Any, slab: Any, first: Any, num_channels: int) -> None:
        """Multiply a slab, vectorized over pixels."""
        for begin, blocks, depth in segments(self.plan.depth, self.plan.block):
            with self.reader.loop("part", blocks) as i:
                part = DepthBlock(begin + i * depth, depth, *self.ends(i, begin, blocks, depth))
                self.pixel_block(part, worker, image, group, slab, first, num_channels)

    def ends(self, i: Any, begin: int, blocks: int, depth: int) -> tuple[Any, Any]:
        """Return whether the i-th block of a segment is the first and the last one of the contracted axis."""
        first: Any = begin == 0
        last: Any = begin + blocks * depth == self.plan.depth
        if blocks > 1:
            first, last = first and t.equal(i, 0), last and t.equal(i, blocks - 1)
        return first, last

    def pixel_block(
        self, part: DepthBlock, worker: Any, image: Any, group: Any, slab: Any, first: Any, num_channels: int
    ) -> None:
        """Multiply a block of the contracted axis; the sums stay in a buffer until the last block."""
        p, columns = self.plan, self.tile.columns
        source = self.source(worker, image, group, slab).part(part.begin, 0)
        pixel, kernels = slab * p.pixels, self.rows_of_kernels(part, group, first)
        inner = (part.depth,) if part.depth < p.depth else self.kernels.inner

        def block(number: Any, width: Any, room: int) -> None:
            packed_block = Matrix(self.packed_block_buffer, worker * (p.block * columns), room, 1)
            # The columns are copied again, to a packed block: tiles then read one stream, which stays in
            # the L1 cache while all channels are multiplied with it.
            columns_of_packed_block = source.from_column(number * columns)
            vectors = count(width if isinstance(width, int) else room, self.lanes)
            # Rows of columns end with a spare vector.
            copied = width if self.reads_image else vectors * self.lanes
            copy_packed_block(
                self.frame, columns_of_packed_block.element, columns_of_packed_block, part.depth, copied, packed_block
            )

            def emit(row: Any, column: Any, element: t.Expr) -> None:
                channel = group * p.out_channels + (first + row)
                self.emit(image, channel, pixel + (number * columns + column), element)

            def sum_slot(row: Any, column: Any) -> tuple[t.Buffer, Any]:
                start = worker * (p.out_channels * p.sums_row(self.frame.machine)) + number * columns
                return self.sums, start + ((first + row) * p.sums_row(self.frame.machine) + column)

            sums = None if part.depth == p.depth else PartialSums(sum_slot, part.first, part.last)
            several = columns // (vectors * self.lanes) if callable(kernels) else 1  # tiles of packed rows are fixed
            for tile, rows in tiles(self.frame, num_channels, Tile(self.tile.rows * several, columns)):
                with tile as row:
                    channel = group * p.out_channels + first + row
                    self.prefetch(image, channel, rows, pixel + number * columns, width)
                    how = self.vector, sums, self.epilogue
                    multiply_tile(self.frame, row, rows, inner, kernels, packed_block, width, emit, *how)

        self.blocks(self.images * (self.rows * math.prod(p.layout.result[1:])), block)

    def rows_of_kernels(self, part: DepthBlock, group: Any, first: Any) -> Left | PackedRows:
        """Return the kernels as rows: packed if they are constant."""
        packed, depth = self.frame.kernel.prepared.get(self.w), self.plan.depth
        if packed is not None:
            start = group * (self.plan.out_channels * depth) + part.begin * self.plan.out_channels + first * part.depth
            return PackedRows(self.reader.buffers[packed[0]], start, part.depth)

        def left(row: Any, *index: Any) -> t.Expr:
            if part.depth < depth:
                index = (part.begin + index[0],)
            return self.code.let(self.kernels.weight(group, first + row, *index), "w")

        return left

    def prefetch(self, image: Any, channel: Any, rows: int, pixel: Any, width: Any) -> None:
        """Prefetch a tile of the result and of the epilogue's operands: hardware does not predict the next row."""
        kernel, reader = self.frame.kernel, self.reader
        result = kernel.anchor.result
        if self.plan.backward:
            return  # the pixels of a phase are not contiguous
        shape = reader.shape(result)
        reads = [v for v in kernel.inputs if v not in (self.x, self.w) and reader.shape(v) == shape]
        for r in range(rows):
            for first in range(0, width if isinstance(width, int) else self.tile.columns, self.lanes):
                offset = reader.flat((image, channel + r, pixel + first), shape)
                for v in reads:
                    self.code.prefetch(reader.buffers[v], offset)
                for v in kernel.outputs:
                    self.code.prefetch(self.frame.outputs[v], offset)

    def blocks(self, size: Any, block: Any) -> None:
        """Write all blocks of columns, with the number of a block, its width and that of its packed block."""
        columns, lanes = self.tile.columns, self.lanes
        full_blocks, rest = (named(self.frame, n) for n in (size // columns, size % columns))
        if not isinstance(full_blocks, int) or full_blocks:
            with self.reader.loop("block", full_blocks) as number:
                block(number, columns, columns)
        if isinstance(rest, int):
            if rest:
                block(full_blocks, rest, columns)
            return
        for low, high in pairwise((0, lanes, columns)):  # one vector, or two
            with self.code.when((rest > low) & (rest <= high)), self.reader.loop("last", 1):
                block(full_blocks, rest, high)

    def channels(self, worker: Any, image: Any, group: Any, slab: Any, first: Any, num_channels: int) -> None:
        """Multiply a slab, vectorized over channels: transposed columns times kernels."""
        p, columns, pixels_per_image = self.plan, self.tile.columns, self.plan.image_pixels
        source, packed = self.source(worker, image, group, slab), self.frame.kernel.prepared.get(self.w)

        def left(row: Any, *index: Any) -> t.Expr:
            return self.code.let(source.element(self.reader.flat(index, self.kernels.inner), row), "x")

        def block(number: Any, width: int, _: int) -> None:
            channel = first + number * columns
            if packed is not None:
                size = count(p.out_channels, columns) * columns * p.depth
                start = group * size + channel * p.depth
                packed_block = Matrix(self.reader.buffers[packed[0]], start, columns, 1, constant=True)
            else:
                packed_block_copy = Matrix(self.packed_block_buffer, worker * (columns * p.depth), columns, 1)
                packed_block = self.kernels.packed_block(group, channel, width, packed_block_copy)

            def emit(row: Any, column: Any, element: t.Expr) -> None:
                is_one = isinstance(p.images, int) and p.images == 1
                d, pixel = (0, row) if is_one else self.reader.split(row, (p.images, pixels_per_image))
                out_channel = group * p.out_channels + (channel + column)
                self.emit(image + d, out_channel, slab * pixels_per_image + pixel, element)

            last = last_tiles(pixels_per_image, self.tile)
            rows = self.images * (self.rows * math.prod(p.layout.result[1:]))
            multiply(
                self.frame,
                rows,
                self.kernels.inner,
                self.tile,
                left,
                packed_block,
                width,
                emit,
                False,
                last,
                self.epilogue,
            )

        self.blocks(num_channels, block)
