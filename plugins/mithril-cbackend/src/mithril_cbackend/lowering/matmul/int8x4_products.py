"""Matrix products of narrow elements by int8x4 groups: bfloat16 with float32 sums, unsigned by signed bytes with int32
sums.

The right operand is packed into packed blocks of int8x4 groups, a constant one at compile time; the left operand is
read in place if its rows consist of whole int8x4 groups. Tiles are functions for the instructions of the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import DType, Node, TensorType, Value, bfloat16, float32, int8, int32, uint8, uint32
from mithril_cbackend import tir as t
from mithril_cbackend.instructions import AMX, BYTES, PAIRS
from mithril_cbackend.lowering.element.element_reader import Index, typical
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed, to_storage
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.int8x4 import c_tiles, llvm_tiles
from mithril_cbackend.lowering.int8x4.llvm_tiles import Instructions
from mithril_cbackend.lowering.matmul import gemv, int8x4_packing
from mithril_cbackend.lowering.matmul.matmul_form import Product, StridedOperand, strided_operand
from mithril_cbackend.lowering.matmul.microkernel import by_height, count, each_row, tiles_of_any_number
from mithril_cbackend.lowering.packings import Packing

MIN_PRODUCTS = 1 << 12  # multiplications; packing is not worthwhile for less
VECTORS = 2  # of a packed block
INT8X4 = 4  # bytes


@dataclass(frozen=True)
class Int8x4Product:
    """A product of int8x4 groups: its instructions and blocking."""

    product: Product
    left: StridedOperand | None  # None if its elements are computed
    use: Instructions
    is_packed: bool  # whether the packed blocks are packed at compile time

    @property
    def element(self) -> DType:
        """Return the dtype of the left operand's elements."""
        return bfloat16 if self.use.kind == PAIRS else uint8

    @property
    def depth(self) -> int:
        """Int8x4 groups of the contracted axis."""
        return depth_of(self.product.k, self.use)

    @property
    def columns(self) -> int:
        return columns_of(self.use)

    @property
    def packed_blocks(self) -> int:
        return count(self.product.n, self.columns)

    @property
    def copies_rows(self) -> bool:
        """Whether rows are copied, because they do not consist of whole int8x4 groups next to each other."""
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
        """Return the number of packed blocks that are multiplied with each tile of rows."""
        rows, packed_block = typical(self.product.m) * self.depth * 4, self.columns * self.depth * 4
        if (
            self.use.level == AMX
        ):  # as high as wide, so packed blocks may be streamed: results are written in longer rows
            groups = max(machine.threads, count(self.packed_blocks * packed_block, machine.cache // 2))
            return count(self.packed_blocks, groups)
        # As for float tiles, a group pays off only where rows are streamed from beyond the L2 cache.
        return max(1, min(4, machine.cache // 4 // packed_block)) if rows > machine.cache // 2 else 1


def columns_of(use: Instructions) -> int:
    return VECTORS * use.lanes


def depth_of(k: int, use: Instructions) -> int:
    return -(-k // (use.per * use.depth)) * use.depth


def instructions(kind: str, machine: Machine) -> Instructions | None:
    """Return the instructions for a kind of int8x4 groups, or None for pairs without vectors."""
    lanes = machine.lanes()
    # One lane is a microcontroller: Cortex-M multiplies bytes by ``smlad`` (decision 0021). Pairs
    # without instructions are slower than float32.
    is_known = lanes >= 4 or (lanes == 1 and kind == BYTES)
    return llvm_tiles.instructions(kind, frozenset(machine.features), lanes) if is_known else None


def kind_of(product: Product, left: DType | None, right: DType | None) -> str | None:
    """Return the kind of the int8x4 groups of a product of elements with these dtypes, or None if there is none."""
    if left is bfloat16 and right is bfloat16 and product.kind is float32:
        return PAIRS
    return BYTES if left is uint8 and right is int8 and product.kind is int32 else None


def form(kernel: Kernel, product: Product, machine: Machine) -> Int8x4Product | None:
    """Return the product by int8x4 groups, or None if another template computes it."""
    producers: Mapping[Value, Node] = kernel.producers
    if product.transposed or typical(product.work) * 8 < MIN_PRODUCTS:
        return None
    packed = product.right.value in kernel.prepared
    left, right = strided_operand(product.left, producers), strided_operand(product.right, producers)
    if packed:  # by int8x4 groups only if both operands were narrow
        packed_blocks, _ = kernel.prepared[product.right.value]
        kind = (PAIRS if product.kind is float32 else BYTES) if packed_blocks.dtype is uint32 else None
    # Few rows are bound by reading the right operand, which ``gemv`` reads without packing it first.
    elif left is None or right is None or typical(product.m) <= gemv.MAX_ROWS or product.n < machine.lanes():
        kind = None
    else:
        kind = kind_of(product, left.value.dtype, right.value.dtype)
    use = instructions(kind, machine) if kind is not None else None
    return None if use is None else Int8x4Product(product, left, use, packed)


def packing(kernel: Kernel, product: Product, right: np.ndarray[Any, Any], machine: Machine) -> Packing | None:
    """Return the order of a constant [k, n] operand, or None if the product is not one of int8x4 groups."""
    dtype = bfloat16 if right.dtype == bfloat16.numpy else int8 if _is_int8(right) else None
    kind = kind_of(product, kernel.narrow, dtype) if typical(product.work) * 8 >= MIN_PRODUCTS else None
    use = instructions(kind, machine) if kind is not None else None
    return None if use is None else Packing("int8x4", (columns_of(use), depth_of(product.k, use)))


def _is_int8(elements: np.ndarray[Any, Any]) -> bool:
    """Whether all elements are integers that fit eight bits."""
    return elements.dtype.kind in "iu" and int(elements.min()) >= -128 and int(elements.max()) <= 127


def scratch(int8x4: Int8x4Product, machine: Machine) -> list[Value]:
    """Return the buffers: packed packed blocks per thread, and copied rows."""
    values = []
    if not int8x4.is_packed:
        size = machine.threads * int8x4.group(machine) * int8x4.columns * int8x4.depth
        values.append(Value("packed_block", TensorType(uint32, (size,))))
    if int8x4.copies_rows:
        size = int8x4.product.m * int8x4.depth * int8x4.use.per
        values.append(Value("rows", TensorType(int8x4.element, (size,))))
    return [*values, *sums(int8x4.use, int8x4.rows * int8x4.columns, machine)]


def sums(use: Instructions, size: int, machine: Machine) -> list[Value]:
    """Return the sums of one AMX tile per thread: whole cache lines, to which the stack is not aligned."""
    # Sums that straddle cache lines took twice as long: 512^3 products of bytes (commit 005ea978).
    return [Value("sums", TensorType(use.sums, (machine.threads * size,)))] if use.level == AMX else []


def piece(use: Instructions, rows: int, vectors: int = VECTORS) -> t.Piece:
    """Return the tile of a number of rows."""
    name = use.name(rows, vectors * use.lanes)
    return t.Piece(name, llvm_tiles.tile(name, use, rows, vectors), c_tiles.tile(name, use, rows, vectors))


def prefetched(
    packed_blocks: t.Buffer, last: int, number: Any, distance: int, shape: tuple[int, int], turn: tuple[Any, int]
) -> list[t.Expr]:
    """Return where a tile begins to prefetch its part of a later packed block, and the number of bytes with each int8x4
    group.

    Each tile fetches a part, because the first one would otherwise wait for its whole packed block.
    """
    (int8x4s, columns), (tile, tiles) = shape, turn
    pace = INT8X4 * columns // tiles if tiles else 0
    later = t.index(number) + distance
    start = t.select(later > last, t.index(last), later) * (int8x4s * columns)
    return [t.address_of(packed_blocks, start + tile * (int8x4s * pace // INT8X4)), t.index(pace)]


def write(frame: KernelBuilder, int8x4: Int8x4Product) -> None:
    """Write the loops over matrices."""
    with frame.reader.nest("", int8x4.product.batch) as batch_index:
        PackedBlocks(frame, int8x4, batch_index).write()


class PackedBlocks:
    """Loops over groups of packed blocks and tiles of rows of one matrix."""

    def __init__(self, frame: KernelBuilder, int8x4: Int8x4Product, batch_index: Index) -> None:
        self.frame, self.int8x4, self.batch_index = frame, int8x4, batch_index
        self.scratch = {v.name: frame.outputs[v] for v in frame.kernel.scratch}
        self.first_sum: Any = 0
        follow = [n for n in frame.kernel.nodes if n is not frame.kernel.anchor]
        p = int8x4.product
        feeding = {p.left.value, p.right.value}
        epilogue = [n for n in follow if n.result not in feeding]
        self.vector = vectorizable(epilogue) and gemv.is_contiguous(p, frame.kernel)

    def write(self) -> None:
        int8x4, frame, p = self.int8x4, self.frame, self.int8x4.product
        self.offsets = frame.code.alloc("offsets", 1, "int32")  # a row is one run
        frame.code.store(self.offsets, 0, t.index(0))
        if int8x4.copies_rows:
            buffer, start, stride = self.scratch["rows"], 0, int8x4.depth * int8x4.use.per
            element, is_contiguous = self.left()
            int8x4_packing.copy_rows(frame, element, is_contiguous, (p.m, p.k), buffer, stride)
        else:
            assert int8x4.left is not None
            matrix = int8x4.left.matrix(self.batch_index, int8x4.element, frame.reader)
            buffer, start, stride = matrix.buffer, matrix.start, matrix.row
        group = min(int8x4.group(frame.machine), int8x4.packed_blocks)
        groups = count(int8x4.packed_blocks, group)
        tiles = count(p.m, int8x4.rows)
        work = p.work // p.matrices // 4
        threads = frame.workers(work, tiles * groups)
        splits = 1  # symbolic rows are not split: their last tiles overlap
        # From four groups for each thread on, threads that are idle in the last turn cost a quarter at most.
        if isinstance(tiles, int) and groups % threads and groups < 4 * threads and tiles % threads == 0:
            splits = threads
        self.distance = group * (threads if splits == 1 else 1)
        with frame.share("group", groups * splits, work) as (worker, item):
            number, split = frame.reader.split(item, (groups, splits))
            first = number * group
            size: Any = group
            if int8x4.packed_blocks % group:
                left = int8x4.packed_blocks - first
                size = t.select(left < group, left, t.index(group))
            slot = worker * group
            self.first_sum = worker * (int8x4.rows * int8x4.columns)
            if not int8x4.is_packed:
                self.pack(first, size, slot)
            blocks = tiles // splits
            self.tiles(blocks, split * blocks, first, size, slot, (buffer, start, stride))

    def left(self) -> tuple[Any, bool]:
        """Return a function that reads an element of the left operand as it is stored, and if rows are contiguous."""
        int8x4, frame, p = self.int8x4, self.frame, self.int8x4.product
        strided = int8x4.left
        if strided is not None and strided.value.dtype is int8x4.element:
            matrix = strided.matrix(self.batch_index, int8x4.element, frame.reader)
            return lambda i, j: t.load(matrix.buffer, matrix.offset(i, j)), matrix.column == 1

        def element(i: Any, j: Any) -> t.Expr:
            x = p.left.element(frame.reader, self.batch_index, i, j)
            return to_storage(frame.code, t.cast(x, computed(int8x4.element)), int8x4.element)

        return element, False

    def pack(self, first: Any, size: Any, slot: Any) -> None:
        """Pack the packed blocks of a group; the last one of all may be narrow."""
        int8x4, frame, p = self.int8x4, self.frame, self.int8x4.product
        right = strided_operand(p.right, frame.kernel.producers)
        assert right is not None
        matrix = right.matrix(self.batch_index, p.kind, frame.reader).transposed()
        width = p.n % int8x4.columns

        def copy(number: Any, columns: int, slot: Any) -> None:
            part = matrix.part(0, number * int8x4.columns)
            target = int8x4_packing.PackedBlockCopy(frame, part, self.scratch["packed_block"], int8x4.columns)
            target.write(slot * (int8x4.columns * int8x4.depth), p.k, columns, int8x4.depth)

        with frame.reader.loop("packed_block", size) as i:
            number = first + i
            if not width:
                copy(number, int8x4.columns, slot + i)
            elif int8x4.packed_blocks == 1:
                copy(0, width, slot + i)
            else:
                last = t.equal(t.index(number), int8x4.packed_blocks - 1)
                frame.reader.either(
                    last,
                    lambda: copy(int8x4.packed_blocks - 1, width, slot + i),
                    lambda: copy(number, int8x4.columns, slot + i),
                )

    def tiles(self, blocks: int, offset: Any, first: Any, size: Any, slot: Any, left: Any) -> None:
        """Multiply tiles of rows with the packed blocks of a group; the last tile of all may have fewer rows."""
        int8x4, frame, p = self.int8x4, self.frame, self.int8x4.product
        rows = int8x4.rows
        self.turn: tuple[Any, int] = (0, 0)  # the number of a tile, and of tiles with the same packed block
        if not isinstance(p.m, int):
            for loop in tiles_of_any_number(frame, p.m, rows, int8x4.use.highest):
                with loop as (row, height), frame.reader.loop("packed_block", size) as i:
                    self.tile(row, height, first + i, slot + i, left)
            return
        short = p.m % rows
        with frame.reader.loop("tile", blocks) as block, frame.reader.loop("packed_block", size) as i:
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
        int8x4, frame, p = self.int8x4, self.frame, self.int8x4.product
        code, reader, lanes = frame.code, frame.reader, int8x4.use.lanes
        buffer, start, stride = left
        if int8x4.is_packed:
            packed = reader.buffers[frame.kernel.prepared[p.right.value][0]]
            packed_block = t.address_of(packed, number * (int8x4.columns * int8x4.depth))
            shape = int8x4.depth, int8x4.columns
            ahead = prefetched(packed, int8x4.packed_blocks - 1, number, self.distance, shape, self.turn)
        else:
            packed_block = t.address_of(self.scratch["packed_block"], slot * (int8x4.columns * int8x4.depth))
            ahead = [packed_block, t.index(0)]
        total, begin = self.scratch.get("sums"), self.first_sum
        if total is None:
            total, begin = code.alloc("tile", int8x4.rows * int8x4.columns, p.kind.name), 0
        size = stride * int8x4.element.itemsize

        def multiply(rows: int) -> None:
            code.call_piece(
                piece(int8x4.use, rows),
                t.address_of(buffer, start + row * stride),
                t.index(size),
                t.index(size * int8x4.use.height),
                packed_block,
                t.address_of(total, begin),
                t.index(int8x4.depth),
                t.address_of(self.offsets, 0),
                t.index(1),
                *ahead,
            )

        if isinstance(rows, int):
            multiply(rows)
        else:
            by_height(frame, rows, range(int8x4.use.highest, 0, -1), multiply)
        column = number * int8x4.columns
        width = p.n % int8x4.columns

        def emit(width: int) -> None:
            def write(i: Any) -> None:
                for v in range(count(width, lanes)):
                    size = min(lanes, width - v * lanes)
                    kind = t.VECTORIZED if self.vector and size == lanes else t.SERIAL
                    with reader.loop("j", size, kind) as j:
                        element = t.load(total, begin + i * int8x4.columns + (j + v * lanes))
                        gemv.emit(frame, p, self.batch_index, row + i, column + (j + v * lanes), element)

            each_row(frame, rows, write)

        if not width:
            emit(int8x4.columns)
        elif int8x4.packed_blocks == 1:
            emit(width)
        else:
            last = t.equal(t.index(number), int8x4.packed_blocks - 1)
            reader.either(last, lambda: emit(width), lambda: emit(int8x4.columns))
