"""Tiled matrix products, with the epilogue fused into each tile.

The right operand is packed into packed blocks, a few at a time, so that transposes and conversions cost little; a
constant operand is packed at compile time. Long sums are split into blocks whose packed blocks fit the L2 cache.
Products with few rows are left to ``gemv``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Node, TensorType, Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, shape_of, typical
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.matmul import gemv, int8x4_products, naive_contractions
from mithril_cbackend.lowering.matmul.matmul_form import Product, StridedOperand, product_of, strided_operand
from mithril_cbackend.lowering.matmul.microkernel import (
    Matrix,
    PartialSums,
    Tile,
    copy_packed_block,
    count,
    multiply_tile,
    tile_for,
    tiles,
)
from mithril_cbackend.lowering.packings import Packing

GROUP = 4  # packed blocks per tile of rows, if the rows exceed the L2 cache
STRIP = 64  # rows of the left operand per packing task
ROWS = 2048  # rows of the left operand that are packed before they are used, at most
BLOCK = 256  # the same for symbolic rows: the buffer has this size however few there are


@dataclass(frozen=True)
class Plan:
    """Blocking of a matrix product."""

    tile: Tile
    depth: int  # elements of the contracted axis per block
    group: int  # packed blocks per group
    packed_rows: int  # rows of the left operand packed at a time, or 0 if tiles read the operand directly

    @property
    def row_stride(self) -> int:
        """Row stride of the packed copy: whole vectors, but not a power of two (avoids cache-set conflicts)."""
        return -(-self.depth // 16) * 16 + 16


def plan_of(product: Product, kernel: Kernel, machine: Machine) -> Plan:
    bits = product.kind.bits
    schedule = [int(n) for n in machine.schedules.get(str(product), "").split("x") if n]
    tile = Tile(*schedule[:2]) if schedule else tile_for(product.m, product.n, machine, bits)
    limit = schedule[2] if len(schedule) > 2 else max_depth(tile, product, machine)
    parts = count(product.k, limit)
    # Equal blocks of whole vectors rather than full ones and a short rest, whose tiles would cost as
    # much to start.
    depth = product.k if parts == 1 else -(-product.k // (parts * 16)) * 16
    packed_blocks = count(product.n, tile.columns)
    # Rows that do not stay in the L2 cache are streamed once for each packed block: matrices of 2048
    # then ran at 0.36 of oneDNN's speed, with groups of packed blocks at 1.0 (commit 250e4cdc). Where
    # rows stay, groups of one halve the arena of small models (commit 4e4b6929).
    exceeds_cache = typical(product.m) * depth * bits // 8 > machine.cache // 2
    group = max(1, min(GROUP, packed_blocks // machine.threads)) if exceeds_cache else 1
    copied = (
        typical(product.m)
        if should_copy_rows(strided_operand(product.left, kernel.producers), product, packed_blocks, machine)
        else 0
    )
    if copied and not isinstance(product.m, int):
        copied = BLOCK
    elif copied > ROWS:
        copied = -(-product.m // (count(product.m, ROWS) * STRIP)) * STRIP
    return Plan(tile, depth, group, copied)


def max_depth(tile: Tile, product: Product, machine: Machine) -> int:
    """Return the largest depth of a block for which a group of packed blocks fits a quarter of the L2 cache."""
    # At least 64: storing and loading partial sums must cost little next to the products of a block.
    return max(64, machine.cache * 8 // (4 * GROUP * tile.columns * product.kind.bits))


def should_copy_rows(left: StridedOperand | None, product: Product, packed_blocks: int, machine: Machine) -> bool:
    """Whether packing the left operand costs less than reading it for each group of packed blocks."""
    # Computed or converted elements would be computed again for each packed block.
    if left is None or left.value.dtype is not product.kind:
        return packed_blocks > 1
    exceeds_cache = left.summed != 1 and typical(product.m) * product.k * product.kind.bits // 8 > machine.cache
    return exceeds_cache and packed_blocks > GROUP


def schedules(node: Node, machine: Machine) -> list[str]:
    """Return the tiles that fit the registers and the result; for long sums, also depths of the blocks."""
    product = product_of(node)
    if product is None:
        return []
    lanes, registers = machine.lanes(product.kind.bits), 32 if machine.vector_bytes == 64 else 16
    sizes = [(rows, vectors) for vectors in (1, 2, 3, 4) for rows in (1, 2, 4, 6, 8, 12, 14, 16)]
    fitting = [
        Tile(rows, vectors * lanes)
        for rows, vectors in sizes
        # Accumulators, one row of the packed block and one broadcast element must fit the registers: a
        # spilled accumulator costs a store and a load for each product.
        if rows <= product.m and (vectors - 1) * lanes < product.n and rows * vectors + vectors + 1 <= registers
        # Smaller tiles are left out, since each choice is compiled and timed: accumulators in less than
        # half of the registers do not hide the latency of an addition.
        if 2 * rows * vectors >= min(registers, 2 * product.m)
    ]
    default = tile_for(product.m, product.n, machine, product.kind.bits)
    depths = [d for d in (256, 512, 1024, 2048) if d < product.k]
    parts = [f"{default.rows}x{default.columns}x{d}" for d in (*depths, product.k)] if depths else []
    return [f"{tile.rows}x{tile.columns}" for tile in fitting] + parts


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return the buffers: packed blocks per thread, packed rows, and partial sums that no result can store."""
    product = product_of(kernel.anchor)
    if product is None:
        return []
    int8x4 = int8x4_products.form(kernel, product, machine)
    if int8x4 is not None:
        return int8x4_products.scratch(int8x4, machine)
    if gemv.is_supported(kernel, product, machine) and isinstance(product.m, int):
        return []
    plan, threads = plan_of(product, kernel, machine), machine.threads
    needs_sums = plan.depth < product.k and result_for_sums(kernel, product) is None
    sizes = {
        "packed_block": threads * plan.group * plan.tile.columns * plan.depth,
        "rows": plan.packed_rows * plan.row_stride * (threads if per_thread_matrices(product, machine) else 1),
        "sums": product.matrices * product.m * product.n if needs_sums else 0,
    }
    return [Value(name, TensorType(product.kind, (size,))) for name, size in sizes.items() if size]


def per_thread_matrices(product: Product, machine: Machine) -> bool:
    """Whether each thread computes separate matrices."""
    # Each thread needs buffers of its own for this. With few matrices that threads do not divide
    # evenly some would be idle during the last one; from four per thread on the idle part is small.
    return product.matrices > 1 and (product.matrices % machine.threads == 0 or product.matrices >= 4 * machine.threads)


def result_for_sums(kernel: Kernel, product: Product) -> Value | None:
    """Return a result that can store partial sums, or None if there is none."""
    fits = (v for v in kernel.outputs if v.dtype is product.kind and shape_of(v) == shape_of(kernel.anchor.result))
    return next(fits, None)


def packing(kernel: Kernel, right: np.ndarray[Any, Any], machine: Machine) -> Packing | None:
    """Return the order in which a constant right operand is packed, or None if it is read unpacked."""
    product = product_of(kernel.anchor)
    if product is None or product.batch or product.transposed or right.ndim != 2:
        return None
    int8x4s = int8x4_products.packing(kernel, product, right, machine)
    if int8x4s is not None:
        return int8x4s
    if right.dtype != product.right.value.dtype.numpy:
        return None  # converted where it is read
    return Packing("columns", (plan_of(product, kernel, machine).tile.columns,))


@lowers(ops.dot, is_producer=True)
@lowers(ops.matmul, is_producer=True, packing=packing)
def matmul(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``matmul`` and ``dot``."""
    product = product_of(kernel.anchor)
    if product is None:
        simple = naive_contractions.matmul if kernel.anchor.op is ops.matmul else naive_contractions.dot
        return simple(kernel, name, machine)
    frame = KernelBuilder(kernel, name, machine)
    int8x4 = int8x4_products.form(kernel, product, machine)
    if int8x4 is not None:
        int8x4_products.write(frame, int8x4)
    elif not gemv.is_supported(kernel, product, machine):
        Tiles(frame, product).write()
    elif isinstance(product.m, int):
        gemv.write(frame, product)
    else:
        gemv.write_few(frame, product)
        with frame.code.when(t.index(product.m) > gemv.MAX_ROWS), frame.reader.loop("many", 1):
            Tiles(frame, product).write()
    return frame.finish()


def segments(total: Any, size: int) -> list[tuple[Any, Any, Any]]:
    """Split a size into segments of equal size and the remainder; return (start, count, size) of each.

    A symbolic size may have no remainder: its count is then zero at run time.
    """
    parts, rest = total // size, total % size
    if not isinstance(total, int):
        return [(0, parts, size), (parts * size, t.select(t.index(rest) > 0, t.index(1), t.index(0)), rest)]
    return [s for s in ((0, parts, size), (parts * size, 1, rest)) if s[1] and s[2]]


class Tiles:
    """Loops over matrices, blocks of the contracted axis, packed blocks and tiles."""

    def __init__(self, frame: KernelBuilder, product: Product) -> None:
        kernel, machine = frame.kernel, frame.machine
        self.frame, self.product, self.reader = frame, product, frame.reader
        self.plan = plan_of(product, kernel, machine)
        self.lanes = machine.lanes(product.kind.bits)
        self.left, self.right = (strided_operand(side, kernel.producers) for side in (product.left, product.right))
        feeding = {product.left.value, product.right.value}
        follow = [n for n in kernel.nodes if n is not kernel.anchor and n.result not in feeding]
        self.epilogue = len(follow) > 0
        self.vector = vectorizable(follow) and gemv.is_contiguous(product, kernel)
        self.scratch = {v.name: frame.outputs[v] for v in kernel.scratch}
        self.worker: Any = None  # the thread that computes the current matrix, if threads compute separate matrices

    def write(self) -> None:
        p = self.product
        if per_thread_matrices(p, self.frame.machine):
            with self.frame.share("matrix", p.matrices, p.work) as (self.worker, item):
                self.matrix(self.reader.split(item, p.batch))
        else:
            with self.reader.nest("", p.batch) as batch_index:
                self.matrix(batch_index)

    @contextmanager
    def share(self, name: str, items: int, work: int) -> Iterator[tuple[Any, Any]]:
        """Loop over items, in parallel unless each thread computes separate matrices."""
        if self.worker is None:
            with self.frame.share(name, items, work) as indices:
                yield indices
        else:
            with self.reader.loop(name, items) as i:
                yield self.worker, i

    def matrix(self, batch_index: Index) -> None:
        p, plan, columns = self.product, self.plan, self.plan.tile.columns
        if not plan.packed_rows:  # each thread completes its sums, so threads synchronize once
            for first, packed_blocks, width in segments(p.n, columns):
                with self.groups(first // columns, packed_blocks, width, p.m, p.work // p.matrices) as group:
                    for loop in self.parts(batch_index, 0, p.m):
                        with loop as part:
                            part.multiply(group)
            return
        for first_row, blocks, rows in segments(p.m, plan.packed_rows):
            with self.reader.loop("block", blocks) as block:
                for loop in self.parts(batch_index, first_row + block * rows, rows):
                    with loop as part:
                        part.copy_left()
                        for first, packed_blocks, width in segments(p.n, columns):
                            with self.groups(first // columns, packed_blocks, width, rows, part.work) as group:
                                part.multiply(group)

    def parts(self, batch_index: Index, row: Any, rows: int) -> Iterator[AbstractContextManager[Part]]:
        """Return loops over blocks of the contracted axis."""
        k = self.product.k

        @contextmanager
        def over_parts(first: int, parts: int, depth: int) -> Iterator[Part]:
            with self.reader.loop("part", parts) as i:
                start: Any = first == 0
                if start and parts > 1:
                    start = t.equal(i, 0)
                last: Any = first + parts * depth == k
                if last and parts > 1:
                    last = t.equal(i, parts - 1)
                yield Part(self, batch_index, row, first + i * depth, rows, depth, start, last)

        return (over_parts(*segment) for segment in segments(k, self.plan.depth))

    @contextmanager
    def groups(self, first: int, packed_blocks: int, width: int, rows: int, work: int) -> Iterator[Group]:
        """Loop over groups of ``packed_blocks`` in parallel; split the rows as well if there are few groups."""
        plan = self.plan
        group, work = min(plan.group, packed_blocks), work * width * packed_blocks // self.product.n
        items = count(packed_blocks, group)
        threads = self.frame.workers(work, rows) if self.worker is None else 1
        # Many groups balance by themselves; few that threads do not divide would leave some threads
        # idle, so rows are split.
        uneven = items % threads != 0 and items < 4 * threads
        splits = threads if uneven and rows % threads == 0 and rows // threads >= plan.tile.rows else 1
        with self.share("group", items * splits, work) as (worker, item):
            number, split = self.reader.split(item, (items, splits))
            number = number * group
            group_size: Any = group
            if packed_blocks % group:
                left = packed_blocks - number
                group_size = t.select(left < group, left, t.index(group))
            group_rows = rows // splits
            yield Group(worker * plan.group, number + first, group_size, width, split * group_rows, group_rows)


@dataclass(frozen=True)
class Group:
    """Consecutive packed blocks, and the rows that are multiplied with them."""

    slot: Any  # buffer slot of the first packed block's copy
    number: Any
    packed_blocks: Any
    width: int
    row: Any
    rows: int


@dataclass(frozen=True)
class Part:
    """Rows of one matrix of the result, and a block of the contracted axis."""

    tiles: Tiles
    batch_index: Index
    row: Any
    begin: Any
    rows: int
    depth: int
    first: Any
    last: Any

    @property
    def work(self) -> int:
        p = self.tiles.product
        return p.work // p.matrices * self.rows // p.m * self.depth // p.k

    def multiply(self, group: Group) -> None:
        """Multiply the rows with all packed blocks of a group."""
        s, width = self.tiles, group.width
        copied = not self.reads_unpacked(width, group.rows)
        if copied:
            with s.reader.loop("packed_block", group.packed_blocks) as i:
                self.copy_packed_block(group.number + i, group.slot + i, width)
        for loop, tile_rows in tiles(s.frame, group.rows, s.plan.tile):
            with loop as row, s.reader.loop("packed_block", group.packed_blocks) as i:
                number = group.number + i
                packed_block = self.packed_block(group.slot + i) if copied else self.stored_packed_block(number, width)
                assert packed_block is not None
                self.tile(group.row + row, tile_rows, number, packed_block, width)

    # -- the left operand -----------------------------------------------------------------------------------------
    def copy_left(self) -> None:
        s = self.tiles
        for first, strips, rows in segments(self.rows, STRIP):
            is_long = not isinstance(strips, int) or strips > 1
            with s.share("strip", strips, self.work // GROUP if is_long else 0) as (_, strip):
                self.copy_rows(first + strip * STRIP, rows)

    def copy_rows(self, first: Any, rows: int) -> None:
        s = self.tiles
        row = self.row + first
        matrix = (
            None if s.left is None else s.left.matrix(self.batch_index, s.product.kind, s.reader).part(row, self.begin)
        )

        def element(i: Any, j: Any) -> t.Expr:
            if matrix is not None:
                return matrix.element(i, j)
            return s.product.left.element(s.reader, self.batch_index, row + i, self.begin + j)

        copy_packed_block(s.frame, element, matrix, rows, self.depth, self.copy().part(first, 0))

    def copy(self) -> Matrix:
        s, row_stride = self.tiles, self.tiles.plan.row_stride
        start = (s.worker or 0) * (s.plan.packed_rows * row_stride)
        return Matrix(s.scratch["rows"], start, row_stride, 1, s.product.kind, s.product.kind)

    def left(self, row: Any, k: Any) -> t.Expr:
        s = self.tiles
        if s.plan.packed_rows:
            return s.reader.code.let(self.copy().element(row, k))
        row = self.row + row
        if s.left is None:
            return s.product.left.element(s.reader, self.batch_index, row, self.begin + k)
        matrix = s.left.matrix(self.batch_index, s.product.kind, s.reader)
        return s.reader.code.let(matrix.part(row, self.begin).element(0, k))  # the loop variable comes last

    # -- the right operand ----------------------------------------------------------------------------------------
    def reads_unpacked(self, width: int, rows: int) -> bool:
        """Whether tiles read the operand unpacked: contiguous, and converting on each read costs less than packing."""
        s = self.tiles
        packed_block, fits_tile = self.stored_packed_block(0, width), isinstance(rows, int) and rows <= s.plan.tile.rows
        if packed_block is None or packed_block.column != 1:
            return False
        is_packed = s.product.right.value in s.frame.kernel.prepared
        return (fits_tile and (is_packed or width % s.lanes == 0)) or (
            is_packed and packed_block.dtype is packed_block.kind
        )

    def stored_packed_block(self, number: Any, width: int) -> Matrix | None:
        """Return the stored elements of a packed block as [k, column], or None if they are computed."""
        s, columns = self.tiles, self.tiles.plan.tile.columns
        p, kernel = s.product, s.frame.kernel
        if p.right.value in kernel.prepared:
            packed = kernel.prepared[p.right.value][0]
            start, buffer = number * (columns * p.k), s.reader.buffers[packed]
            matrix = Matrix(buffer, start, columns, 1, packed.dtype, p.kind, constant=True)
            return matrix.part(self.begin, 0)
        if s.right is None:
            return None
        matrix = s.right.matrix(self.batch_index, p.kind, s.reader).transposed()
        return matrix.part(self.begin, number * columns)

    def packed_block(self, slot: Any) -> Matrix:
        """Return the packed packed block in a buffer slot."""
        s, columns = self.tiles, self.tiles.plan.tile.columns
        start = slot * (columns * s.plan.depth)
        return Matrix(s.scratch["packed_block"], start, columns, 1, s.product.kind, s.product.kind)

    def copy_packed_block(self, number: Any, slot: Any, width: int) -> None:
        s = self.tiles
        matrix, column = self.stored_packed_block(number, width), number * s.plan.tile.columns

        def element(i: Any, j: Any) -> t.Expr:
            if matrix is not None:
                return matrix.element(i, j)
            return s.product.right.element(s.reader, self.batch_index, column + j, self.begin + i)

        copy_packed_block(s.frame, element, matrix, self.depth, width, self.packed_block(slot))

    # -- the result -----------------------------------------------------------------------------------------------
    def tile(self, row: Any, tile_rows: int, number: Any, packed_block: Matrix, width: int) -> None:
        s, p = self.tiles, self.tiles.product
        column = number * s.plan.tile.columns

        def emit(i: Any, j: Any, element: t.Expr) -> None:
            gemv.emit(s.frame, p, self.batch_index, self.row + i, column + j, element)

        def sum_slot(i: Any, j: Any) -> tuple[t.Buffer, Any]:
            result = result_for_sums(s.frame.kernel, p)
            buffer = s.scratch["sums"] if result is None else s.frame.outputs[result]
            return buffer, p.flat(s.reader, self.batch_index, self.row + i, column + j)

        sums = None if self.depth == p.k else PartialSums(sum_slot, self.first, self.last)
        multiply_tile(
            s.frame, row, tile_rows, (self.depth,), self.left, packed_block, width, emit, s.vector, sums, s.epilogue
        )
