"""Matrix products of narrow elements by words: bfloat16 with float32 sums, unsigned by signed bytes with int32 sums.

The right operand is packed into panels of words, a constant one at compile time; the left operand is read in place
if its rows consist of whole words. Tiles are functions for the instructions of the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import DType, Node, TensorType, Value, bfloat16, float32, int8, int32, uint8, uint32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, typical
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed, to_storage
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.matmul import gemv, word_packing
from mithril_cbackend.lowering.matmul.matmul_form import Product, StridedOperand, strided_operand
from mithril_cbackend.lowering.matmul.microkernel import by_height, count, each_row, tiles_of_any_number
from mithril_cbackend.lowering.words import c_tiles, llvm_tiles
from mithril_cbackend.lowering.words.llvm_tiles import AMX, BYTES, PAIRS, Instructions

MIN_PRODUCTS = 1 << 12  # multiplications; packing is not worthwhile for less
VECTORS = 2  # of a panel
WORD = 4  # bytes


@dataclass(frozen=True)
class WordProduct:
    """A product of words: its instructions and blocking."""

    product: Product
    left: StridedOperand | None  # None if its elements are computed
    use: Instructions
    is_packed: bool  # whether the panels are packed at compile time

    @property
    def element(self) -> DType:
        """Return the dtype of the left operand's elements."""
        return bfloat16 if self.use.kind == PAIRS else uint8

    @property
    def depth(self) -> int:
        """Words of the contracted axis."""
        return depth_of(self.product.k, self.use)

    @property
    def columns(self) -> int:
        return columns_of(self.use)

    @property
    def panels(self) -> int:
        return count(self.product.n, self.columns)

    @property
    def copies_rows(self) -> bool:
        """Whether rows are copied, because they do not consist of whole words next to each other."""
        left = self.left
        if left is None or left.summed != 1 or left.value.dtype is not self.element:
            return True
        return self.depth * self.use.per != self.product.k

    @property
    def rows(self) -> int:
        """Rows of a tile, balanced so that the last one is almost full unless its instructions come in blocks."""
        m, limit = self.product.m, self.use.rows
        if not isinstance(m, int):
            return limit
        return min(m, limit) if self.use.level == AMX else -(-m // count(m, limit))

    def group(self, machine: Machine) -> int:
        """Return the number of panels that are multiplied with each tile of rows."""
        rows, panel = typical(self.product.m) * self.depth * 4, self.columns * self.depth * 4
        if self.use.level == AMX:  # as high as wide, so panels may be streamed: results are written in longer rows
            groups = max(machine.threads, count(self.panels * panel, machine.cache // 2))
            return count(self.panels, groups)
        return max(1, min(4, machine.cache // 4 // panel)) if rows > machine.cache // 2 else 1


def columns_of(use: Instructions) -> int:
    return VECTORS * use.lanes


def depth_of(k: int, use: Instructions) -> int:
    return -(-k // (use.per * use.depth)) * use.depth


def instructions(kind: str, machine: Machine) -> Instructions | None:
    """Return the instructions for a kind of words, or None for pairs without vectors."""
    lanes = machine.lanes()
    is_known = lanes >= 4 or (lanes == 1 and kind == BYTES)
    return llvm_tiles.instructions(kind, frozenset(machine.features), lanes) if is_known else None


def kind_of(product: Product, left: DType | None, right: DType | None) -> str | None:
    """Return the kind of the words of a product of elements with these dtypes, or None if there is none."""
    if left is bfloat16 and right is bfloat16 and product.kind is float32:
        return PAIRS
    return BYTES if left is uint8 and right is int8 and product.kind is int32 else None


def form(kernel: Kernel, product: Product, machine: Machine) -> WordProduct | None:
    """Return the product by words, or None if another template computes it."""
    producers: Mapping[Value, Node] = kernel.producers
    if product.transposed or typical(product.work) * 8 < MIN_PRODUCTS:
        return None
    packed = product.right.value in kernel.prepared
    left, right = strided_operand(product.left, producers), strided_operand(product.right, producers)
    if packed:  # by words only if both operands were narrow
        panels, _ = kernel.prepared[product.right.value]
        kind = (PAIRS if product.kind is float32 else BYTES) if panels.dtype is uint32 else None
    elif left is None or right is None or typical(product.m) <= gemv.MAX_ROWS or product.n < machine.lanes():
        kind = None
    else:
        kind = kind_of(product, left.value.dtype, right.value.dtype)
    use = instructions(kind, machine) if kind is not None else None
    return None if use is None else WordProduct(product, left, use, packed)


def prepared(kernel: Kernel, product: Product, right: np.ndarray[Any, Any], machine: Machine) -> Any:
    """Return the panels of a constant [k, n] operand, or None if the product is not one of words."""
    dtype = bfloat16 if right.dtype == bfloat16.numpy else int8 if _is_int8(right) else None
    kind = kind_of(product, kernel.narrow, dtype) if typical(product.work) * 8 >= MIN_PRODUCTS else None
    use = instructions(kind, machine) if kind is not None else None
    if use is None:
        return None
    elements = right.view(np.uint16) if kind == PAIRS else right.astype(np.int8)
    return word_packing.pack(elements, columns_of(use), depth_of(product.k, use))


def _is_int8(elements: np.ndarray[Any, Any]) -> bool:
    """Whether all elements are integers that fit eight bits."""
    return elements.dtype.kind in "iu" and int(elements.min()) >= -128 and int(elements.max()) <= 127


def scratch(word: WordProduct, machine: Machine) -> list[Value]:
    """Return the buffers: packed panels per thread, and copied rows."""
    values = []
    if not word.is_packed:
        size = machine.threads * word.group(machine) * word.columns * word.depth
        values.append(Value("panel", TensorType(uint32, (size,))))
    if word.copies_rows:
        size = word.product.m * word.depth * word.use.per
        values.append(Value("rows", TensorType(word.element, (size,))))
    return [*values, *sums(word.use, word.rows * word.columns, machine)]


def sums(use: Instructions, size: int, machine: Machine) -> list[Value]:
    """Return the sums of one AMX tile per thread: whole cache lines, to which the stack is not aligned."""
    return [Value("sums", TensorType(use.sums, (machine.threads * size,)))] if use.level == AMX else []


def piece(use: Instructions, rows: int, vectors: int = VECTORS) -> t.Piece:
    """Return the tile of a number of rows."""
    name = use.name(rows, vectors * use.lanes)
    return t.Piece(name, llvm_tiles.tile(name, use, rows, vectors), c_tiles.tile(name, use, rows, vectors))


def prefetched(
    panels: t.Buffer, last: int, number: Any, distance: int, shape: tuple[int, int], turn: tuple[Any, int]
) -> list[t.Expr]:
    """Return where a tile begins to prefetch its part of a later panel, and the number of bytes with each word.

    Each tile fetches a part, because the first one would otherwise wait for its whole panel.
    """
    (words, columns), (tile, tiles) = shape, turn
    pace = WORD * columns // tiles if tiles else 0
    later = t.index(number) + distance
    start = t.select(later > last, t.index(last), later) * (words * columns)
    return [t.address_of(panels, start + tile * (words * pace // WORD)), t.index(pace)]


def write(frame: KernelBuilder, word: WordProduct) -> None:
    """Write the loops over matrices."""
    with frame.reader.nest("", word.product.batch) as batch_index:
        Panels(frame, word, batch_index).write()


class Panels:
    """Loops over groups of panels and tiles of rows of one matrix."""

    def __init__(self, frame: KernelBuilder, word: WordProduct, batch_index: Index) -> None:
        self.frame, self.word, self.batch_index = frame, word, batch_index
        self.scratch = {v.name: frame.outputs[v] for v in frame.kernel.scratch}
        self.first_sum: Any = 0
        follow = [n for n in frame.kernel.nodes if n is not frame.kernel.anchor]
        p = word.product
        feeding = {p.left.value, p.right.value}
        epilogue = [n for n in follow if n.result not in feeding]
        self.vector = vectorizable(epilogue) and gemv.is_contiguous(p, frame.kernel)

    def write(self) -> None:
        word, frame, p = self.word, self.frame, self.word.product
        self.offsets = frame.code.alloc("offsets", 1, "int32")  # a row is one run
        frame.code.store(self.offsets, 0, t.index(0))
        if word.copies_rows:
            buffer, start, stride = self.scratch["rows"], 0, word.depth * word.use.per
            element, is_contiguous = self.left()
            word_packing.copy_rows(frame, element, is_contiguous, (p.m, p.k), buffer, stride)
        else:
            assert word.left is not None
            matrix = word.left.matrix(self.batch_index, word.element, frame.reader)
            buffer, start, stride = matrix.buffer, matrix.start, matrix.row
        group = min(word.group(frame.machine), word.panels)
        groups = count(word.panels, group)
        tiles = count(p.m, word.rows)
        work = p.work // p.matrices // 4
        threads = frame.workers(work, tiles * groups)
        splits = 1  # symbolic rows are not split: their last tiles overlap
        if isinstance(tiles, int) and groups % threads and groups < 4 * threads and tiles % threads == 0:
            splits = threads
        self.distance = group * (threads if splits == 1 else 1)
        with frame.share("group", groups * splits, work) as (worker, item):
            number, split = frame.reader.split(item, (groups, splits))
            first = number * group
            size: Any = group
            if word.panels % group:
                left = word.panels - first
                size = t.select(left < group, left, t.index(group))
            slot = worker * group
            self.first_sum = worker * (word.rows * word.columns)
            if not word.is_packed:
                self.pack(first, size, slot)
            blocks = tiles // splits
            self.tiles(blocks, split * blocks, first, size, slot, (buffer, start, stride))

    def left(self) -> tuple[Any, bool]:
        """Return a function that reads an element of the left operand as it is stored, and if rows are contiguous."""
        word, frame, p = self.word, self.frame, self.word.product
        strided = word.left
        if strided is not None and strided.value.dtype is word.element:
            matrix = strided.matrix(self.batch_index, word.element, frame.reader)
            return lambda i, j: t.load(matrix.buffer, matrix.offset(i, j)), matrix.column == 1

        def element(i: Any, j: Any) -> t.Expr:
            x = p.left.element(frame.reader, self.batch_index, i, j)
            return to_storage(frame.code, t.cast(x, computed(word.element)), word.element)

        return element, False

    def pack(self, first: Any, size: Any, slot: Any) -> None:
        """Pack the panels of a group; the last one of all may be narrow."""
        word, frame, p = self.word, self.frame, self.word.product
        right = strided_operand(p.right, frame.kernel.producers)
        assert right is not None
        matrix = right.matrix(self.batch_index, p.kind, frame.reader).transposed()
        width = p.n % word.columns

        def copy(number: Any, columns: int, slot: Any) -> None:
            part = matrix.part(0, number * word.columns)
            target = word_packing.PanelCopy(frame, part, self.scratch["panel"], word.columns)
            target.write(slot * (word.columns * word.depth), p.k, columns, word.depth)

        with frame.reader.loop("panel", size) as i:
            number = first + i
            if not width:
                copy(number, word.columns, slot + i)
            elif word.panels == 1:
                copy(0, width, slot + i)
            else:
                last = t.equal(t.index(number), word.panels - 1)
                frame.reader.either(
                    last,
                    lambda: copy(word.panels - 1, width, slot + i),
                    lambda: copy(number, word.columns, slot + i),
                )

    def tiles(self, blocks: int, offset: Any, first: Any, size: Any, slot: Any, left: Any) -> None:
        """Multiply tiles of rows with the panels of a group; the last tile of all may have fewer rows."""
        word, frame, p = self.word, self.frame, self.word.product
        rows = word.rows
        self.turn: tuple[Any, int] = (0, 0)  # the number of a tile, and of tiles with the same panel
        if not isinstance(p.m, int):
            for loop in tiles_of_any_number(frame, p.m, rows, word.use.highest):
                with loop as (row, height), frame.reader.loop("panel", size) as i:
                    self.tile(row, height, first + i, slot + i, left)
            return
        short = p.m % rows
        with frame.reader.loop("tile", blocks) as block, frame.reader.loop("panel", size) as i:
            tile = offset + block
            self.turn = (block, blocks)
            if not short:
                self.tile(tile * rows, rows, first + i, slot + i, left)
            elif p.m < rows:
                self.tile(0, p.m, first + i, slot + i, left)
            else:
                last = t.equal(t.index(tile), p.m // rows)
                frame.reader.either(
                    last,
                    lambda: self.tile(p.m - short, short, first + i, slot + i, left),
                    lambda: self.tile(tile * rows, rows, first + i, slot + i, left),
                )

    def tile(self, row: Any, rows: Any, number: Any, slot: Any, left: tuple[t.Buffer, Any, int]) -> None:
        """Compute one tile, of a height that may be known at run time only, and run the epilogue on it."""
        word, frame, p = self.word, self.frame, self.word.product
        code, reader, lanes = frame.code, frame.reader, word.use.lanes
        buffer, start, stride = left
        if word.is_packed:
            packed = reader.buffers[frame.kernel.prepared[p.right.value][0]]
            panel = t.address_of(packed, number * (word.columns * word.depth))
            shape = word.depth, word.columns
            ahead = prefetched(packed, word.panels - 1, number, self.distance, shape, self.turn)
        else:
            panel = t.address_of(self.scratch["panel"], slot * (word.columns * word.depth))
            ahead = [panel, t.index(0)]
        total, begin = self.scratch.get("sums"), self.first_sum
        if total is None:
            total, begin = code.alloc("tile", word.rows * word.columns, p.kind.name), 0
        size = stride * word.element.itemsize

        def multiply(rows: int) -> None:
            code.call_piece(
                piece(word.use, rows),
                t.address_of(buffer, start + row * stride),
                t.index(size),
                t.index(size * word.use.height),
                panel,
                t.address_of(total, begin),
                t.index(word.depth),
                t.address_of(self.offsets, 0),
                t.index(1),
                *ahead,
            )

        if isinstance(rows, int):
            multiply(rows)
        else:
            by_height(frame, rows, range(word.use.highest, 0, -1), multiply)
        column = number * word.columns
        width = p.n % word.columns

        def emit(width: int) -> None:
            def write(i: Any) -> None:
                for v in range(count(width, lanes)):
                    size = min(lanes, width - v * lanes)
                    kind = t.VECTORIZED if self.vector and size == lanes else t.SERIAL
                    with reader.loop("j", size, kind) as j:
                        element = t.load(total, begin + i * word.columns + (j + v * lanes))
                        gemv.emit(frame, p, self.batch_index, row + i, column + (j + v * lanes), element)

            each_row(frame, rows, write)

        if not width:
            emit(word.columns)
        elif word.panels == 1:
            emit(width)
        else:
            last = t.equal(t.index(number), word.panels - 1)
            reader.either(last, lambda: emit(width), lambda: emit(word.columns))
