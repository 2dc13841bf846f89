"""Convolutions of unsigned by signed bytes with int32 sums, as products of 32-bit words.

The image is copied to rows of pixels whose channels are neighbors, so that a row of the kernel is one run of words. A
tile multiplies pixels with the output channels of a panel, once per row of the kernel; its sums are transposed, since
the result has one plane per channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril import ops
from mithril.base import TensorType, int32, uint8, uint32
from mithril.ir import Node, Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.elementwise import aligned_values, merge, merged
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.matmul import word_packing, word_products
from mithril_cbackend.lowering.matmul.microkernel import count
from mithril_cbackend.lowering.words.llvm_tiles import BYTES, Instructions

PER = 4  # channels of a word
MIN_PRODUCTS = 1 << 13
POSITIONS = 1024  # pixels whose sums are stored before the epilogue runs


def is_supported(node: Node) -> bool:
    """Whether the node is a two-dimensional convolution without groups and dilation, large enough to pack."""
    a = node.attributes
    if node.op is not ops.conv or len(node.result.shape) != 4 or a["groups"] != 1 or set(a["dilation"]) != {1}:
        return False
    weights, result = shape_of(operand(node, 1)), shape_of(node.result)
    work = int(np.prod(weights)) * result[0] * result[2] * result[3]
    return bool(work >= MIN_PRODUCTS and min(result) > 0)


@dataclass(frozen=True)
class Plan:
    """Sizes of the packed image and of the blocks of a convolution."""

    use: Instructions
    image: tuple[int, ...]  # [batch, channels, height, width]
    kernel: tuple[int, int]
    result: tuple[int, ...]
    stride: tuple[int, int]
    before: tuple[int, int]

    @staticmethod
    def of(node: Node, use: Instructions) -> Plan:
        a, weights = node.attributes, shape_of(operand(node, 1))
        before = tuple(p[0] for p in a["padding"])
        kernel, stride = (weights[2], weights[3]), (a["stride"][0], a["stride"][1])
        return Plan(use, shape_of(operand(node)), kernel, shape_of(node.result), stride, (before[0], before[1]))

    @property
    def words(self) -> int:
        """Return the words of a pixel."""
        return count(self.image[1], PER)

    @property
    def run(self) -> int:
        """Return the words of a row of the kernel, rounded up to the depth of the instructions."""
        return count(self.kernel[1] * self.words, self.use.depth) * self.use.depth

    @property
    def size(self) -> tuple[int, int]:
        """Return the padded height and width."""
        height, width = ((n - 1) * s + k for n, s, k in zip(self.result[2:], self.stride, self.kernel, strict=True))
        return height, width

    @property
    def pixels(self) -> int:
        """Return the pixels of a tile: fewer if the result has fewer."""
        lanes = self.use.lanes
        positions = (self.result[2] - 1) * self.size[1] + self.result[3] if self.is_flat else self.result[3]
        return min(max(self.use.rows, lanes), count(positions, lanes) * lanes)

    @property
    def is_flat(self) -> bool:
        """Whether tiles run over the ends of rows, at the cost of unused pixels between them."""
        return self.stride == (1, 1)

    @property
    def pitch(self) -> int:
        """Return the distance of the sums of neighboring rows."""
        width = self.result[3]
        return self.size[1] if self.is_flat else count(width, self.pixels) * self.pixels

    @property
    def rows(self) -> int:
        """Return the rows of the result whose sums are stored before the epilogue runs."""
        return max(1, min(self.result[2], POSITIONS // self.pitch))

    @property
    def columns(self) -> int:
        return word_products.columns_of(self.use)

    @property
    def panels(self) -> int:
        return count(self.result[1], self.columns)

    @property
    def packed_words(self) -> int:
        """Return the words of the packed image, and those that tiles read after its last pixel."""
        height, width = self.size
        after = (self.pixels * self.stride[1] + self.kernel[1]) * self.words + self.run
        return height * width * self.words + after

    @property
    def stored(self) -> int:
        """Return the sums of one channel."""
        return self.rows * self.pitch + 2 * self.pixels


def instructions(machine: Machine) -> Instructions | None:
    return word_products.instructions(BYTES, machine)


def prepared(kernel: Kernel, weights: np.ndarray[Any, Any], machine: Machine) -> np.ndarray[Any, Any] | None:
    """Return the panels of constant weights, one per row of the kernel, or None if bytes do not suffice."""
    node, use = kernel.anchor, instructions(machine)
    if use is None or not is_supported(node) or node.result.dtype is not int32 or kernel.narrow is not uint8:
        return None
    if weights.dtype.kind not in "iu" or weights.min() < -128 or weights.max() > 127:
        return None
    plan = Plan.of(node, use)
    out, channels, height, width = weights.shape
    padded = np.zeros((height, width, plan.words * PER, out), np.int8)
    padded[:, :, :channels] = weights.transpose(2, 3, 1, 0)
    rows = [word_packing.pack(row.reshape(-1, out), plan.columns, plan.run) for row in padded]
    panels = np.stack([row.reshape(plan.panels, -1) for row in rows], axis=1)
    return np.asarray(panels, order="C").reshape(-1)


def is_planned(kernel: Kernel) -> bool:
    """Whether the weights were packed for this template."""
    return any(v.dtype is uint32 for v, _ in kernel.prepared.values())


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return the packed image, and the sums and one compact channel of each thread."""
    use = instructions(machine)
    assert use is not None
    plan = Plan.of(kernel.anchor, use)
    line = plan.rows * plan.result[3] + plan.use.lanes
    return [
        Value("image", TensorType(uint32, (plan.packed_words,))),
        Value("sums", TensorType(int32, (machine.threads * plan.columns * plan.stored,))),
        Value("line", TensorType(int32, (machine.threads * line,))),
    ]


def write(frame: KernelBuilder) -> None:
    """Write the loops over images, panels, bands of rows and tiles."""
    WordConvolution(frame).write()


class WordConvolution:
    def __init__(self, frame: KernelBuilder) -> None:
        use = instructions(frame.machine)
        assert use is not None
        self.frame, self.node = frame, frame.kernel.anchor
        self.plan = Plan.of(self.node, use)
        self.image, self.sums, self.line = (frame.outputs[v] for v in frame.kernel.scratch)
        self.panels = frame.reader.buffers[frame.kernel.prepared[operand(self.node, 1)][0]]
        epilogue = [n for n in frame.kernel.nodes if n is not self.node and n.result is not operand(self.node)]
        self.vector = vectorizable(epilogue)
        shape = shape_of(self.node.result)
        values = aligned_values(frame.kernel)
        groups = merged(values, shape, breaks=(1, 2))
        self.extents = merge(frame, values, shape, groups) if groups == [[0], [1], [2, 3]] else shape

    def write(self) -> None:
        p, reader = self.plan, self.frame.reader
        work = int(np.prod(p.result)) * p.kernel[0] * p.run * PER // PRODUCTS // 4
        with reader.loop("n", p.result[0]) as n:
            self.pack(n)
            with self.frame.share("panel", p.panels, work // p.result[0]) as (worker, panel):
                for first, bands, rows in _segments(p.result[2], p.rows):
                    with reader.loop("band", bands) as band:
                        row = first + band * rows
                        self.multiply(panel, worker, row, rows)
                        self.emit(n, panel, worker, row, rows)

    # -- the image ------------------------------------------------------------------------------------------------
    def byte(self, n: Any, channel: Any, y: Any, x: Any) -> t.Expr:
        """Return a stored byte of the image."""
        value, reader = operand(self.node), self.frame.reader
        producer = reader.producers.get(value)
        source = operand(producer) if producer is not None and producer.op is ops.cast else value
        if source in reader.buffers and source.dtype is uint8:
            return t.load(reader.buffers[source], reader.flat((n, channel, y, x), shape_of(source)))
        return t.cast(reader.at(value, (n, channel, y, x)), "uint8")

    def pack(self, n: Any) -> None:
        """Copy an image to pixels of words, with zeros around it."""
        p, code, reader, lanes = self.plan, self.frame.code, self.frame.reader, self.plan.use.lanes
        with reader.loop("v", p.packed_words // lanes) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
            code.store(self.image, v * lanes + j, t.const(0, "uint32"))
        if p.packed_words % lanes:
            with reader.loop("k", p.packed_words % lanes) as k:
                code.store(self.image, k + p.packed_words // lanes * lanes, t.const(0, "uint32"))
        channels = p.image[1]
        height = min(p.image[2], p.size[0] - p.before[0])
        width = min(p.image[3], p.size[1] - p.before[1])
        full, rest = divmod(channels, PER)
        with reader.loop("y", height) as y:
            start = ((y + p.before[0]) * p.size[1] + p.before[1]) * p.words
            squares, tiles = full // lanes, width // lanes
            if squares and tiles:
                with reader.loop("w", squares) as w, reader.loop("x", tiles) as x:
                    self.square(n, w * lanes, y, x * lanes, start)
                self.single(n, (0, squares * lanes), y, (tiles * lanes, width), start, PER)
            self.single(n, (squares * lanes if tiles else 0, full), y, (0, width), start, PER)
            if rest:
                self.single(n, (full, full + 1), y, (0, width), start, rest)

    def word(self, n: Any, w: Any, y: Any, x: Any, elements: int) -> t.Expr:
        word: Any = None
        for k in range(elements):
            part = t.cast(self.byte(n, w * PER + k, y, x), "uint32")
            part = part << t.const(8 * k, "uint32") if k else part
            word = part if word is None else word | part
        assert isinstance(word, t.Expr)
        return word

    def square(self, n: Any, w: Any, y: Any, x: Any, start: Any) -> None:
        """Copy as many words of as many pixels as a vector has lanes, through a transpose in registers."""
        p, code, reader, lanes = self.plan, self.frame.code, self.frame.reader, self.plan.use.lanes
        square = code.alloc("square", lanes * lanes, "uint32")
        with reader.loop("i", lanes) as i, reader.loop("j", lanes, t.VECTORIZED) as j:
            code.store(square, i * lanes + j, self.word(n, w + i, y, x + j, PER))
        code.transpose(lanes, square, 0, lanes, self.image, start + x * p.words + w, p.words)

    def single(self, n: Any, words: tuple[int, int], y: Any, columns: tuple[int, int], start: Any, size: int) -> None:
        """Copy words one by one."""
        reader = self.frame.reader
        if words[1] <= words[0] or columns[1] <= columns[0]:
            return
        with reader.loop("w", words[1] - words[0]) as i, reader.loop("x", columns[1] - columns[0]) as j:
            w, x = i + words[0], j + columns[0]
            self.frame.code.store(self.image, start + x * self.plan.words + w, self.word(n, w, y, x, size))

    # -- products -------------------------------------------------------------------------------------------------
    def multiply(self, panel: Any, worker: Any, row: Any, rows: int) -> None:
        """Store the sums of a band of rows for the channels of a panel."""
        p, reader = self.plan, self.frame.reader
        step = p.stride[0] * p.size[1] * p.words
        if p.is_flat:
            with reader.loop("tile", count((rows - 1) * p.pitch + p.result[3], p.pixels)) as tile:
                self.tile(panel, worker, row * step + tile * (p.pixels * p.words), tile * p.pixels)
            return
        with reader.loop("r", rows) as r, reader.loop("tile", p.pitch // p.pixels) as tile:
            begin = (row + r) * step + tile * (p.pixels * p.stride[1] * p.words)
            self.tile(panel, worker, begin, r * p.pitch + tile * p.pixels)

    def tile(self, panel: Any, worker: Any, begin: Any, position: Any) -> None:
        """Multiply the pixels from a word of the image on, and store their sums from a position on."""
        p, code, reader, lanes = self.plan, self.frame.code, self.frame.reader, self.plan.use.lanes
        height, size = p.kernel[0], p.pixels * p.columns
        total = code.alloc("tile", height * size, "int32")
        block = min(p.use.rows, p.pixels)
        piece = word_products.piece(p.use, block)
        stride = p.stride[1] * p.words
        for k in range(height):
            weights = (panel * height + k) * (p.run * p.columns)
            for first in range(0, p.pixels, block):
                code.call_piece(
                    piece,
                    t.address_of(self.image, begin + (k * p.size[1] * p.words + first * stride)),
                    t.index(stride * PER),
                    t.address_of(self.panels, weights),
                    t.address_of(total, k * size + first * p.columns),
                    t.index(p.run),
                )
        if height > 1:
            with reader.loop("i", size // lanes) as i, reader.loop("j", lanes, t.VECTORIZED) as j:
                sums = t.load(total, i * lanes + j)
                for k in range(1, height):
                    sums = sums + t.load(total, i * lanes + (j + k * size))
                code.store(total, i * lanes + j, sums)
        target = worker * (p.columns * p.stored) + position
        for c in range(0, p.columns, lanes):
            for i in range(0, p.pixels, lanes):
                place = target + (c * p.stored + i)
                code.transpose(lanes, total, i * p.columns + c, p.columns, self.sums, place, p.stored)

    # -- the result -----------------------------------------------------------------------------------------------
    def emit(self, n: Any, panel: Any, worker: Any, row: Any, rows: int) -> None:
        """Run the epilogue on the sums of a band, channel by channel."""
        p, code, reader, lanes = self.plan, self.frame.code, self.frame.reader, self.plan.use.lanes
        width, last = p.result[3], p.result[1] % p.columns
        channels: Any = p.columns
        if last and p.panels == 1:
            channels = last
        elif last:
            channels = t.select(t.equal(t.index(panel), p.panels - 1), t.index(last), t.index(p.columns))
        start = worker * (p.rows * width + lanes)
        with reader.loop("c", channels) as c:
            channel = panel * p.columns + c
            source = (worker * p.columns + c) * p.stored
            vectors = count(width, lanes)  # the last one of a row may overlap the next row, which is copied later
            with (
                reader.loop("y", rows) as y,
                reader.loop("v", vectors) as v,
                reader.loop("j", lanes, t.VECTORIZED) as j,
            ):
                x = v * lanes + j
                code.store(self.line, start + y * width + x, t.load(self.sums, source + y * p.pitch + x))
            if len(self.extents) == 3:
                self.run(rows * width, lambda k: (n, channel, row * width + k), start)
            else:
                with reader.loop("y", rows) as y:
                    self.run(width, lambda k: (n, channel, row + y, k), start + y * width)

    def run(self, size: int, index: Any, start: Any) -> None:
        """Emit elements that follow each other."""
        reader, lanes = self.frame.reader, self.plan.use.lanes
        vectors = size // lanes if self.vector else 0
        if vectors:
            with reader.loop("v", vectors) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
                k = v * lanes + j
                self.frame.emit(index(k), t.load(self.line, start + k))
        if size > vectors * lanes:
            with reader.loop("k", size - vectors * lanes) as i:
                k = i + vectors * lanes
                self.frame.emit(index(k), t.load(self.line, start + k))


def _segments(total: int, size: int) -> list[tuple[int, int, int]]:
    """Split a size into segments and the remainder; return (start, count, size) of each."""
    parts, rest = divmod(total, size)
    return [s for s in ((0, parts, size), (parts * size, 1, rest)) if s[1] and s[2]]
