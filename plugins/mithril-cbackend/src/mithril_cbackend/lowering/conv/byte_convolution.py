"""Convolutions of unsigned by signed bytes, or of bfloat16, of images whose channels are neighbors.

A tile multiplies pixels with a packed block of output channels. Its rows are pixels of the image, padded in a copy
where it has to be; a row of the kernel, or one of its elements, is a run of int8x4 groups, and a tile adds all runs. A
packed block reads the channels of its groups only, with zeros between groups of bytes; packed blocks of bfloat16 have
one group each. Sums are stored through the epilogue, channel by channel.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from mithril.graph import TensorType, Value, int8, uint32
from mithril_cbackend import tir as t
from mithril_cbackend.instructions import BYTES, PAIRS
from mithril_cbackend.lowering.conv import byte_copies
from mithril_cbackend.lowering.conv.byte_plan import Plan, may_exceed
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.elementwise import aligned_values, merge, merged
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.element.vectorization import pieces, vectorizable
from mithril_cbackend.lowering.int8x4.byte_operations import INT8X4, conv_int8x4
from mithril_cbackend.lowering.matmul import int8x4_products
from mithril_cbackend.lowering.matmul.microkernel import count
from mithril_cbackend.lowering.packings import Pack

PIXELS = [[0, 1, 2], [3]]  # axes that are one if nothing is broadcast along only some of them


def packing(kernel: Kernel, weights: np.ndarray[Any, Any], machine: Machine) -> Pack:
    """Return the function that packs constant weights."""
    return partial(packed, plan_of(kernel, machine))


def packed(plan: Plan, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the packed blocks of weights: [packed blocks][runs][int8x4 groups][columns] int8x4 groups."""
    per, weights = plan.use.per, weights.view(np.uint16) if weights.itemsize == 2 else weights
    height, width, group, channels = weights.shape
    spread = np.zeros((plan.packed_blocks, height, width, plan.span * per, plan.columns), weights.dtype)
    if plan.groups == 1:
        padded = np.zeros((height, width, group, plan.packed_blocks * plan.columns), weights.dtype)
        padded[..., :channels] = weights
        spread[:, :, :, :group] = padded.reshape(height, width, group, plan.packed_blocks, -1).transpose(3, 0, 1, 2, 4)
    else:
        for channel in range(channels):
            packed_block, column = divmod(channel, plan.columns)
            first = channel * plan.groups // channels * group - plan.first_int8x4(packed_block) * per
            spread[packed_block, :, :, first : first + group, column] = weights[..., channel]
    runs = spread.reshape(plan.packed_blocks, len(plan.offsets), plan.run * per, plan.columns)
    int8x4s = np.zeros((*runs.shape[:2], plan.depth * per, plan.columns), weights.dtype)
    int8x4s[:, :, : plan.run * per] = runs
    int8x4s = int8x4s.reshape(*runs.shape[:2], plan.depth, per, plan.columns).swapaxes(-1, -2)
    return np.asarray(int8x4s, order="C").reshape(-1).view(np.uint32)


def plan_of(kernel: Kernel, machine: Machine) -> Plan:
    kind = BYTES if operand(kernel.anchor, 1).dtype is int8 else PAIRS
    use = int8x4_products.instructions(kind, machine)
    assert use is not None
    return Plan.of(kernel.anchor, use)


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return the copied image, if there is one, and the sums of tiles."""
    plan, image = plan_of(kernel, machine), operand(kernel.anchor)
    size = plan.copied_int8x4 * (1 if image.dtype is uint32 else plan.use.per)
    copied = [Value("copied", TensorType(image.dtype, (size,)))] if plan.is_copied else []
    return [*copied, *int8x4_products.sums(plan.use, plan.rows * plan.columns, machine)]


@lowers(conv_int8x4, is_producer=True, scratch=scratch, packing=packing, computes_terms=True)
def byte_convolution(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``c.conv_int8x4``."""
    frame = KernelBuilder(kernel, name, machine)
    ByteConvolution(frame).write()
    return frame.finish()


class ByteConvolution:
    """Loops over images, packed blocks and tiles."""

    def __init__(self, frame: KernelBuilder) -> None:
        self.frame, self.node = frame, frame.kernel.anchor
        self.plan = plan_of(frame.kernel, frame.machine)
        image = operand(self.node)
        self.source = frame.reader.buffers[image]
        scratch = {v.name: frame.outputs[v] for v in frame.kernel.scratch}
        self.image = scratch.get("copied", self.source)
        self.sums: t.Buffer | None = scratch.get("sums")
        self.first_sum: Any = 0
        self.per = 1 if image.dtype is uint32 else self.plan.use.per  # elements of an int8x4 group of the image
        self.packed_blocks = frame.reader.buffers[frame.kernel.prepared[operand(self.node, 1)][0]]
        self.vector = vectorizable([n for n in frame.kernel.nodes if n is not self.node])
        shape = shape_of(self.node.result)
        values = aligned_values(frame.kernel)
        groups = merged(values, shape, breaks=(3,))
        self.is_merged = groups == PIXELS
        if self.is_merged:
            merge(frame, values, shape, groups)

    def write(self) -> None:
        p, reader, code = self.plan, self.frame.reader, self.frame.code
        self.offsets = code.alloc("offsets", len(p.offsets), "int32")
        for k, offset in enumerate(p.offsets):
            code.store(self.offsets, k, t.index(offset * INT8X4))
        work = math.prod(p.result) * len(p.offsets) * p.depth * p.use.per // PRODUCTS // 4
        self.height, tiles = self.select_height()
        with reader.loop("n", p.images) as n:
            if p.is_copied:
                byte_copies.copy(self.frame, p, self.source, self.image, n)
            workers = self.frame.workers(work, p.packed_blocks * p.tiles)
            # Threads that have packed blocks of their own read each weight once; otherwise they share the
            # pixels of each.
            chunks = 1 if p.packed_blocks % workers == 0 else workers
            size = count(tiles, chunks)
            with self.frame.share("item", p.packed_blocks * chunks, work) as (worker, item):
                self.first_sum = worker * (p.rows * p.columns)
                packed_block, chunk = reader.split(item, (p.packed_blocks, chunks))
                first = chunk * size
                extent: Any = size
                if chunks > 1:
                    left = tiles - t.index(first)
                    extent = t.select(left < size, left, t.index(size))
                self.distance = workers if chunks == 1 else 1
                with reader.loop("tile", extent) as i:
                    self.turn = (i, size if isinstance(size, int) else 0)
                    self.rows_of(n, packed_block, first + i)

    def select_height(self) -> tuple[Any, Any]:
        """Return the rows of tiles and the number of tiles.

        Tiles of pixels in place are not higher than there are pixels; those of a copy may have too many rows.
        """
        p, let = self.plan, self.frame.code.let
        if p.is_static or len(p.heights) == 1:
            return p.rows, p.tiles
        positions: Any = t.index(p.positions)
        first, *rest = p.heights if p.is_copied else p.heights[::-1]
        height: Any = t.index(first)
        for limit in rest:
            height = t.select(positions <= limit if p.is_copied else positions >= limit, t.index(limit), height)
        height = let(height, "height")
        return height, let(t.index(count(positions, height)), "tiles")

    def rows_of(self, n: Any, packed_block: Any, tile: Any) -> None:
        """Write one tile; the last one of an image that is read in place may have fewer rows."""
        p, reader = self.plan, self.frame.reader
        short = p.positions % p.rows if p.is_static else 0
        if p.is_copied or not short:
            self.tile(n, packed_block, tile, p.rows)
            return
        last = t.equal(t.index(tile), p.tiles - 1)
        reader.either(
            p.tiles == 1 or last,
            lambda: self.tile(n, packed_block, tile, short),
            lambda: self.tile(n, packed_block, tile, p.rows),
        )

    def tile(self, n: Any, packed_block: Any, tile: Any, rows: int) -> None:
        p, reader = self.plan, self.frame.reader
        if p.is_flat:
            self.flat_tile(n, packed_block, tile, rows)
            return
        line, part = reader.split(tile, (count(p.result[1], p.lines), p.parts))
        pixel = p.stride[1] * p.image[3]
        start = line * (p.lines * p.stride[0] * p.size[1] * p.image[3]) + part * (p.width * pixel)
        sums, first = self.multiply(packed_block, start, rows)
        for k in range(p.lines):
            with reader.loop("i", p.width) as i:
                y, x = line * p.lines + k, part * p.width + i
                fits = [t.index(x) < p.result[2]] if may_exceed(p.parts * p.width, p.result[2]) else []
                fits += [t.index(y) < p.result[1]] if k and p.result[1] % p.lines != 0 else []
                self.row(n, packed_block, y, x, fits, sums, first + (i + k * p.width) * p.columns)

    def flat_tile(self, n: Any, packed_block: Any, tile: Any, rows: int) -> None:
        """Write a tile of neighboring positions; if its height is selected at run time, the last one ends with them."""
        p, let = self.plan, self.frame.code.let
        repeated: Any = 0
        position, left = tile * self.height, rows if p.is_static else self.height
        if not p.is_static and not p.is_copied:
            excess = t.index(position) + self.height - t.index(p.positions)
            repeated = let(t.select(excess > 0, excess, t.index(0)), "repeated")  # rows of the tile before
            left = self.height - repeated
        sums, first = self.multiply(packed_block, (position - repeated) * p.image[3], rows)
        with self.frame.reader.loop("i", left) as i:
            self.flat_row(n, packed_block, position + i, sums, first + (repeated + i) * p.columns)

    def multiply(self, packed_block: Any, start: Any, rows: int) -> tuple[t.Buffer, Any]:
        """Multiply pixels from an int8x4 group on with a packed block; return the buffer and position of sums."""
        p, code = self.plan, self.frame.code
        pixel = p.stride[1] * p.image[3] * INT8X4
        below = p.stride[0] * p.size[1] * p.image[3] * INT8X4 if p.lines > 1 else p.use.height * pixel
        sums, first = self.sums, self.first_sum
        if sums is None:
            sums, first = code.alloc("tile", rows * p.columns, p.use.sums.name), 0
        begin = self.frame.reader.position(t.index(p.first_int8x4(packed_block))) if p.groups > 1 else 0
        shape = len(p.offsets) * p.depth, p.columns
        arguments = [
            t.address_of(self.image, (start + begin) * self.per),
            t.index(pixel),
            t.index(below),
            t.address_of(self.packed_blocks, packed_block * (len(p.offsets) * p.depth * p.columns)),
            t.address_of(sums, first),
            t.index(p.depth),
            t.address_of(self.offsets, 0),
            t.index(len(p.offsets)),
            *int8x4_products.prefetched(
                self.packed_blocks, p.packed_blocks - 1, packed_block, self.distance, shape, self.turn
            ),
        ]
        if isinstance(self.height, int):
            code.call_piece(int8x4_products.piece(p.use, rows), *arguments)
            return sums, first
        for height in p.heights:
            with code.when(t.equal(self.height, height)):
                code.call_piece(int8x4_products.piece(p.use, height), *arguments)
        return sums, first

    def flat_row(self, n: Any, packed_block: Any, position: Any, sums: t.Buffer, first: Any) -> None:
        """Write the result of a position that may lie between two rows, or after the last one."""
        p, reader = self.plan, self.frame.reader
        _, height, width, _ = p.result
        if self.is_merged and p.size[1] == width and (not p.is_copied or p.positions % p.rows == 0):
            self.channels(packed_block, (position + n * (height * width),), sums, first)
            return
        if not p.is_copied:
            n, position = reader.split(position, (p.result[0], height * width))
        y, x = reader.position(t.index(position) // p.size[1]), reader.position(t.index(position) % p.size[1])
        fits = [t.index(x) < width] if may_exceed(p.size[1], width) else []
        fits += [t.index(y) < height] if p.is_copied and may_exceed(p.tiles * p.rows, p.positions) else []
        self.row(n, packed_block, y, x, fits, sums, first)

    def row(self, n: Any, packed_block: Any, y: Any, x: Any, fits: list[Any], sums: t.Buffer, first: Any) -> None:
        height, width = self.plan.result[1:3]
        pixel = (n * (height * width) + (y * width + x),) if self.is_merged else (n, y, x)

        def emit() -> None:
            self.channels(packed_block, pixel, sums, first)

        if fits:
            condition = fits[0] if len(fits) == 1 else fits[0] & fits[1]
            self.frame.reader.either(condition, emit, lambda: None)
        else:
            emit()

    def channels(self, packed_block: Any, pixel: tuple[Any, ...], sums: t.Buffer, first: Any) -> None:
        """Run the epilogue on the channels of a pixel; the last packed block may have fewer."""
        p, reader = self.plan, self.frame.reader
        last = p.result[3] % p.columns

        def emit(width: int) -> None:
            for start, size in pieces(width, p.use.lanes):
                kind = t.VECTORIZED if self.vector and size > 1 else t.SERIAL
                with reader.loop("j", size, kind) as j:
                    element = t.load(sums, first + (j + start))
                    self.frame.emit((*pixel, packed_block * p.columns + (j + start)), element)

        if not last:
            emit(p.columns)
        elif p.packed_blocks == 1:
            emit(last)
        else:
            is_last = t.equal(t.index(packed_block), p.packed_blocks - 1)
            reader.either(is_last, lambda: emit(last), lambda: emit(p.columns))
